"""The loss scale as a value with a pure update: bounded below and above, with hysteresis.

Why bounds: an unbounded scale halves at every overflow until its reciprocal is infinite, and the next
good batch then writes NaN into every weight (after 144 overflows in a row with torch's `GradScaler`, 166
with Keras' `LossScaleOptimizer`).

The presets reproduce, flag for flag, torch's `torch.amp.GradScaler` and DeepSpeed's
`FP16_Optimizer`, with hysteresis 1 or 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from halfwise.errors import PolicyError

__all__ = ["CEILING", "LOWEST_FLOOR", "LossScaleSettings", "LossScaleState", "initial_state", "update"]

LOWEST_FLOOR = 2.0**-14
CEILING = 2.0**24


@dataclass(frozen=True, kw_only=True)
class LossScaleSettings:
    """How the loss scale moves.

    Attributes:
        initial: the first scale; default 65536, as in torch.
        floor: the scale never falls below; default 1, never under 2^-14.
        ceiling: the scale never rises above; default and at most 2^24.
        growth_factor: multiplies the scale when it grows; default 2.
        backoff_factor: multiplies the scale when it backs off; default 0.5.
        growth_interval: healthy steps in a row before the scale grows; default 2000.
        hysteresis: overflows that are tolerated before the scale backs off, less one: 1 (default) backs off at once,
            2 at the second overflow since the scale last grew.
        growth_delay: healthy steps after an overflow that do not count towards `growth_interval`: 0
            (default) as in torch, 1 as in DeepSpeed.

    Raises:
        PolicyError: a value is out of range.

    >>> LossScaleSettings(initial=1024.0, growth_interval=4).floor
    1.0
    """

    initial: float = 65536.0
    floor: float = 1.0
    ceiling: float = CEILING
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    growth_delay: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, whole = getattr(self, item.name), item.name in ("growth_interval", "hysteresis", "growth_delay")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "an integer" if whole else "a number"
                raise PolicyError(f"loss scale setting {item.name} = {value!r} is no such thing; allowed: {kind}")
        _require(
            LOWEST_FLOOR <= self.floor <= self.ceiling, "floor", self.floor, f"2^-14 to the ceiling ({self.ceiling:g})"
        )
        _require(self.floor <= self.ceiling <= CEILING, "ceiling", self.ceiling, f"the floor ({self.floor:g}) to 2^24")
        _require(
            self.floor <= self.initial <= self.ceiling, "initial", self.initial, f"{self.floor:g} to {self.ceiling:g}"
        )
        _require(1.0 < self.growth_factor < math.inf, "growth_factor", self.growth_factor, "more than 1")
        _require(0.0 < self.backoff_factor < 1.0, "backoff_factor", self.backoff_factor, "between 0 and 1")
        _require(self.growth_interval >= 1, "growth_interval", self.growth_interval, "at least 1")
        _require(self.hysteresis >= 1, "hysteresis", self.hysteresis, "at least 1")
        _require(self.growth_delay >= 0, "growth_delay", self.growth_delay, "at least 0")

    @classmethod
    def torch(cls, *, initial: float = 65536.0, growth_interval: int = 2000) -> LossScaleSettings:
        """As `torch.amp.GradScaler` moves it, within bounds."""
        return cls(initial=initial, growth_interval=growth_interval)

    @classmethod
    def deepspeed(
        cls, *, initial: float = 65536.0, growth_interval: int = 1000, hysteresis: int = 1
    ) -> LossScaleSettings:
        """As DeepSpeed's `FP16_Optimizer` moves it (hysteresis 1), within bounds."""
        return cls(initial=initial, growth_interval=growth_interval, hysteresis=hysteresis, growth_delay=1)


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """Where the loss scale stands.

    Attributes:
        scale: the loss scale.
        hysteresis_left: overflows until the scale backs off.
        growth_tracker: healthy steps counted towards the next growth (what `GradScaler` calls `_growth_tracker`).
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 1


def initial_state(settings: LossScaleSettings) -> LossScaleState:
    """The state before the first step."""
    return LossScaleState(
        scale=settings.initial, growth_tracker=-settings.growth_delay, hysteresis_left=settings.hysteresis
    )


def update(settings: LossScaleSettings, state: LossScaleState, found_nonfinite: bool) -> LossScaleState:
    """The state after a step; `found_nonfinite` says whether its gradients were unusable.

    >>> settings = LossScaleSettings.torch(initial=1024.0, growth_interval=4)
    >>> state, scales = initial_state(settings), []
    >>> for flag in (1, 0, 1, 0, 0, 0, 0):
    ...     state = update(settings, state, bool(flag))
    ...     scales.append(int(state.scale))
    >>> scales
    [512, 512, 256, 256, 256, 256, 512]
    """
    if found_nonfinite:
        stopped = replace(state, growth_tracker=-settings.growth_delay)
        if state.hysteresis_left > 1:
            return replace(stopped, hysteresis_left=state.hysteresis_left - 1)
        return replace(stopped, scale=max(state.scale * settings.backoff_factor, settings.floor))
    tracker = state.growth_tracker + 1
    if tracker < settings.growth_interval:
        return replace(state, growth_tracker=tracker)
    return LossScaleState(
        scale=min(state.scale * settings.growth_factor, settings.ceiling),
        growth_tracker=0,
        hysteresis_left=settings.hysteresis,
    )


def _require(condition: bool, name: str, value: float, allowed: str) -> None:
    if not condition:  # also where the value is NaN
        raise PolicyError(f"loss scale setting {name} = {value!r} is out of range; allowed: {allowed}")
