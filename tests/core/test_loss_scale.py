"""The loss scale against the traces of the tools that it reproduces, and against its own bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfwise.core.loss_scale import (
    CEILING,
    LOWEST_FLOOR,
    LossScaleSettings,
    LossScaleState,
    initial_state,
    update,
)
from halfwise.errors import PolicyError

FLAGS = [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]


def trace(settings: LossScaleSettings, flags: list[int]) -> list[int]:
    state, scales = initial_state(settings), []
    for flag in flags:
        state = update(settings, state, bool(flag))
        scales.append(int(state.scale))
    return scales


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            LossScaleSettings.torch(initial=1024.0, growth_interval=4),
            "512 512 256 256 128 128 128 128 256 256 128 64 64 64 64 128 128 128",
        ),
        (
            LossScaleSettings.deepspeed(initial=1024.0, growth_interval=4),
            "512 512 256 256 128 128 128 128 128 256 128 64 64 64 64 64 128 128",
        ),
        (
            LossScaleSettings.deepspeed(initial=1024.0, growth_interval=4, hysteresis=2),
            "1024 1024 512 512 256 256 256 256 256 512 512 256 256 256 256 256 512 512",
        ),
    ],
    ids=["torch", "deepspeed", "hysteresis 2"],
)
def test_reproduces_known_traces(settings: LossScaleSettings, expected: str) -> None:
    assert trace(settings, FLAGS) == [int(word) for word in expected.split()]


def deepspeed_reference(flags: list[int], scale: float, window: int, hysteresis: int) -> list[int]:
    """DeepSpeed's rule written down independently.

    It grows when (steps since the last overflow - 1) is a multiple of the window.
    """
    last, left, scales = -1, hysteresis, []
    for iteration, flag in enumerate(flags):
        if flag:
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, 1.0)
            last = iteration
        else:
            stable = iteration - last - 1
            if stable > 0 and stable % window == 0:
                scale, left = min(scale * 2, CEILING), hysteresis
        scales.append(int(scale))
    return scales


@given(st.lists(st.integers(0, 1), max_size=80), st.integers(1, 6), st.integers(1, 3))
def test_agrees_with_deepspeeds_rule(flags: list[int], window: int, hysteresis: int) -> None:
    settings = LossScaleSettings.deepspeed(initial=1024.0, growth_interval=window, hysteresis=hysteresis)
    assert trace(settings, flags) == deepspeed_reference(flags, 1024.0, window, hysteresis)


@given(
    st.lists(st.booleans(), max_size=400),
    st.sampled_from([LOWEST_FLOOR, 1.0, 64.0]),
    st.sampled_from([4096.0, CEILING]),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_never_leaves_its_bounds(
    flags: list[bool], floor: float, ceiling: float, interval: int, hysteresis: int
) -> None:
    settings = LossScaleSettings(
        initial=4096.0, floor=floor, ceiling=ceiling, growth_interval=interval, hysteresis=hysteresis
    )
    state = initial_state(settings)
    for flag in flags:
        state = update(settings, state, flag)
        assert floor <= state.scale <= ceiling
        assert math.isfinite(1.0 / state.scale)


def test_recovers_from_any_number_of_overflows() -> None:
    settings = LossScaleSettings(growth_interval=2)
    state = initial_state(settings)
    for _ in range(1000):
        state = update(settings, state, True)
    assert state.scale == 1.0
    for _ in range(8):
        state = update(settings, state, False)
    assert state.scale == 16.0


@pytest.mark.parametrize(
    "values",
    [
        {"floor": 2.0**-15},
        {"ceiling": 2.0**25},
        {"floor": 8.0, "ceiling": 4.0},
        {"initial": 0.5},
        {"initial": math.nan},
        {"initial": math.inf},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"growth_delay": -1},
        {"growth_interval": 2.5},
        {"hysteresis": True},
        {"initial": "65536"},
    ],
)
def test_refuses_settings_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="allowed"):
        LossScaleSettings(**values)  # type: ignore[arg-type]


def test_state_is_a_value() -> None:
    state = initial_state(LossScaleSettings())
    assert update(LossScaleSettings(), state, True) != state
    assert state == LossScaleState(scale=65536.0)
