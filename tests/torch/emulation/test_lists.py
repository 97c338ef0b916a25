"""The frozen table against the installed PyTorch: its header, and the kernels that it has registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfwise.torch.emulation import lists


def test_the_table_is_that_of_the_installed_pytorch() -> None:
    assert lists.drift() == ()
    assert len(lists.header_lists()) == 116  # else the header was not understood


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax.int": "lower_precision"}, "softmax.int is float32_set_opt_dtype in the installed PyTorch, lower_"),
        ({"linear": None}, "linear is lower_precision in the installed PyTorch, on no list in the table"),
        ({"linear": None}, "linear has a kernel for CUDA's autocast and is not in the table"),
        ({"relu": "float32"}, "relu is in the table and has no kernel for CUDA's autocast"),
    ],
)
def test_drift_is_told(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str) -> None:
    table = {name: kind for name, kind in {**lists.CATEGORIES, **change}.items() if kind is not None}
    monkeypatch.setattr(lists, "CATEGORIES", table)
    assert any(message in sentence for sentence in lists.drift())


def test_operations_on_no_list_exist_and_have_no_kernel_of_cudas() -> None:
    names = torch._C._dispatch_get_all_op_names()
    for name in (*lists.RECURRENT, *lists.CARELESS):
        assert f"aten::{name}" in names
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
