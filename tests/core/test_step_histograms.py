"""Histograms of a step count once the step is kept."""

from __future__ import annotations

import numpy as np

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.step_histograms import StepHistograms

ONES = ExponentHistogram.of(np.ones(3, np.float32))


def test_kept_steps_add_up_and_others_are_forgotten() -> None:
    found = StepHistograms()
    found.add("a", "weight", ONES)
    found.add("a", "weight", ONES)
    found.keep()
    found.add("a", "weight", ONES)
    found.add("b", "activation", ONES)
    found.discard()
    found.add("a", "weight", ONES)
    found.keep()
    assert found.profile.paths() == ("a",)
    histogram = found.profile.get("a", "weight")
    assert histogram is not None
    assert histogram.total == 9
