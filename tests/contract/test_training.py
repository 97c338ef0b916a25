"""Every adapter trains as a loop written by hand does: the same updates, whatever the precision and the loss scale."""

from __future__ import annotations

import numpy as np
import pytest
from tests.contract.adapter import Adapter, Batch, Weights
from tests.contract.cases import GOOD, ORDINARY

RATE = 0.05


def by_hand(weights: Weights, batch: Batch, steps: int) -> tuple[Weights, list[float], list[float]]:
    """Gradient descent in float64: the weights, and each step's loss and gradient norm."""
    w = {name: (kernel.astype(np.float64), bias.astype(np.float64)) for name, (kernel, bias) in weights.items()}
    losses, norms = [], []
    for _ in range(steps):
        before = batch.x @ w["first"][0] + w["first"][1]
        hidden = np.maximum(before, 0.0)
        second = hidden @ w["second"][0] + w["second"][1]
        error = second @ w["head"][0] + w["head"][1] - batch.y
        at_head = 2.0 * error / error.size
        at_second = at_head @ w["head"][0].T
        at_first = (at_second @ w["second"][0].T) * (before > 0.0)
        gradients = {
            name: (x.T @ gradient, gradient.sum(0))
            for name, x, gradient in (
                ("first", batch.x, at_first),
                ("second", hidden, at_second),
                ("head", second, at_head),
            )
        }
        losses.append(float(np.square(error).mean()))
        norms.append(float(np.sqrt(sum(np.square(g).sum() for pair in gradients.values() for g in pair))))
        w = {name: (w[name][0] - RATE * gradients[name][0], w[name][1] - RATE * gradients[name][1]) for name in w}
    return {name: (k.astype(np.float32), b.astype(np.float32)) for name, (k, b) in w.items()}, losses, norms


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [("float32", 1e-5), ("mixed_float16", 5e-3), ("mixed_bfloat16", 3e-2)],  # about 10 roundings of the format each
)
def test_updates_losses_and_norms_are_those_of_a_hand_written_loop(
    adapter: Adapter, policy: str, tolerance: float
) -> None:
    training = adapter.training(policy, ORDINARY, learning_rate=RATE)
    outcomes = [training.step(GOOD) for _ in range(3)]
    expected, losses, norms = by_hand(ORDINARY, GOOD, 3)
    assert [o.applied for o in outcomes] == [True] * 3
    assert [o.loss for o in outcomes] == pytest.approx(losses, rel=tolerance)
    assert [o.grad_norm for o in outcomes] == pytest.approx(norms, rel=tolerance)
    assert [(o.incident, o.retries) for o in outcomes] == [(None, 0)] * 3
    trained = training.weights()
    for name, start in ORDINARY.items():
        for found, wanted, before in zip(trained[name], expected[name], start, strict=True):
            largest_update = np.abs(wanted - before).max()
            assert np.abs(found - wanted).max() <= tolerance * largest_update + 1e-7


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_without_float16_no_loss_is_scaled(adapter: Adapter, policy: str) -> None:
    training = adapter.training(policy, ORDINARY)
    assert training.step(GOOD).loss_scale == training.loss_scale == 1.0
