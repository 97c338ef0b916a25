"""Which formats a layer may compute in at all: by its range, and by what rounding does beside training's own noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from halfwise.core.plan import Reason
from halfwise.core.profile import Profile
from halfwise.core.ranges import LOSS_SCALES, RangeVerdict, Window, loss_scale_window, needs_loss_scale, range_gate
from halfwise.core.sensitivity import Sensitivity
from halfwise.core.timing import TimingTable

__all__ = ["LEAST_GRADIENT_NOISE", "LEAST_LOSS_NOISE", "Because", "Sieve"]

LEAST_LOSS_NOISE = 0.05
"""Noise of the loss that every training is taken to have, relative to the loss: few batches may agree by chance."""

LEAST_GRADIENT_NOISE = 0.25
"""Noise of a weight gradient that every training is taken to have, relative to the gradient."""

Because = tuple[Reason, str]
"""A reason and its sentence."""


class Sieve:
    """Evidence on the layers of `timing`, and what it forbids.

    Args:
        profile, timing, sensitivity, tolerance, kept: as in `halfwise.core.planner.plan_from`.
    """

    def __init__(
        self,
        profile: Profile,
        timing: TimingTable,
        sensitivity: Sensitivity | None = None,
        *,
        tolerance: float = 0.1,
        kept: Mapping[str, Because] = {},
    ) -> None:
        self.profile = profile
        self.timing = timing
        self.sensitivity = sensitivity
        self.tolerance = tolerance
        self.kept = kept
        self._windows: dict[tuple[str, str], Window | None] = {}

    @cached_property
    def budget(self) -> float:
        """What all layers together may change the loss by, squared; infinite without sensitivities."""
        if self.sensitivity is None:
            return math.inf
        noise = max(self.sensitivity.loss_noise, LEAST_LOSS_NOISE * abs(self.sensitivity.loss))
        return (self.tolerance * noise) ** 2

    def score(self, path: str, format_name: str) -> float:
        """The squared change of the loss that rounding the layer brings; 0 where that is unknown."""
        found = self.sensitivity.get(path, format_name) if self.sensitivity is not None else None
        return found.score if found is not None else 0.0

    def refusal(self, path: str, format_name: str, loss_scale: float) -> Because | None:
        """Why the layer may not compute in the format at this loss scale; None where it may."""
        if path in self.kept:
            return self.kept[path]
        if self.profile.get(path, "activation") is None:
            return "range", "it never ran, so its range is unknown"
        window = self._window(path, format_name)
        if window is None or not window[0] <= loss_scale <= window[1]:
            return "range", self.range_verdict(path, format_name, loss_scale).detail
        if (sentence := self._too_sensitive(path, format_name)) is not None:
            return "sensitivity", sentence
        if self.timing.get(path, format_name) is None:
            return "slower", f"{format_name} was not measured"
        return None

    def range_verdict(self, path: str, format_name: str, loss_scale: float) -> RangeVerdict:
        """Whether the format holds the layer's values."""
        scale = loss_scale if needs_loss_scale(format_name) else 1.0
        return range_gate(self.profile, path, format_name, scale)

    def loss_scales(self) -> list[float]:
        """A loss scale for each set of layers that could compute in float16 together, the larger sets alone."""
        scaled = [name for name in self.timing.formats if needs_loss_scale(name)]
        windows = {path: [self._window(path, name) for name in scaled] for path in self.timing.seconds}
        sets: dict[frozenset[str], list[float]] = {}
        for scale in LOSS_SCALES:
            fitting = frozenset(
                path
                for path, found in windows.items()
                if path not in self.kept and any(window and window[0] <= scale <= window[1] for window in found)
            )
            sets.setdefault(fitting, []).append(scale)
        largest = [fitting for fitting in sets if not any(fitting < other for other in sets)]
        return [_middle(sets[fitting]) for fitting in largest]

    def common_loss_scale(self, formats: Mapping[str, str], near: float) -> float:
        """The middle of the loss scales at which all layers fit the formats that they are given; `near` is one."""
        windows = [self._window(path, name) for path, name in formats.items() if needs_loss_scale(name)]
        low = max((window[0] for window in windows if window), default=near)
        high = min((window[1] for window in windows if window), default=near)
        common = [scale for scale in LOSS_SCALES if low <= scale <= high]
        return _middle(common) if common else near

    def _window(self, path: str, format_name: str) -> Window | None:
        key = path, format_name
        if key not in self._windows:
            self._windows[key] = loss_scale_window(self.profile, path, format_name)
        return self._windows[key]

    def _too_sensitive(self, path: str, format_name: str) -> str | None:
        sensitivity = self.sensitivity
        found = sensitivity.get(path, format_name) if sensitivity is not None else None
        if sensitivity is None or found is None:
            alone = format_name.startswith("float8")  # its range is no question, so that rounding alone decides
            return f"what rounding to {format_name} does to it is unknown" if alone else None
        if not found.score <= self.budget:
            if not math.isfinite(found.score):
                return f"what it gives in {format_name} is inf or NaN"
            return (
                f"rounding it to {format_name} changes the loss by {math.sqrt(found.score):.2g} (predicted); "
                f"allowed for all layers together: {math.sqrt(self.budget):.2g}"
            )
        noise = max(sensitivity.gradient_noise.get(path, 0.0), LEAST_GRADIENT_NOISE)
        allowed = math.sqrt(self.tolerance) * noise  # errors of steps are independent: variances are what adds up
        if not found.gradient_error <= allowed:
            if not math.isfinite(found.gradient_error):
                return f"its weight gradients in {format_name} are inf or NaN"
            return (
                f"{format_name} makes an error of {found.gradient_error:.2%} in its weight gradients; "
                f"beside their own noise {allowed:.2%} is allowed"
            )
        return None


def _middle(scales: list[float]) -> float:
    return scales[len(scales) // 2]
