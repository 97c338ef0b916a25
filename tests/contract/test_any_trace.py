"""Whatever comes, weights stay finite, a skipped step leaves them alone, and a good step after it all is applied."""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.contract.adapter import Adapter, Guard, Training, Weights
from tests.contract.cases import GOOD, HOPELESS, INFINITE_TARGET, NAN_INPUT, ORDINARY, OVERFLOW
from tests.contract.test_loss_scale import same

from halfwise.errors import TrainingStopped

BATCHES = {"good": GOOD, "overflow": OVERFLOW, "nan": NAN_INPUT, "inf": INFINITE_TARGET, "hopeless": HOPELESS}
RATE = 1e-6  # float32 can apply the batch that float16 cannot hold, and must not go astray with it
DESCENT = 18  # steps from a loss scale of 65536 down to 1, and one more


def finite(weights: Weights) -> bool:
    return all(np.isfinite(array).all() for pair in weights.values() for array in pair)


def feed(training: Training, names: list[str]) -> None:
    for name in names:
        before, applied = training.weights(), False
        with suppress(TrainingStopped):
            applied = training.step(BATCHES[name]).applied
        assert finite(training.weights())
        assert same(before, training.weights()) is not applied
        assert 2.0**-14 <= training.loss_scale <= 2.0**24


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # shrinking a failure would take minutes
)
@given(
    policy=st.sampled_from(["mixed_float16", "mixed_bfloat16", "float32"]),
    guard=st.sampled_from([True, "report", False]),
    names=st.lists(st.sampled_from(sorted(BATCHES)), min_size=1, max_size=8),
)
def test_weights_survive(adapter: Adapter, policy: str, guard: str | bool, names: list[str]) -> None:
    training = adapter.training(policy, ORDINARY, learning_rate=RATE, guard=cast(Guard, guard))
    feed(training, names)
    before = training.weights()
    outcomes = [training.step(GOOD) for _ in range(DESCENT)]
    assert outcomes[-1].applied
    assert not same(before, training.weights())
    assert finite(training.weights())


def test_the_loss_scale_never_collapses(adapter: Adapter) -> None:
    """170 overflows would bring an unbounded scale to where its reciprocal is infinite."""
    training = adapter.training("mixed_float16", ORDINARY, guard=False)
    feed(training, ["hopeless"] * 170)
    assert training.loss_scale == 1.0
    assert training.step(GOOD).applied
    assert finite(training.weights())
