"""The floating-point formats that halfwise knows: their limits, and rounding to them.

A format's name carries its convention: `float8_e4m3fn` ("fn": finite, NaN) has no infinity, `float8_e5m2` has one.
Importing this module loads neither numpy nor ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from halfwise.errors import PolicyError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["FORMATS", "Format", "get_format", "round_to"]


@dataclass(frozen=True)
class Format:
    """The facts of a floating-point format. All limits are exact in a Python float.

    Attributes:
        name: as in `FORMATS`.
        bits: bits that carry information: 19 for tensorfloat32, although it is stored in 32.
        exponent_bits: bits of the exponent.
        mantissa_bits: explicit bits of the mantissa, without the leading one.
        largest: largest finite value.
        smallest_normal: smallest positive value with full precision.
        smallest_subnormal: smallest positive value.
        has_infinity: whether values beyond `largest` become inf; where False they become NaN.

    >>> get_format("float16").largest
    65504.0
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    has_infinity: bool = True

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def largest_rounded_to_zero(self) -> float:
        """Largest magnitude that rounds to zero: half of `smallest_subnormal`, a tie, which goes to the even zero."""
        return self.smallest_subnormal / 2


def _with_infinity(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """A format laid out as IEEE 754 does: the highest exponent is kept for inf and NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    return Format(
        name=name,
        bits=1 + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        largest=(2.0 - 2.0**-mantissa_bits) * 2.0**bias,
        smallest_normal=2.0 ** (1 - bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
    )


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            _with_infinity("float32", 8, 23),
            _with_infinity("tensorfloat32", 8, 10),
            _with_infinity("bfloat16", 8, 7),
            _with_infinity("float16", 5, 10),
            # Only the pattern of all ones is NaN: the highest exponent serves for finite values too.
            Format("float8_e4m3fn", 8, 4, 3, 448.0, 2.0**-6, 2.0**-9, has_infinity=False),
            _with_infinity("float8_e5m2", 5, 2),
        )
    }
)


def get_format(name: str) -> Format:
    """The format called `name`.

    Raises:
        PolicyError: there is no such format.

    >>> get_format("bfloat16").eps
    0.0078125
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise PolicyError(f"unknown format {name!r}: use one of {', '.join(FORMATS)}") from None


def round_to(values: npt.ArrayLike, format: Format | str) -> npt.NDArray[np.float32]:  # noqa: A002
    """`values` rounded to `format`, to nearest, ties to even, as float32, which holds the values of every format.

    Beyond the range, values become inf, or NaN where the format has no infinity (ml_dtypes' convention; torch's cast to
    `float8_e4m3fn` saturates at 448 instead). NaN stays NaN.

    tensorfloat32 exists in no array library: here the lower 13 bits of a float32 are rounded away, ties to even.
    Hardware may truncate, or round ties away from zero (PTX `cvt.rna`): at most one ulp of tensorfloat32 apart.

    Args:
        values: real numbers of any shape. Other dtypes than float32 are converted to float32 first.
        format: a `Format` or a name in `FORMATS`.

    Returns:
        a new float32 array of the same shape.

    Raises:
        PolicyError: there is no such format.
        UsageError: the values are not real numbers.

    >>> import numpy as np
    >>> round_to(np.array([1.001, 70000.0, 2e-8]), "float16").tolist()
    [1.0009765625, inf, 0.0]
    """
    import numpy as np

    chosen = format if isinstance(format, Format) else get_format(format)
    given = np.asarray(values)
    if np.issubdtype(given.dtype, np.complexfloating) or given.dtype.kind in "OSUMm":
        raise UsageError(f"round_to got dtype {given.dtype}: give an array of real numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        single = given.astype(np.float32)
        if chosen.name == "float32":
            return single
        if chosen.name == "tensorfloat32":
            return _round_mantissa(single, dropped_bits=23 - chosen.mantissa_bits)
        return single.astype(_array_dtype(chosen.name)).astype(np.float32)


def _array_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of the format called `name`, which is not tensorfloat32."""
    import ml_dtypes
    import numpy as np

    return np.dtype(name if name in ("float16", "float32") else getattr(ml_dtypes, name))


def _round_mantissa(single: npt.NDArray[np.float32], dropped_bits: int) -> npt.NDArray[np.float32]:
    """`single` without the lowest `dropped_bits` bits of its mantissa. A carry may reach inf, as it should."""
    import numpy as np

    bits = single.view(np.uint32)
    is_odd = (bits >> np.uint32(dropped_bits)) & np.uint32(1)
    below_half = np.uint32((1 << (dropped_bits - 1)) - 1)
    rounded = (bits + below_half + is_odd) & np.uint32(0xFFFFFFFF << dropped_bits & 0xFFFFFFFF)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)
