"""Precision regions: what `torch.autocast` context a format means."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import nn

from halfwise.errors import PolicyError

__all__ = ["COMPUTE_DTYPES", "device_type_of", "region"]

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The formats that this adapter can compute in."""


def region(device_type: str, compute: str, *, cache: bool = True) -> AbstractContextManager[object]:
    """A context in which operations run in `compute` by torch's autocast lists, or plainly in float32.

    Autocast keeps the casts of weights until its outermost context ends, and looks them up by weight
    alone. Where one weight may be met in two half-precision formats within that time, `cache` must be
    False, or it is used in the wrong one.

    Raises:
        PolicyError: the format cannot be computed in.
    """
    if compute not in COMPUTE_DTYPES:
        raise PolicyError(f"cannot compute in {compute!r} here; allowed: {', '.join(COMPUTE_DTYPES)}")
    if compute == "float32":
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=COMPUTE_DTYPES[compute], cache_enabled=cache)


def device_type_of(model: nn.Module) -> str:
    """The kind of device that holds the model: that of its first parameter or buffer, `"cpu"` where it has none."""
    return next((tensor.device.type for tensor in chain(model.parameters(), model.buffers())), "cpu")
