"""Trying a plan on a whole step before it is used: not faster, or too disturbing, and the answer is float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.core.confirmation import Trial
from halfwise.core.plan import Plan
from halfwise.core.planner import EVIDENCE_STEPS
from halfwise.torch.evidence import Evidence, WholeStep

X = torch.randn(8, 4)


def gathered(model: nn.Module, losses: list[float]) -> Evidence:
    """Evidence whose layers measure as much faster in bfloat16, so that the trial decides."""
    evidence = Evidence(model, tolerance=0.1, timing=None)
    for loss in losses:
        with evidence.observing():
            model(X).square().mean().backward()
        evidence.add_step(loss)
    assert evidence.complete
    table = hw.TimingTable.uniform(["0"], relative={"bfloat16": 0.5})
    # what a machine with bfloat16 units would have measured
    evidence._timer = type("Measured", (), {"table": table, "spent": 0.0})()
    return evidence


def trial(half: tuple[float, float], full: tuple[float, float]) -> Trial:
    """A trial with known results: `(loss, seconds)`."""
    return lambda plan: half if plan.uses("bfloat16") else full


@pytest.mark.parametrize(
    ("half", "full", "chosen", "reason"),
    [
        ((1.0, 0.5), (1.0, 1.0), "bfloat16", "faster"),
        ((1.0, 0.98), (1.0, 1.0), "float32", "slower"),
        ((1.03, 0.5), (1.0, 1.0), "bfloat16", "faster"),  # the spread of the losses is 0.41
        ((1.2, 0.5), (1.0, 1.0), "float32", "sensitivity"),
    ],
)
def test_the_trial_decides(half: tuple[float, float], full: tuple[float, float], chosen: str, reason: str) -> None:
    plan = gathered(nn.Sequential(nn.Linear(4, 2)), [1.0, 1.5, 2.0]).plan(trial(half, full))
    assert (plan.default.compute, plan.default.reason) == (chosen, reason)
    assert plan.compute("0") == chosen


def test_a_supplied_timing_is_believed() -> None:
    evidence = gathered(nn.Sequential(nn.Linear(4, 2)), [1.0, 1.5, 2.0])
    evidence._supplied = evidence.timing
    assert evidence.plan(trial((1.0, 9.0), (1.0, 1.0))).uses("bfloat16")


def test_without_a_trial_the_layers_times_decide() -> None:
    assert gathered(nn.Sequential(nn.Linear(4, 2)), [1.0, 1.5, 2.0]).plan(None).uses("bfloat16")


def test_a_step_that_half_precision_cannot_run_keeps_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 2))

    def only_float32() -> Tensor:
        output: Tensor = model(X)
        if output.dtype is not torch.float32:
            raise TypeError("float32 only")
        return output.square().mean()

    plan = gathered(model, [1.0, 1.5, 2.0]).plan(WholeStep(model, (only_float32,)))
    assert (plan.default.compute, plan.default.reason) == ("float32", "operation")
    assert "float32 only" in plan.default.detail


def test_a_real_trial_leaves_no_trace_and_repeats_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout())
    before = [t.clone() for t in model.state_dict().values()]
    run = WholeStep(model, (lambda: model(X).square().mean(), lambda: model(X * 2).square().mean()))
    first, second = run(Plan.manual(default="bfloat16")), run(Plan.manual(default="bfloat16"))
    assert first[0] == second[0]
    assert first[1] > 0
    assert first[0] != run(Plan.manual())[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_the_profile_covers_all_steps_and_the_second_one_is_timed() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    evidence = Evidence(model, tolerance=0.1, timing=None)
    for number in range(EVIDENCE_STEPS):
        assert bool(evidence.timing.seconds) is (number > 1)
        assert evidence.complete is False
        with evidence.observing():
            model(X).square().mean().backward()
        evidence.add_step(float(number))
    assert set(evidence.timing.seconds) == {"0"}
    histogram = evidence.profile.get("0", "activation")
    assert histogram is not None
    assert histogram.total == EVIDENCE_STEPS * (8 * 4 + 8 * 2)


def batches() -> list[Tensor]:
    return list(torch.randn(4, 32, 8, generator=torch.Generator().manual_seed(0)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def observed(evidence: Evidence, model: nn.Module) -> Evidence:
    for batch in batches():
        with evidence.observing():
            loss = model(batch).square().mean()
            loss.backward()
        evidence.record_gradients()
        evidence.add_step(float(loss.detach()))
        model.zero_grad()
    return evidence


def test_sensitivities_are_gathered_for_the_formats_that_save_something() -> None:
    model = network()
    timing = hw.TimingTable.uniform(["0", "2"], relative={"bfloat16": 0.5, "float16": 2.0})
    found = observed(Evidence(model, tolerance=0.1, timing=timing), model).sensitivity
    assert {path: set(by_format) for path, by_format in found.layers.items()} == {"0": {"bfloat16"}, "2": {"bfloat16"}}
    assert found.loss_noise > 0.0
    assert set(found.gradient_noise) == {"0", "2"}
    assert all(0.0 < noise <= 1.0 for noise in found.gradient_noise.values())


def test_for_memory_all_formats_are_looked_at() -> None:
    model = network()
    timing = hw.TimingTable.uniform(["0", "2"], relative={"bfloat16": 5.0, "float16": 2.0})
    evidence = observed(Evidence(model, tolerance=0.1, timing=timing, objective="memory"), model)
    assert set(evidence.sensitivity.layers["0"]) == {"bfloat16", "float16"}


def test_another_target_is_estimated_from_float32_times() -> None:
    model = network()
    evidence = observed(Evidence(model, tolerance=0.1, timing=None, target="cuda:hopper"), model)
    assert evidence.timing.ratio("bfloat16") == pytest.approx(2 * 66.9 / 989.4)
    assert "float8_e4m3fn" in evidence.sensitivity.layers["0"]
    plan = evidence.plan(trial((1.0, 9.0), (1.0, 1.0)))  # what is tried here says nothing about a GPU
    assert (plan.target, plan.default.detail[:15]) == ("cuda:hopper", "an estimate for")


def test_what_was_spent_is_told() -> None:
    model = network()
    evidence = observed(Evidence(model, tolerance=0.1, timing=None), model)
    evidence.plan(None)
    assert evidence.spent["ranges"] > 0.0
    assert evidence.spent["times"] > 0.0
