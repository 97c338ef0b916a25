"""Trainings of planted cases: in float32, under the plan for a format, and in the format everywhere; no guard."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import halfwise.torch as hw
from _planted_cases import CASES, Case
from halfwise.torch.emulation import emulation
from halfwise.torch.measure import timed_layers

__all__ = ["HEADERS", "trained"]

HEADERS = ("case", "format", "float32", "plan", "everywhere", "steps skipped", "spread", "plan off by", "everywhere")


def trained(kind: str, trouble: str, name: str, *, framework: str, seeds: int, steps: int) -> list[Any]:
    """The mean loss over seeds in three precisions, and how far from float32 they are.

    That is the largest distance of the plan with the same seed, and the smallest of the format everywhere.
    """
    case = next(c for c in CASES if (c.kind, c.trouble) == (kind, trouble))
    train: Callable[..., tuple[float, int]] = _in_torch if framework == "torch" else _in_keras
    losses: dict[str, list[float]] = {"float32": [], "plan": [], f"mixed_{name}": []}
    skipped = 0
    for seed in range(seeds):
        for policy, found in losses.items():
            loss, left_out = train(case, name, policy, seed, steps)
            found.append(loss)
            skipped += left_out if policy == f"mixed_{name}" else 0
    spread = statistics.stdev(losses["float32"]) if seeds > 1 else 0.0
    full, plan, uniform = losses.values()
    apart = max(map(_distance, plan, full)), min(map(_distance, uniform, full))
    means = map(statistics.mean, losses.values())
    return [case.name, name, *means, f"{skipped} of {seeds * steps}", spread, *apart]


def _in_torch(case: Case, name: str, policy: Any, seed: int, steps: int) -> tuple[float, int]:
    """The float32 loss over the batches after training by CUDA's rules, emulated; and the steps that were skipped."""
    from _planted_torch import planted

    workload, _ = planted(case, seed)
    closures = [partial(workload.loss, workload.model, batch) for batch in workload.batches]
    if policy == "plan":
        timing = hw.TimingTable.uniform(timed_layers(workload.model), relative={name: 0.5})
        policy = hw.plan(workload.model, closures, timing=timing)
    torch.manual_seed(seed)
    with emulation(name):
        mp = hw.MixedPrecision(workload.model, workload.optimizer, policy, guard=False, log=lambda _: None)
        for number in range(steps):
            mp.step(closures[number % len(closures)])
        mp.close()
    torch.manual_seed(seed)  # the same dropout for all
    with torch.no_grad():
        return float(torch.stack([closure() for closure in closures]).mean()), mp.skipped_steps


def _in_keras(case: Case, name: str, policy: Any, seed: int, steps: int) -> tuple[float, int]:
    """The mean of the training's last losses, one of each batch; and the steps that were skipped."""
    import keras

    import halfwise.keras as hwk
    from _planted_keras import planted
    from halfwise.keras.measure import timed_layers as timed_in_keras

    workload, _ = planted(case, seed)
    model, batches = workload.model, workload.batches
    if policy == "plan":
        timing = hwk.TimingTable.uniform(timed_in_keras(model), relative={name: 0.5})
        policy = hwk.plan(model, list(batches), loss=workload.loss, timing=timing)
    keras.utils.set_random_seed(seed)
    guard = hwk.PrecisionGuard(policy, guard=False, log=lambda _: None)
    step = partial(hwk.step, model, loss=workload.loss, optimizer=workload.optimizer, guard=guard)
    losses = [step(*batches[number % len(batches)]).loss for number in range(steps)]
    return statistics.mean(losses[-len(batches) :]), guard.skipped_steps


def _distance(one: float, other: float) -> float:
    """Infinite where one is not a number."""
    return abs(one - other) if math.isfinite(one - other) else math.inf
