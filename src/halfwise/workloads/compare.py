"""What a step of a trained workload costs under its plan, against plain float32 steps on the same batches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import halfwise.torch as hw
from halfwise.workloads.training import ImageTraining, fresh_copy

__all__ = ["PairedTime", "compare_with_float32"]

_WARM_UP = 2

_Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class PairedTime:
    """Medians over pairs of steps, taken in turns.

    Attributes:
        seconds: one step under the plan, with everything that `MixedPrecision` does.
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


def compare_with_float32(training: ImageTraining, *, pairs: int = 30, budget: float = 5.0) -> PairedTime:
    """Times the plan in force in `training` against float32: fresh copies of the network, same batches, interleaved.

    Args:
        training: stays as it is.
        pairs: at most so many pairs of steps.
        budget: seconds after which no new pair begins, once there are three.
    """
    plan_step, float32_step = _plan_step(training), _float32_step(training)
    batches = itertools.cycle(itertools.islice(training.batches(0), 8))
    for images, labels in itertools.islice(batches, _WARM_UP):
        plan_step(images, labels)
        float32_step(images, labels)
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(times) < pairs and (len(times) < 3 or time.perf_counter() - began < budget):
        images, labels = next(batches)
        if len(times) % 2:  # who goes first changes, so that neither always finds the caches warm
            times.append((_timed(plan_step, images, labels), _timed(float32_step, images, labels)))
        else:
            second = _timed(float32_step, images, labels)
            times.append((_timed(plan_step, images, labels), second))
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


def _plan_step(training: ImageTraining) -> _Step:
    model = fresh_copy(training)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.settings.learning_rate)
    mp = hw.MixedPrecision(model, optimizer, training.mp.plan or training.mp.policy, log=lambda _: None)
    return lambda images, labels: float(mp.step(lambda: cross_entropy(model(images), labels)).loss)


def _float32_step(training: ImageTraining) -> _Step:
    model = fresh_copy(training)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.settings.learning_rate)

    def step(images: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def _timed(step: _Step, images: Tensor, labels: Tensor) -> float:
    began = time.perf_counter()
    step(images, labels)  # both steps read the loss, so an accelerator has finished
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
