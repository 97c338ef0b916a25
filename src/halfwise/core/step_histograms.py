"""Exponent histograms gathered over training steps: those of a step count once the step is known to be applied."""

from __future__ import annotations

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import Profile, Role

__all__ = ["StepHistograms"]


class StepHistograms:
    """What adapters' recorders fill.

    >>> import numpy as np
    >>> found = StepHistograms()
    >>> found.add("fc", "weight", ExponentHistogram.of(np.ones(3, np.float32)))
    >>> found.profile.paths()
    ()
    >>> found.keep()
    >>> found.profile.get("fc", "weight").total
    3
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Role], ExponentHistogram] = {}
        self._step: dict[tuple[str, Role], ExponentHistogram] = {}

    @property
    def profile(self) -> Profile:
        """What was gathered and kept so far."""
        return Profile(self._kept)

    def add(self, path: str, role: Role, histogram: ExponentHistogram) -> None:
        """Adds a histogram to those of the step under way."""
        earlier = self._step.get((path, role))
        self._step[path, role] = histogram if earlier is None else earlier + histogram

    def keep(self) -> None:
        """Adds what was recorded since the last call to the profile."""
        for key, histogram in self._step.items():
            earlier = self._kept.get(key)
            self._kept[key] = histogram if earlier is None else earlier + histogram
        self._step = {}

    def discard(self) -> None:
        """Forgets what was recorded since the last `keep`: a step that was not applied is no evidence."""
        self._step = {}
