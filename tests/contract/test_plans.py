"""Policies and plans mean the same everywhere: what "auto" chooses, plan files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.adapter import SHAPES, Adapter, Batch, Weights
from tests.contract.cases import FORWARD, GOOD, ORDINARY, WIDE
from tests.contract.test_healing import RATE, computes

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Plan
from halfwise.core.timing import TimingTable
from halfwise.errors import PlanError, PolicyError

EVIDENCE = 3  # steps that "auto" trains in float32

FASTER, RANGE, SLOWER = ("float16", "faster"), ("float32", "range"), ("float32", "slower")

REFUSED = {
    "mixed_float8": "unknown policy 'mixed_float8'. Allowed: 'auto', 'float32', 'mixed_bfloat16', 'mixed_float16', "
    "a Plan, or the path of a plan file (plan.toml).",
    "float16": "policy 'float16' means weights in float16 too, as in Keras; halfwise cannot train that yet. "
    "Use 'mixed_float16': computation in float16, weights in float32.",
}


@pytest.mark.parametrize(
    ("weights", "batch", "relative", "default", "layers"),
    [
        (WIDE.weights, WIDE.batch, {"float16": 0.5}, FASTER, {"first": FASTER, "second": FASTER, "head": RANGE}),
        (ORDINARY, GOOD, {"float16": 0.5}, FASTER, dict.fromkeys(SHAPES, FASTER)),
        (ORDINARY, GOOD, {"float16": 1.2}, SLOWER, dict.fromkeys(SHAPES, SLOWER)),
        (
            WIDE.weights,
            WIDE.batch,
            {"float16": 0.49, "bfloat16": 0.5},
            ("bfloat16", "faster"),
            {"first": ("bfloat16", "faster"), "second": ("bfloat16", "faster"), "head": ("float32", "sensitivity")},
        ),
    ],
    ids=[
        "the head is out of range",
        "all layers fit",
        "not faster here",
        "it fits bfloat16, which is too coarse for it",
    ],
)
def test_auto_lowers_exactly_the_layers_that_range_time_and_tolerance_allow(
    adapter: Adapter,
    weights: Weights,
    batch: Batch,
    relative: dict[str, float],
    default: tuple[str, str],
    layers: dict[str, tuple[str, str]],
) -> None:
    timing = TimingTable.uniform(SHAPES, relative=relative)
    training = adapter.training("auto", weights, learning_rate=RATE, timing=timing)
    for _ in range(EVIDENCE):
        assert training.plan is None
        outcome = training.step(batch)
        assert (outcome.applied, outcome.loss_scale) == (True, 1.0)
    assert computes(training.plan) == layers
    assert training.plan is not None
    assert training.plan.framework == adapter.framework
    assert (training.plan.default.compute, training.plan.default.reason) == default
    assert (training.plan.loss_scale is not None) is training.plan.uses("float16")
    assert training.step(batch).applied
    assert training.incidents == ()


def test_a_step_that_was_skipped_is_no_evidence(adapter: Adapter) -> None:
    timing = TimingTable.uniform(SHAPES, relative={"float16": 0.5})
    training = adapter.training("auto", ORDINARY, learning_rate=RATE, timing=timing)
    poisoned = Batch(GOOD.x, GOOD.y * float("inf"))
    for batch in (GOOD, poisoned, GOOD):
        training.step(batch)
        assert training.plan is None
    training.step(GOOD)
    assert computes(training.plan) == dict.fromkeys(SHAPES, FASTER)


def test_a_healed_plan_goes_through_a_file_and_is_in_force_again(adapter: Adapter, tmp_path: Path) -> None:
    settings = LossScaleSettings(initial=64.0, hysteresis=2, growth_interval=7)
    first = adapter.training(adapter.plan("float16", scale=settings), FORWARD.weights, learning_rate=RATE)
    first.step(FORWARD.batch)
    assert first.plan is not None
    first.plan.save(tmp_path / "plan.toml")
    second = adapter.training(tmp_path / "plan.toml", FORWARD.weights, learning_rate=RATE)
    outcome = second.step(FORWARD.batch)
    assert second.plan == first.plan
    assert second.plan == Plan.load(tmp_path / "plan.toml")
    assert (outcome.applied, outcome.retries, outcome.loss_scale) == (True, 0, 64.0)
    assert second.incidents == ()


def test_a_policys_plan_is_the_same(adapter: Adapter) -> None:
    training = adapter.training("mixed_float16", ORDINARY)
    training.step(GOOD)
    plan = training.plan
    assert plan is not None
    assert (plan.framework, plan.model, plan.layers) == (adapter.framework, "Sequential", ())
    assert (plan.default.compute, plan.default.reason) == ("float16", "policy")
    assert plan.default.detail == "policy 'mixed_float16'"
    assert plan.loss_scale == LossScaleSettings()


@pytest.mark.parametrize("policy", REFUSED)
def test_policies_that_are_refused(adapter: Adapter, policy: str) -> None:
    with pytest.raises(PolicyError) as refused:
        adapter.check_policy(policy)
    assert str(refused.value) == REFUSED[policy]


def test_a_plan_for_another_model_is_refused_by_name(adapter: Adapter) -> None:
    plan = adapter.plan("float16", {"secnd": "float32"})
    with pytest.raises(PlanError) as refused:
        adapter.training(plan, ORDINARY).step(GOOD)
    assert str(refused.value) == (
        "the plan names modules that 'Sequential' does not have: 'secnd'; did you mean 'second'?"
    )
