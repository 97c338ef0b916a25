"""Precision regions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfwise.errors import PolicyError
from halfwise.torch.region import device_type_of, region


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_products_run_in_the_format(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), region("cpu", name):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is getattr(torch, name)


def test_one_weight_in_two_half_formats_needs_the_cache_off() -> None:
    linear = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with region("cpu", "float32"):
        with region("cpu", "bfloat16"):
            linear(x)
        with region("cpu", "float16"), pytest.raises(RuntimeError, match="same"):
            linear(x)
        with region("cpu", "float16", cache=False):
            assert linear(x).dtype is torch.float16


def test_other_formats_are_refused() -> None:
    with pytest.raises(PolicyError, match="float8_e5m2"):
        region("cpu", "float8_e5m2")


def test_device_type() -> None:
    assert device_type_of(nn.Linear(1, 1)) == "cpu"
    assert device_type_of(nn.Linear(1, 1, device="meta")) == "meta"
    assert device_type_of(nn.ReLU()) == "cpu"
