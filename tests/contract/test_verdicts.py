"""What no precision can heal: told apart, left out, and the run stopped at the fourth in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import pytest
from tests.contract.adapter import Adapter, Batch, Facts, Guard, Weights, facts
from tests.contract.cases import GOOD, HOPELESS, INFINITE_TARGET, NAN_INPUT, ORDINARY
from tests.contract.test_loss_scale import same

from halfwise.errors import TrainingStopped

POLICIES = ("mixed_float16", "mixed_bfloat16", "float32")

DATA = Facts("reported", "nonfinite_input", "", "", "float32", "skipped")
FLOAT32_TOO = Facts("reported", "not_a_precision_problem", "", "forward", "float32", "skipped")
BROKEN = Facts("stopped", "nonfinite_parameters", "second", "", "float32", "stopped")

BATCHES: Mapping[str, tuple[Batch, Facts]] = {
    "NaN among the inputs": (NAN_INPUT, DATA),
    "an infinite target": (INFINITE_TARGET, DATA),
    "a loss that float32 cannot hold": (HOPELESS, FLOAT32_TOO),
}


def broken() -> Weights:
    kernel, bias = (array.copy() for array in ORDINARY["second"])
    kernel[3, 2] = np.nan
    return {**ORDINARY, "second": (kernel, bias)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BATCHES)
def test_a_bad_batch_is_reported_and_left_out(adapter: Adapter, name: str, policy: str) -> None:
    batch, expected = BATCHES[name]
    training = adapter.training(policy, ORDINARY)
    outcome = training.step(batch)
    assert (outcome.applied, outcome.retries) == (False, 0)
    assert [facts(incident) for incident in training.incidents] == [expected]
    assert outcome.incident == training.incidents[0]
    assert same(training.weights(), ORDINARY)
    assert training.skipped_steps == 1


def test_four_in_a_row_stop_the_run_and_a_good_step_in_between_does_not_count_them(adapter: Adapter) -> None:
    training = adapter.training("mixed_bfloat16", ORDINARY)
    for batch in (NAN_INPUT, NAN_INPUT, NAN_INPUT, GOOD, NAN_INPUT, HOPELESS, NAN_INPUT):
        training.step(batch)
    before = training.weights()
    with pytest.raises(TrainingStopped) as stopped:
        training.step(NAN_INPUT)
    assert stopped.value.diagnosis.verdict == "nonfinite_input"
    kinds = [incident.kind for incident in training.incidents]
    assert kinds == ["reported"] * 6 + ["stopped"]
    assert facts(training.incidents[-1]) == DATA._replace(kind="stopped", action="stopped")
    assert (training.steps, training.skipped_steps) == (8, 7)
    assert same(training.weights(), before)
    assert not same(before, ORDINARY)
    assert training.step(GOOD).applied  # whoever catches the error may go on


@pytest.mark.parametrize("policy", POLICIES)
def test_broken_weights_stop_the_run_at_once(adapter: Adapter, policy: str) -> None:
    training = adapter.training(policy, ORDINARY)
    training.put_weights(broken())
    with pytest.raises(TrainingStopped):
        training.step(GOOD)
    assert [facts(incident) for incident in training.incidents] == [BROKEN]
    training.put_weights(ORDINARY)
    assert training.step(GOOD).applied or training.loss_scale < 65536.0


@pytest.mark.parametrize("guard", ["report", False])
def test_nothing_else_ever_stops_a_run(adapter: Adapter, guard: str | bool) -> None:
    training = adapter.training("mixed_bfloat16", broken(), guard=cast(Guard, guard))
    for batch in (GOOD, NAN_INPUT, HOPELESS, GOOD, GOOD, GOOD):
        assert not training.step(batch).applied
    reported = [] if guard is False else [BROKEN._replace(kind="reported", action="skipped")] * 6
    assert [facts(incident) for incident in training.incidents] == reported
    training.put_weights(ORDINARY)
    assert training.step(GOOD).applied
