"""Loss scales that suit, from histograms of gradients."""

from __future__ import annotations

import numpy as np
import pytest

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Profile
from halfwise.core.scale_range import (
    largest_fitting_scale,
    largest_gradient,
    loss_scale_range,
    underflow_share,
)

SMALL = ExponentHistogram.of(np.full(100, 1.5 * 2.0**-20, np.float32))
LARGE = ExponentHistogram.of(np.full(100, 3.0, np.float32))
TINY = ExponentHistogram.of(np.array([1.0] * 50 + [2.0**-60] * 50, np.float32))


def _profile(**layers: ExponentHistogram) -> Profile:
    return Profile({(path, "activation_gradient"): histogram for path, histogram in layers.items()})


def test_the_largest_gradient_bounds_it_above_and_what_vanishes_below() -> None:
    small = ExponentHistogram.of(np.full(100, 1.5 * 2.0**-30, np.float32))
    found = loss_scale_range(_profile(fc=LARGE, stem=small), ["fc", "stem"])
    assert (found.largest, found.highest, found.used) == (2.0**14, 2.0**11, 2.0**11)
    assert found.lowest == 2.0**5  # 1.5 * 2^-30 * 2^5 is above 2^-25, below which float16 rounds to zero


def test_only_the_layers_asked_for_count() -> None:
    assert loss_scale_range(_profile(fc=LARGE, stem=SMALL), ["stem"]).largest == 2.0**24
    assert loss_scale_range(Profile(), ["fc"]).largest == 2.0**24


def test_what_vanishes_at_every_scale_raises_no_bound() -> None:
    assert loss_scale_range(_profile(fc=TINY), ["fc"]).lowest == 1.0


def test_a_known_limit_and_a_given_scale() -> None:
    found = loss_scale_range(_profile(fc=SMALL), ["fc"], largest=4.0, used=1024.0)
    assert (found.largest, found.highest, found.used) == (4.0, 1.0, 1024.0)


@pytest.mark.parametrize(
    ("gradient", "scale"), [(0.0, 2.0**24), (65504.0, 1.0), (1e30, 1.0), (65504.0 / 4, 4.0), (1e-30, 2.0**24)]
)
def test_the_largest_scale(gradient: float, scale: float) -> None:
    assert largest_fitting_scale(gradient) == scale


def test_shares_and_largest_of_both_roles() -> None:
    profile = _profile(fc=TINY).with_histogram("fc", "weight_gradient", LARGE)
    assert underflow_share(profile, "fc", 1.0) == 0.5
    assert underflow_share(profile, "fc", 1.0, "bfloat16") == 0.0
    assert largest_gradient(profile, "fc") == 3.0
    assert (underflow_share(profile, "other", 1.0), largest_gradient(profile, "other")) == (0.0, 0.0)
