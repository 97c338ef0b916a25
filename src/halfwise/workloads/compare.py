"""What a step of a trained workload costs under its plan, against plain float32 steps on the same batches."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

from halfwise.workloads.training import Batch, Step, Training

__all__ = ["PairedTime", "compare_with_float32"]

_WARM_UP = 2


@dataclass(frozen=True)
class PairedTime:
    """Medians over pairs of steps, taken in turns.

    Attributes:
        seconds: one step under the plan, with everything that halfwise does.
        seconds_float32: one step of a loop without halfwise, in float32.
        ratio: median of the pairs' ratios: below 1 the plan is faster.
        low, high: the middle half of the pairs' ratios lies between them.
        pairs: how many pairs were taken.
    """

    seconds: float
    seconds_float32: float
    ratio: float
    low: float
    high: float
    pairs: int


def compare_with_float32(training: Training, *, pairs: int = 30, budget: float = 5.0) -> PairedTime:
    """Times the plan in force in `training` against float32: fresh copies of the network, same batches, interleaved.

    Args:
        training: stays as it is.
        pairs: at most so many pairs of steps.
        budget: seconds after which no new pair begins, once there are three.
    """
    plan_step, float32_step = training.steps_to_compare()
    batches = itertools.cycle(itertools.islice(training.batches(0), 8))
    for batch in itertools.islice(batches, _WARM_UP):
        plan_step(*batch)
        float32_step(*batch)
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(times) < pairs and (len(times) < 3 or time.perf_counter() - began < budget):
        batch = next(batches)
        if len(times) % 2:  # who goes first changes, so that neither always finds the caches warm
            times.append((_timed(plan_step, batch), _timed(float32_step, batch)))
        else:
            second = _timed(float32_step, batch)
            times.append((_timed(plan_step, batch), second))
    ratios = sorted(mine / theirs for mine, theirs in times)
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return PairedTime(
        seconds=statistics.median(mine for mine, _ in times),
        seconds_float32=statistics.median(theirs for _, theirs in times),
        ratio=ratio,
        low=low,
        high=high,
        pairs=len(times),
    )


def _timed(step: Step, batch: Batch) -> float:
    began = time.perf_counter()
    step(*batch)
    return time.perf_counter() - began
