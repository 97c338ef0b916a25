"""The same trace of overflows gives the same loss scales, applied steps and skips in every adapter."""

from __future__ import annotations

import numpy as np
import pytest
from tests.contract.adapter import Adapter, Outcome, Training, Weights
from tests.contract.cases import GOOD, ORDINARY, OVERFLOW

from halfwise.core.loss_scale import LossScaleSettings

FLAGS = (1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)

# The scale after each step. The first three are what torch's GradScaler and DeepSpeed's FP16_Optimizer give.
TRACES = {
    "torch": (
        LossScaleSettings.torch(initial=1024.0, growth_interval=4),
        FLAGS,
        (512, 512, 256, 256, 128, 128, 128, 128, 256, 256, 128, 64, 64, 64, 64, 128, 128, 128),
    ),
    "deepspeed": (
        LossScaleSettings.deepspeed(initial=1024.0, growth_interval=4),
        FLAGS,
        (512, 512, 256, 256, 128, 128, 128, 128, 128, 256, 128, 64, 64, 64, 64, 64, 128, 128),
    ),
    "deepspeed with hysteresis": (
        LossScaleSettings.deepspeed(initial=1024.0, growth_interval=4, hysteresis=2),
        FLAGS,
        (1024, 1024, 512, 512, 256, 256, 256, 256, 256, 512, 512, 256, 256, 256, 256, 256, 512, 512),
    ),
    "descent, localised at the fourth overflow in a row": (
        LossScaleSettings(initial=1024.0),
        (0, 1, 1, 1, 1, 1, 0, 0),
        (1024, 512, 256, 128, 64, 32, 32, 32),
    ),
    "bounded": (
        LossScaleSettings(initial=256.0, floor=128.0, ceiling=512.0, growth_interval=2),
        (0, 0, 0, 0, 1, 1, 0, 0),
        (256, 512, 512, 512, 256, 128, 128, 256),
    ),
}


def same(a: Weights, b: Weights) -> bool:
    return all(np.array_equal(p, q) for name in a for p, q in zip(a[name], b[name], strict=True))


def run(training: Training, flags: tuple[int, ...]) -> tuple[list[Outcome], list[float], list[bool]]:
    """Each step's outcome, the scale after it, and whether the weights moved."""
    outcomes, scales, moved = [], [], []
    for flag in flags:
        before = training.weights()
        outcomes.append(training.step(OVERFLOW if flag else GOOD))
        scales.append(training.loss_scale)
        moved.append(not same(before, training.weights()))
    return outcomes, scales, moved


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("name", TRACES)
def test_scales_applied_steps_and_skips(adapter: Adapter, name: str, guard: bool) -> None:
    settings, flags, expected = TRACES[name]
    training = adapter.training(adapter.plan("float16", scale=settings), ORDINARY, guard=guard)
    outcomes, scales, moved = run(training, flags)
    assert scales == list(expected)
    assert [o.loss_scale for o in outcomes] == [settings.initial, *expected[:-1]]
    assert [o.applied for o in outcomes] == moved == [not flag for flag in flags]
    assert (training.steps, training.skipped_steps) == (len(flags), sum(flags))
    assert training.incidents == ()  # a scale that is too high is none
    assert all(np.isfinite(o.loss) for o in outcomes)
    assert [bool(np.isfinite(o.grad_norm)) for o in outcomes] == moved
