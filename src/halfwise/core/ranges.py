"""Whether a format can hold what a layer computes: its largest values, and its gradients at a loss scale.

Measures of rounding error are blind to infinity, so this is asked before anything else.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from halfwise.core.formats import get_format
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Profile, Role

__all__ = [
    "HEADROOM",
    "LARGEST_UNDERFLOW",
    "LOSS_SCALES",
    "RangeVerdict",
    "Window",
    "loss_scale_window",
    "needs_loss_scale",
    "range_gate",
]

HEADROOM = 8.0
"""How much larger than seen a value may become in later training and must still fit."""

LARGEST_UNDERFLOW = 0.05
"""Share of a layer's non-zero gradient values that may round to zero at the loss scale."""

LOSS_SCALES = tuple(2.0**k for k in range(25))
"""The loss scales that are considered: 1 to 2^24, its bounds."""

Window = tuple[float, float]
"""The lowest and the highest loss scale at which a layer's gradients fit a format."""

_FORWARD: tuple[tuple[Role, str], ...] = (("activation", "activation"), ("weight", "weight"))
_BACKWARD: tuple[tuple[Role, str], ...] = (
    ("activation_gradient", "activation gradient"),
    ("weight_gradient", "weight gradient"),
)


@dataclass(frozen=True)
class RangeVerdict:
    """Whether a format can hold what a layer computes.

    Attributes:
        fits: it can.
        largest: upper bound of the largest magnitude that decided.
        underflow: upper bound of the share of non-zero gradient values that round to zero at the loss scale.
        detail: one sentence with the numbers.
    """

    fits: bool
    largest: float
    underflow: float
    detail: str


def range_gate(profile: Profile, path: str, format_name: str, loss_scale: float = 1.0) -> RangeVerdict:
    """Whether activations, weights and (at the loss scale) gradients of the layer fit the format, with `HEADROOM`.

    Evidence that holds infinities or NaN never fits. A float8 format is scaled to each tensor's largest value, so that
    every finite tensor fits it.
    """
    limit = math.inf if _scales_itself(format_name) else get_format(format_name).largest
    largest = 0.0
    for role, what in _FORWARD:
        histogram = profile.get(path, role)
        if histogram is None:
            continue
        largest = max(largest, histogram.largest)
        if _nonfinite(histogram):
            return RangeVerdict(False, histogram.largest, 0.0, f"its {what}s hold inf or NaN in float32 already")
        if histogram.largest * HEADROOM > limit:
            detail = (
                f"largest {what} up to {histogram.largest:.3g}; "
                f"{format_name} holds {limit:.6g}, and {HEADROOM:g} times is kept free"
            )
            return RangeVerdict(False, histogram.largest, 0.0, detail)
    underflow = 0.0
    for role, what in _BACKWARD:
        histogram = profile.get(path, role)
        if histogram is None:
            continue
        if _nonfinite(histogram):
            return RangeVerdict(False, histogram.largest, 0.0, f"its {what}s hold inf or NaN in float32 already")
        if histogram.largest * loss_scale * HEADROOM > limit:
            detail = (
                f"largest {what} up to {histogram.largest:.3g} at loss scale {loss_scale:g}; "
                f"{format_name} holds {limit:.6g}, and {HEADROOM:g} times is kept free"
            )
            return RangeVerdict(False, histogram.largest, 0.0, detail)
        if _scales_itself(format_name):
            continue
        share = histogram.underflow(format_name, loss_scale).upper
        underflow = max(underflow, share)
        if share > LARGEST_UNDERFLOW:
            detail = (
                f"{share:.1%} of its {what}s round to zero in {format_name} at loss scale {loss_scale:g}; "
                f"allowed {LARGEST_UNDERFLOW:.0%}"
            )
            return RangeVerdict(False, histogram.largest, share, detail)
    return RangeVerdict(True, largest, underflow, "")


def needs_loss_scale(format_name: str) -> bool:
    """True for formats with fewer exponents than float32 and no scaling of their own: float16."""
    return get_format(format_name).exponent_bits < get_format("float32").exponent_bits and not _scales_itself(
        format_name
    )


def loss_scale_window(profile: Profile, path: str, format_name: str) -> Window | None:
    """The loss scales of `LOSS_SCALES` at which the layer fits the format; None where there is none.

    What rounds to zero becomes less with a growing scale, and what overflows more, so a window has no holes.
    """
    if not needs_loss_scale(format_name):
        return (LOSS_SCALES[0], LOSS_SCALES[-1]) if range_gate(profile, path, format_name).fits else None
    gradients = [found for role, _ in _BACKWARD if (found := profile.get(path, role)) is not None]
    largest = max((found.largest for found in gradients), default=0.0)
    low_enough = [scale for scale in LOSS_SCALES if largest * scale * HEADROOM <= get_format(format_name).largest]

    def high_enough(scale: float) -> bool:
        return all(found.underflow(format_name, scale).upper <= LARGEST_UNDERFLOW for found in gradients)

    fitting = low_enough[bisect_left(low_enough, True, key=high_enough) :]
    if not fitting or not range_gate(profile, path, format_name, fitting[0]).fits:  # its activations or weights
        return None
    return fitting[0], fitting[-1]


def _scales_itself(format_name: str) -> bool:
    return format_name.startswith("float8")


def _nonfinite(histogram: ExponentHistogram) -> bool:
    return histogram.infinities > 0 or histogram.nans > 0
