"""The smallest fix for a fault, as lines to paste."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras

from halfwise.core.diagnosis import Suspect
from halfwise.core.formats import get_format, round_to
from halfwise.keras.tracing.records import Record
from halfwise.keras.tracing.slicing import CONTRACTIONS, SOFTMAX_LIKE, Origin

__all__ = [
    "Epsilon",
    "epsilon_behind",
    "fixes_for_float32",
    "fixes_for_half_code",
    "fixes_for_precision",
    "fixes_for_scale",
    "is_for_want_of_precision",
    "smallest_epsilon",
]

_ADDING = frozenset({"add", "subtract", "clip", "clip_by_value", "clamp", "maximum"})
_LOGARITHMS = frozenset({"log", "log2", "log10"})
_DIVISIONS = frozenset({"divide", "reciprocal", "rsqrt", "power", "normalize"})
_ROOTS = frozenset({"sqrt", "norm"})
_HALF = ("float16", "bfloat16")
_SEARCHED = 6  # records to look back for an epsilon


class Epsilon(NamedTuple):
    """A small constant in the code, and the format that it is added in."""

    value: float
    dtype: str

    @property
    def rounded(self) -> float:
        """What the format makes of it."""
        return float(round_to(self.value, self.dtype))


def smallest_epsilon(operation: str, format_name: str) -> float:
    """The smallest epsilon, rounded up to two digits, with which the operation survives a zero, forward and backward.

    A logarithm and a division need 1 / eps to be finite in the format, a root needs eps itself not to round to zero.

    >>> smallest_epsilon("log", "float16")
    1.6e-05
    >>> smallest_epsilon("sqrt", "float16")
    6e-08
    """
    limits = get_format(format_name)
    least = limits.smallest_subnormal if operation in _ROOTS | {"rsqrt"} else 1 / limits.largest
    digits = 1 - math.floor(math.log10(least))
    return float(f"{math.ceil(least * 10**digits) / 10**digits:.1e}")


def epsilon_behind(origin: Origin) -> Epsilon | None:
    """The small constant that was added to an input of the operation, or to which it was clamped; None where none is
    seen.
    """
    pending, seen = [given.producer for given in origin.record.inputs], 0
    while pending and seen < _SEARCHED:
        index = pending.pop(0)
        if index < 0:
            continue
        parent = origin.records[index]
        seen += 1
        small = [abs(s) for s in parent.scalars if 0 < abs(s) < 1e-2] if parent.operation in _ADDING else []
        if small and parent.output is not None:
            return Epsilon(small[0], parent.output.dtype)
        pending += [given.producer for given in parent.inputs]
    return None


def is_for_want_of_precision(origin: Origin) -> bool:
    """Whether float32 would have saved the operation, judged by it alone: an overflow in half, or an epsilon lost in
    half.

    A NaN or a division by zero from sound inputs is the same in every precision.
    """
    if _lost_epsilon(origin) is not None:
        return True
    if origin.result.dtype not in _HALF:
        return False
    if origin.result.found == "nan":
        return origin.record.operation in CONTRACTIONS
    return not _divides(origin.record)


def fixes_for_precision(origin: Origin, suspect: Suspect, half_format: str) -> list[str]:
    """What cures a fault that float32 does not have."""
    lines = _smaller_cures(origin)
    if suspect.module_class and suspect.module:
        plan = f'hw.Plan.manual({{"{suspect.module}": "float32"}}, default="{half_format}", framework="keras")'
        return [
            *lines,
            "import halfwise.keras as hw",
            f"hw.apply(model, {plan})",
            "# or without halfwise, where the layer is made:",
            f'{_class(suspect.module_class)}(..., dtype="float32")',
        ]
    return [
        *lines,
        f"# compute {suspect.source or 'the loss'} in float32, its inputs cast there:",
        'x = keras.ops.cast(x, "float32")',
    ]


def fixes_for_half_code(origin: Origin, suspect: Suspect) -> list[str]:
    """What cures code that goes to half by itself."""
    at = suspect.source or "that line"
    return [
        *_smaller_cures(origin),
        f'x = keras.ops.cast(x, "float32")  # before {suspect.operation} at {at}, in place of half precision',
    ]


def fixes_for_scale(largest: float) -> list[str]:
    """What cures gradients that overflow only because of the loss scale."""
    return [
        f"optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale={largest!r})  # or let it settle",
        "# hw.PrecisionGuard() in fit(callbacks=[...]) keeps the scale between bounds by itself",
    ]


def fixes_for_float32(origin: Origin) -> list[str]:
    """What may cure a fault that float32 has too."""
    name = origin.record.operation
    if any(part in name for part in SOFTMAX_LIKE):
        return [
            "a row of the mask hides every position: leave one visible, or clear the result: "
            "keras.ops.nan_to_num(weights)"
        ]
    if name in _LOGARITHMS:
        return [
            "keep the logarithm's input positive: keras.ops.log(keras.ops.maximum(x, 1e-12)), "
            "or use log_softmax / log_sigmoid"
        ]
    if name in _ROOTS:
        return ["keep the root's input above 0, where its gradient is infinite: keras.ops.sqrt(x + 1e-12)"]
    if name in _DIVISIONS:
        return ["keep the divisor away from 0: y / (x + 1e-12), or y / keras.ops.maximum(x, 1e-12)"]
    if name.startswith("exp"):
        return ["keep the exponent under 88: keras.ops.exp(keras.ops.minimum(x, 80.0)), or use logsumexp / softmax"]
    return ["look at this batch and at the learning rate: lower it, or clip: keras.optimizers.Adam(..., clipnorm=1.0)"]


def _smaller_cures(origin: Origin) -> Sequence[str]:
    """Cures that are smaller than float32, for causes that can be seen."""
    epsilon = _lost_epsilon(origin)
    if epsilon is not None:
        smallest = smallest_epsilon(origin.record.operation, epsilon.dtype)
        why = "rounds to 0" if epsilon.rounded == 0.0 else "is too small"
        return [f"eps = {smallest:g}  # the smallest that works; {epsilon.value:g} {why} in {epsilon.dtype}"]
    result, record = origin.result, origin.record
    if result.dtype in _HALF and result.found == "-inf" and record.operation in ("add", "subtract", "cast"):
        lowest = -get_format(result.dtype).largest
        lows = [-abs(scalar) for scalar in record.scalars] + [given.extent.low for given in record.inputs]
        if any(low <= 0.9 * lowest for low in lows):
            return [
                f"# the mask's constant leaves no room in {result.dtype} (lowest {lowest:g}): a row can become -inf",
                f"scores = keras.ops.where(hidden, {lowest / 2:g}, scores)",
            ]
    return []


def _lost_epsilon(origin: Origin) -> Epsilon | None:
    """An epsilon in half that is too small to protect the operation."""
    if not _divides(origin.record):
        return None
    epsilon = epsilon_behind(origin)
    if epsilon is None or epsilon.dtype not in _HALF:
        return None
    return epsilon if epsilon.value < smallest_epsilon(origin.record.operation, epsilon.dtype) else None


def _divides(record: Record) -> bool:
    """Whether the record is a division, logarithm or root: what fails at 0 and not at large values."""
    return record.operation in _LOGARITHMS | _DIVISIONS | _ROOTS


def _class(name: str) -> str:
    """The layer's class as it is written."""
    return f"keras.layers.{name}" if hasattr(keras.layers, name) else name
