"""Rounding tensors to a format while they stay in float32: what a format does to numbers, at the speed of float32.

Casting to half precision and back costs little; computing in it is many times slower on most CPUs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfwise.core.formats import get_format

__all__ = ["rounded"]

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def rounded(tensor: Tensor, format_name: str, *, scaled: bool = False) -> Tensor:
    """`tensor` rounded to the format, to nearest, ties to even, in its shape and dtype. No gradient flows through it.

    What overflows becomes inf, or NaN where the format has no infinity: torch's own cast to `float8_e4m3fn` saturates
    and would hide it.

    Args:
        tensor: floating; what is not float32 is rounded by way of float32.
        format_name: a name in `halfwise.FORMATS`.
        scaled: brings the largest magnitude to the format's largest value before, and divides by the same power of two
            after: float8's per-tensor scaling (arXiv 2209.05433), or what a loss scale does.

    Raises:
        PolicyError: there is no such format.

    >>> rounded(torch.tensor([1.001, 70000.0, 2e-8]), "float16").tolist()
    [1.0009765625, inf, 0.0]
    >>> rounded(torch.tensor([1.001, 70000.0]), "float8_e4m3fn", scaled=True).tolist()
    [1.0, 73728.0]
    """
    limits = get_format(format_name)
    values = tensor.detach().float()
    if format_name == "float32":
        return values.to(tensor.dtype)
    if format_name == "tensorfloat32":
        return _without_low_bits(values, 23 - limits.mantissa_bits).to(tensor.dtype)
    scale = _power_of_two_to_fit(values, limits.largest) if scaled else None
    scaled_values = values if scale is None else values * scale
    cast = scaled_values.to(_DTYPES[format_name]).float()
    if not format_name.startswith("float8"):
        return (cast if scale is None else cast / scale).to(tensor.dtype)
    ulp = limits.eps * 2.0 ** math.floor(math.log2(limits.largest))
    bound = limits.largest + ulp / 2.0
    tie_goes_up = limits.largest / ulp % 2.0 == 1.0
    magnitudes = scaled_values.abs()
    too_large = magnitudes >= bound if tie_goes_up else magnitudes > bound
    beyond = float("inf") if limits.has_infinity else float("nan")
    cast = torch.where(too_large, scaled_values.sign() * beyond, cast)
    cast = torch.where(scaled_values.isfinite(), cast, scaled_values if limits.has_infinity else scaled_values * beyond)
    return (cast if scale is None else cast / scale).to(tensor.dtype)


def _power_of_two_to_fit(values: Tensor, largest: float) -> Tensor:
    peak = values.abs().amax() if values.numel() else values.new_ones(())
    exponent = torch.floor(torch.log2(largest / peak)).clamp(-126.0, 126.0)
    return torch.where((peak > 0) & peak.isfinite(), torch.exp2(exponent), torch.ones_like(peak))


def _without_low_bits(values: Tensor, dropped: int) -> Tensor:
    bits = values.view(torch.int32)
    is_odd = (bits >> dropped) & 1
    below_half = (1 << (dropped - 1)) - 1
    kept = (bits + below_half + is_odd) & ~((1 << dropped) - 1)
    return torch.where(values.isfinite(), kept.view(torch.float32), values)
