"""Regions in another device's precision, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfwise.errors import PolicyError
from halfwise.torch.emulation.installation import installed
from halfwise.torch.region import COMPUTE_DTYPES, region

__all__ = ["emulated_region", "emulation"]

_DTYPES = {**COMPUTE_DTYPES, "float8": torch.bfloat16, "tensorfloat32": torch.float32}
_DEVICE_TYPES = ("cpu", "cuda", "tpu")


@contextmanager
def emulation(compute: str) -> Iterator[None]:
    """Within the block the CPU's autocast regions act as CUDA's. Compiled code runs eagerly meanwhile.

    To be held around forward and backward where the latter runs parts of the former again (checkpointing). In this
    thread `torch.autocast("cuda", ...)` is understood as said of the CPU.

    Args:
        compute: `"float32"`, `"bfloat16"`, `"float16"`, `"tensorfloat32"` or `"float8"`. The last makes float8 of
            regions in bfloat16; of the others a region's own format decides.

    Raises:
        PolicyError: it is none of these.
    """
    _check(compute)
    with installed(compute):
        yield


@contextmanager
def emulated_region(device_type: str, compute: str) -> Iterator[None]:
    """A precision region of another device, on the CPU. For forward pass and loss; the backward pass goes outside.

    A region within it may turn it off, `torch.autocast("cpu", enabled=False)`, or change its format, as
    `halfwise.torch.apply` does. While any thread is in one, autocast regions on the CPU act as CUDA's in all threads.

    Args:
        device_type: `"cuda"`; `"tpu"`, which is taken to follow CUDA's lists; `"cpu"` is this device's own region, as
            long as no emulation is in force; it has no tensorfloat32 and float8, and these follow CUDA's lists.
        compute: `"float32"`, `"bfloat16"` or `"float16"`: the device's autocast. `"tensorfloat32"`: float32, with the
            operands of products rounded. `"float8"`: bfloat16, with the operands of linear layers in float8, scaled
            per tensor (arXiv 2209.05433).

    Raises:
        PolicyError: the format, or the device, cannot be emulated.

    Example:
        >>> x = torch.full((2, 2), 200.0)
        >>> with emulated_region("cuda", "float16"):
        ...     product = x @ x
        ...     (product.dtype, product.softmax(1).dtype, float(product[0, 0]))
        (torch.float16, torch.float32, inf)
    """
    _check(compute)
    if device_type not in _DEVICE_TYPES:
        raise PolicyError(f"cannot emulate device {device_type!r}; allowed: {', '.join(_DEVICE_TYPES)}")
    if device_type == "cpu" and compute in COMPUTE_DTYPES:
        with region("cpu", compute):
            yield
        return
    with installed(compute):
        if compute == "float32":
            inner = torch.autocast("cpu", enabled=False)
        else:
            inner = torch.autocast("cpu", dtype=_DTYPES[compute])
        with inner, _as_seen_by_models(_DTYPES[compute]):
            yield


@contextmanager
def _as_seen_by_models(dtype: torch.dtype) -> Iterator[None]:
    """`torch.is_autocast_enabled()`, which reads CUDA's state, tells of the emulated one: some modules act by it."""
    enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not torch.float32)
    if dtype is not torch.float32:
        torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", before)


def _check(compute: str) -> None:
    if compute not in _DTYPES:
        raise PolicyError(f"cannot emulate {compute!r}; allowed: {', '.join(_DTYPES)}")
