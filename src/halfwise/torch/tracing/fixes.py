"""The smallest fix for a fault, as lines to paste."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from halfwise.core.diagnosis import Suspect
from halfwise.torch.tracing.operations import CONTRACTIONS, SOFTMAX_LIKE
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.slicing import Origins
from halfwise.torch.tracing.trace import Trace

__all__ = [
    "Epsilon",
    "divides",
    "epsilon_behind",
    "fixes_for_float32",
    "fixes_for_half_code",
    "fixes_for_precision",
    "fixes_for_scale",
    "is_for_want_of_precision",
    "lost_epsilon",
    "smallest_epsilon",
]

_ADDING = frozenset({"add", "add_", "sub", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})
_LOGARITHMS = frozenset({"log", "log2", "log10"})
_DIVISIONS = frozenset({"div", "div_", "reciprocal", "rsqrt", "pow"})
_ROOTS = frozenset({"sqrt", "norm", "linalg_vector_norm"})
_HALF = ("float16", "bfloat16")
_SEARCHED = 6  # records to look back for an epsilon


class Epsilon(NamedTuple):
    """A small constant in the code, and the format that it is added in."""

    value: float
    dtype: str

    @property
    def rounded(self) -> float:
        """What the format makes of it."""
        return float(torch.tensor(self.value).to(getattr(torch, self.dtype)))


def epsilon_behind(trace: Trace, record: Record) -> Epsilon | None:
    """The small constant that was added to an input of `record`, or to which it was clamped; None where none is
    seen.
    """
    pending, seen = [given.record for given in record.inputs], 0
    while pending and seen < _SEARCHED:
        parent = trace.records[pending.pop(0)]
        seen += 1
        small = [abs(s) for s in parent.scalars if 0 < abs(s) < 1e-2] if parent.short in _ADDING else []
        if small:
            return Epsilon(small[0], parent.dtype)
        pending += [given.record for given in parent.inputs]
    return None


def smallest_epsilon(short: str, format_name: str) -> float:
    """The smallest epsilon, rounded up to two digits, with which the operation survives a zero, forward and backward.

    A logarithm and a division need 1 / eps to be finite in the format, a root needs eps itself not to round to zero.

    >>> smallest_epsilon("log", "float16")
    1.6e-05
    >>> smallest_epsilon("sqrt", "float16")
    6e-08
    """
    info = torch.finfo(getattr(torch, format_name))
    least = info.smallest_normal * info.eps if short in _ROOTS | {"rsqrt"} else 1 / info.max
    digits = 1 - math.floor(math.log10(least))
    return float(f"{math.ceil(least * 10**digits) / 10**digits:.1e}")


def is_for_want_of_precision(trace: Trace, record: Record) -> bool:
    """Whether float32 would have saved `record`, judged by the record alone: an overflow in half, or an epsilon lost in
    half.

    A NaN or a division by zero from sound inputs is the same in every precision.
    """
    if lost_epsilon(trace, record) is not None:
        return True
    if record.dtype not in _HALF:
        return False
    if record.found == "nan":
        return record.short in CONTRACTIONS
    return not divides(record)


def divides(record: Record) -> bool:
    """Whether `record` is a division, logarithm or root, or the gradient of one: what fails at 0 and not at large
    values.
    """
    return _differentiated(record) in _LOGARITHMS | _DIVISIONS | _ROOTS


def fixes_for_precision(
    trace: Trace, found: Origins, suspects: Sequence[Suspect], half_format: str, device: str
) -> list[str]:
    """What cures a fault that float32 does not have."""
    first, record = suspects[0], found.operations[0]
    lines = _smaller_cures(trace, record)
    if first.module_class and first.module:
        return [
            *lines,
            "import halfwise.torch as hw",
            f'hw.apply(model, hw.Plan.manual({{"{first.module}": "float32"}}, default="{half_format}"))',
            "# or without halfwise, where the layer is called:",
            f'with torch.autocast("{device}", enabled=False): y = {_attribute(first.module)}(x.float())',
        ]
    return [
        *lines,
        f"# compute {first.source or 'the loss'} in float32, its inputs cast by .float():",
        f'with torch.autocast("{device}", enabled=False): ...',
    ]


def fixes_for_half_code(trace: Trace, record: Record, suspect: Suspect) -> list[str]:
    """What cures code that goes to half by itself."""
    at = suspect.source or "that line"
    return [
        *_smaller_cures(trace, record),
        f"x.float()  # instead of x.half() or a half constant, for the inputs of {suspect.operation} at {at}",
    ]


def fixes_for_scale(largest: float, device: str) -> list[str]:
    """What cures gradients that overflow only because of the loss scale."""
    return [
        f'scaler = torch.amp.GradScaler("{device}", init_scale={largest!r})  # or let it settle',
        "# hw.MixedPrecision(model, optimizer, policy=...) keeps the scale between bounds by itself",
    ]


def fixes_for_float32(found: Origins) -> list[str]:
    """What may cure a fault that float32 has too."""
    name = _differentiated(found.operations[0])
    if any(part in name for part in SOFTMAX_LIKE):
        return [
            "a row of the mask hides every position: leave one visible, or clear the result: torch.nan_to_num(weights)"
        ]
    if name in _LOGARITHMS or name == "xlogy":
        return ["keep the logarithm's input positive: torch.log(x.clamp_min(1e-12)), or use log_softmax / logsigmoid"]
    if name in _ROOTS:
        return ["keep the root's input above 0, where its gradient is infinite: torch.sqrt(x + 1e-12)"]
    if name in _DIVISIONS:
        return ["keep the divisor away from 0: y / (x + 1e-12), or y / x.clamp_min(1e-12)"]
    if name.startswith("exp"):
        return ["keep the exponent under 88: torch.exp(x.clamp(max=80)), or use logsumexp / softmax"]
    return [
        "look at this batch and at the learning rate: lower it, or clip: torch.nn.utils.clip_grad_norm_(params, 1.0)"
    ]


def _smaller_cures(trace: Trace, record: Record) -> list[str]:
    """Cures that are smaller than float32, for causes that can be seen."""
    epsilon = lost_epsilon(trace, record)
    if epsilon is not None:
        smallest = smallest_epsilon(_differentiated(record), epsilon.dtype)
        why = "rounds to 0" if epsilon.rounded == 0.0 else "is too small"
        return [f"eps = {smallest:g}  # the smallest that works; {epsilon.value:g} {why} in {epsilon.dtype}"]
    if record.dtype in _HALF and record.short in ("add", "add_", "sub", "sub_") and record.found == "-inf":
        lowest = float(torch.finfo(getattr(torch, record.dtype)).min)
        if _mask_constant(trace, record, lowest):
            return [
                f"# the mask's constant leaves no room in {record.dtype} (lowest {lowest:g}): a row can become -inf",
                'scores = scores.masked_fill(hidden, float("-inf"))  # or add torch.finfo(scores.dtype).min / 2',
            ]
    return []


def lost_epsilon(trace: Trace, record: Record) -> Epsilon | None:
    """An epsilon in half that is too small to protect the operation."""
    if not divides(record):
        return None
    epsilon = epsilon_behind(trace, record)
    if epsilon is None or epsilon.dtype not in _HALF:
        return None
    if epsilon.value >= smallest_epsilon(_differentiated(record), epsilon.dtype):
        return None
    return epsilon


def _differentiated(record: Record) -> str:
    """The short name of the forward operation: backward, that which is being differentiated."""
    return record.of.rpartition(".")[2] or record.short


def _mask_constant(trace: Trace, record: Record, lowest: float) -> bool:
    """Whether something at nearly the lowest number of the format was added."""
    return any(trace.records[given.record].low <= 0.9 * lowest for given in record.inputs) or any(
        -abs(scalar) <= 0.9 * lowest for scalar in record.scalars
    )


def _attribute(path: str) -> str:
    """`layers.3` as Python: `self.layers[3]`."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
