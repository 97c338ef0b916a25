"""A layer that cannot live in float16 is named, demoted alone, and the batch is not lost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from tests.contract.adapter import Adapter, Facts, facts
from tests.contract.cases import BACKWARD, CHAIN, FORWARD, Case
from tests.contract.test_loss_scale import same

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Plan

RATE = 1e-12  # the planted weights stay what they are


def healed(module: str, direction: str) -> Facts:
    return Facts("healed", "overflow_at_every_scale", module, direction, "float16", "float32")


CASES: Mapping[str, tuple[Case, float, tuple[Facts, ...]]] = {
    "forward": (FORWARD, 64.0, (healed("head", "forward"),)),
    "one behind the other": (CHAIN, 64.0, (healed("second", "forward"), healed("head", "forward"))),
    "backward": (BACKWARD, 1.0, (healed("head", "backward"),)),
}


def computes(plan: Plan | None) -> dict[str, tuple[str, str]]:
    assert plan is not None
    return {rule.name: (rule.compute, rule.reason) for rule in plan.layers}


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_planted_layers_are_demoted_and_the_batch_is_applied(adapter: Adapter, name: str) -> None:
    case, scale, incidents = CASES[name]
    plan = adapter.plan("float16", scale=LossScaleSettings(initial=scale))
    training = adapter.training(plan, case.weights, learning_rate=RATE)
    outcome = training.step(case.batch)
    assert tuple(map(facts, training.incidents)) == incidents
    assert computes(training.plan) == {incident.module: ("float32", "healed") for incident in incidents}
    assert training.plan is not None
    assert training.plan.default.compute == "float16"
    assert (outcome.applied, outcome.retries, outcome.loss_scale) == (True, len(incidents), scale)
    assert outcome.incident == training.incidents[-1]
    assert np.isfinite([outcome.loss, outcome.grad_norm]).all()
    assert (training.steps, training.skipped_steps, training.loss_scale) == (1, 0, scale)
    again = training.step(case.batch)
    assert (again.applied, again.retries, again.incident) == (True, 0, None)


@pytest.mark.parametrize("name", CASES)
def test_a_range_as_wide_as_float32s_needs_no_healing(adapter: Adapter, name: str) -> None:
    case = CASES[name][0]
    training = adapter.training("mixed_bfloat16", case.weights, learning_rate=RATE)
    assert training.step(case.batch).applied
    assert training.incidents == ()


@pytest.mark.parametrize("name", CASES)
def test_report_names_the_layer_and_changes_nothing(adapter: Adapter, name: str) -> None:
    case, scale, incidents = CASES[name]
    plan = adapter.plan("float16", scale=LossScaleSettings(initial=scale))
    training = adapter.training(plan, case.weights, learning_rate=RATE, guard="report")
    outcomes = [training.step(case.batch) for _ in range(5)]
    expected = incidents[0]._replace(kind="reported", action="skipped")
    assert [(o.applied, o.retries) for o in outcomes] == [(False, 0)] * 5
    assert outcomes[0].incident is not None
    assert facts(outcomes[0].incident) == expected
    assert set(map(facts, training.incidents)) == {expected}
    assert training.plan is not None
    assert training.plan.layers == ()
    assert training.skipped_steps == 5
    assert same(training.weights(), case.weights)


@pytest.mark.parametrize("name", CASES)
def test_without_a_guard_steps_are_skipped_only(adapter: Adapter, name: str) -> None:
    case, scale, _ = CASES[name]
    plan = adapter.plan("float16", scale=LossScaleSettings(initial=scale))
    training = adapter.training(plan, case.weights, learning_rate=RATE, guard=False)
    outcomes = [training.step(case.batch) for _ in range(8)]
    assert [(o.applied, o.retries, o.incident) for o in outcomes] == [(False, 0, None)] * 8
    assert [o.loss_scale for o in outcomes] == [max(scale / 2**step, 1.0) for step in range(8)]
    assert training.incidents == ()
    assert training.plan is not None
    assert training.plan.layers == ()
    assert same(training.weights(), case.weights)


def test_gradients_that_a_lower_scale_cures_are_left_to_the_loss_scale(adapter: Adapter) -> None:
    """At 65536 the healed step's gradients (150 at scale 1) still overflow: the scale comes down to 256 by itself."""
    training = adapter.training("mixed_float16", FORWARD.weights, learning_rate=RATE)
    outcomes = [training.step(FORWARD.batch) for _ in range(10)]
    assert [o.applied for o in outcomes] == [False] * 8 + [True] * 2
    assert [o.retries for o in outcomes] == [1] + [0] * 9
    assert tuple(map(facts, training.incidents)) == (healed("head", "forward"),)
    assert training.loss_scale == 256.0
