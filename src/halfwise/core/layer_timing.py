"""How one layer's formats are timed against each other; what a pass is and how it is run is the adapter's affair.

A format's probe is cut short once its forward pass alone has taken longer than forward and backward in float32: that
the format is slower here is all that a planner needs to know. What else the machine does only ever lengthens a
measurement, so minima are taken, over interleaved rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["LayerTimes", "time_formats"]

_LOG = logging.getLogger("halfwise")

_FIRST_ROUNDS = 2  # the first one pays for allocations, and is no more than a bound
_LEAST_ROUNDS = 1
_WARM_UPS = 5
_WARMER = 0.7  # a call that takes more than this share of the one before it is as warm as it gets
_MOST_ROUNDS = 20
_ENOUGH_SECONDS = 2e-3  # of float32 probes for one layer


@dataclass(frozen=True)
class LayerTimes:
    """What one layer takes.

    Attributes:
        seconds: by format; a format that cannot run is left out.
        cut_short: the formats whose seconds are a lower bound.
        spread: seconds by which the measurements of one format differ: the median less the shortest, the largest over
            the formats.
    """

    seconds: dict[str, float]
    cut_short: frozenset[str]
    spread: float


def time_formats(
    path: str,
    formats: Sequence[str],
    probe: Callable[[str, float], float],
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> LayerTimes:
    """Times of one layer.

    Args:
        path: the layer's, for messages.
        formats: besides float32.
        probe: `probe(format, limit)` runs the layer forward and backward in the format and returns seconds; of the
            forward pass alone where that exceeds `limit` already.
        go_on: whether there is time for more rounds than the fewest that tell anything.

    Example:
        >>> found = time_formats("fc", ["bfloat16"], lambda name, limit: 0.001 if name == "float32" else 0.09)
        >>> found.seconds, sorted(found.cut_short)
        ({'float32': 0.001, 'bfloat16': 0.09}, ['bfloat16'])
    """
    endless = float("inf")
    times = {"float32": [probe("float32", endless) for _ in range(_FIRST_ROUNDS)]}
    cut_short: dict[str, float] = {}
    for name in formats:
        limit = min(times["float32"])
        quickest = endless
        try:
            for _ in range(_WARM_UPS):  # the first ones pay for this format's warm-up
                before, quickest = quickest, min(quickest, probe(name, limit))
                if quickest <= limit or quickest > min(_WARMER * before, _longest_warm_up(limit)):
                    break
        except Exception as error:  # what fails is not chosen
            _LOG.info("layer %r cannot run in %s: %s", path, name, error)
            continue
        if quickest > limit:
            cut_short[name] = quickest
        else:
            times[name] = []
    for number in range(_MOST_ROUNDS if len(times) > 1 else 0):
        if number >= _LEAST_ROUNDS and (sum(times["float32"]) > _ENOUGH_SECONDS or not go_on()):
            break
        for name, seconds in times.items():
            seconds.append(probe(name, endless))
    spread = max(median(seconds) - min(seconds) for seconds in times.values())
    seconds_by_format = {name: min(seconds) for name, seconds in times.items()} | cut_short
    return LayerTimes(seconds_by_format, frozenset(cut_short), spread)


def _longest_warm_up(limit: float) -> float:
    """A first call makes its kernels, which takes some milliseconds, for a tiny layer many times its own time."""
    return max(10.0 * limit, 0.05)
