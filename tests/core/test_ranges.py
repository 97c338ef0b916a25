"""The range gate on made-up evidence, and the window of loss scales."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Profile, Role
from halfwise.core.ranges import HEADROOM, LOSS_SCALES, loss_scale_window, needs_loss_scale, range_gate


def profile(**layers: Mapping[str, list[float]]) -> Profile:
    """A profile from values by layer and role."""
    histograms: dict[tuple[str, Role], ExponentHistogram] = {}
    for path, roles in layers.items():
        for role, values in roles.items():
            histograms[path, role] = ExponentHistogram.of(np.array(values, np.float32))  # type: ignore[index]
    return Profile(histograms)


SOUND = {"activation": [1.0, 0.5], "weight": [0.1], "activation_gradient": [1e-3], "weight_gradient": [1e-2]}


def with_role(role: str, *values: float) -> dict[str, list[float]]:
    return {**SOUND, role: list(values)}


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (SOUND, True),
        (with_role("activation", 7000.0), True),
        (with_role("activation", 65504.0 / HEADROOM * 1.3), False),
        (with_role("weight", 9000.0 * 1.3), False),
        (with_role("activation", 1.0, math.inf), False),
        (with_role("weight_gradient", 1.0, math.nan), False),
        (with_role("activation_gradient", 10.0), False),  # times 1024 and the headroom: 81920
        (with_role("activation_gradient", 5.0), True),
        (with_role("weight_gradient", 1e-12, 1.0), False),
        ({**SOUND, "weight_gradient": [1.0] * 99 + [1e-12]}, True),
    ],
)
def test_range_gate_for_float16_at_loss_scale_1024(layer: dict[str, list[float]], fits: bool) -> None:
    verdict = range_gate(profile(layer=layer), "layer", "float16", 1024.0)
    assert verdict.fits is fits
    assert (verdict.detail == "") is fits


def test_bfloat16_holds_what_float16_cannot() -> None:
    evidence = profile(layer=with_role("activation", 1e6))
    assert range_gate(evidence, "layer", "bfloat16").fits
    assert "65504" in range_gate(evidence, "layer", "float16").detail


def test_float8_is_scaled_to_every_finite_tensor() -> None:
    wide = {**SOUND, "activation": [1e30, 1e-30], "activation_gradient": [1e20, 1e-20]}
    assert range_gate(profile(layer=wide), "layer", "float8_e4m3fn").fits
    assert not range_gate(profile(layer=with_role("activation", math.inf)), "layer", "float8_e4m3fn").fits


def test_only_float16_needs_a_loss_scale() -> None:
    names = ("float32", "tensorfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    assert [name for name in names if needs_loss_scale(name)] == ["float16"]


values = st.lists(st.floats(2.0**-40, 2.0**16, width=32), min_size=1, max_size=30)


@given(values, values, st.floats(2.0**-10, 2.0**17, width=32))
def test_the_window_is_where_the_gate_is_open(gradients: list[float], of_weights: list[float], largest: float) -> None:
    layer = {"activation": [largest], "activation_gradient": gradients, "weight_gradient": of_weights}
    evidence = profile(layer=layer)
    open_at = [scale for scale in LOSS_SCALES if range_gate(evidence, "layer", "float16", scale).fits]
    expected = (open_at[0], open_at[-1]) if open_at else None
    assert loss_scale_window(evidence, "layer", "float16") == expected
    if expected is not None:
        assert open_at == [scale for scale in LOSS_SCALES if expected[0] <= scale <= expected[1]]


def test_formats_without_a_loss_scale_have_all_or_no_window() -> None:
    evidence = profile(sound=SOUND, bad=with_role("weight", math.nan))
    assert loss_scale_window(evidence, "sound", "bfloat16") == (1.0, 2.0**24)
    assert loss_scale_window(evidence, "bad", "bfloat16") is None
