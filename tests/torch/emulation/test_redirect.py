"""What models say to autocast of CUDA is understood within the emulation, and only there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import autocast_mode, custom_bwd, custom_fwd

from halfwise.torch.emulation import emulated_region, emulation

X = torch.ones(2, 2)


class Scaled(torch.autograd.Function):
    """Asks for float32 on CUDA, as libraries' functions do."""

    seen: tuple[torch.dtype, torch.dtype]

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Scaled.seen = (x.dtype, (x @ x).dtype)
        return x * 2.0

    @staticmethod
    @custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2.0


class Product(torch.autograd.Function):
    """Its backward pass wants forward's precision."""

    seen: torch.dtype

    @staticmethod
    @custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        result = gradients[0] @ ctx.saved_tensors[0].mT
        Product.seen = result.dtype
        return result


def test_regions_for_cuda_are_regions_here() -> None:
    with emulated_region("cuda", "bfloat16"):
        with torch.autocast("cuda", enabled=False):
            assert (X @ X).dtype is torch.float32
        with torch.autocast("cuda", dtype=torch.float16):
            assert (X @ X).dtype is torch.float16
        with torch.autocast("cuda"):
            assert (X @ X).dtype is torch.bfloat16
        assert (X @ X).dtype is torch.bfloat16
    with emulated_region("cuda", "tensorfloat32"), torch.autocast("cuda"):
        assert (X @ X).dtype is torch.float16


def test_custom_functions_for_cuda() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with emulation("float16"):
        with emulated_region("cuda", "float16"):
            loss = Scaled.apply(x @ x).sum() + Product.apply(x).float().sum()  # type: ignore[no-untyped-call]
        loss.backward()
    assert Scaled.seen == (torch.float32, torch.float32)
    assert Product.seen is torch.float16


def test_modules_that_ask_whether_autocast_is_on_get_cudas_answer() -> None:
    before = (False, torch.float16)
    assert (torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")) == before
    for compute, expected in (("bfloat16", True), ("float32", False), ("tensorfloat32", False)):
        with emulated_region("cuda", compute):
            assert torch.is_autocast_enabled() is expected
    with emulated_region("cuda", "bfloat16"):
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
    assert (torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")) == before


def test_other_threads_and_later_code_are_not_redirected() -> None:
    devices: list[str] = []
    names = (torch.autocast.__init__, autocast_mode._cast, torch.clear_autocast_cache)
    with emulation("float16"):
        thread = threading.Thread(target=lambda: devices.append(torch.autocast("cuda", enabled=False).device))
        thread.start()
        thread.join()
        devices.append(torch.autocast("cuda", enabled=False).device)
    assert [*devices, torch.autocast("cuda", enabled=False).device] == ["cuda", "cpu", "cuda"]
    assert names == (torch.autocast.__init__, autocast_mode._cast, torch.clear_autocast_cache)
    with emulation("float16"), pytest.warns(UserWarning, match="target dtype is not supported"):
        torch.autocast("cpu", dtype=torch.float32)
