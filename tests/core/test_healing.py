"""What follows from a failed step, on a training that is written out: which layers overflow, and what is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest

from halfwise.core.diagnosis import Diagnosis, Direction, Incident, Suspect, Verdict
from halfwise.core.guard import PATIENCE, GuardState
from halfwise.core.healing import heal, heal_later_steps, judge
from halfwise.core.plan import Plan, Rule
from halfwise.errors import TrainingStopped

HALF = Plan.manual(default="float16")


@dataclass(frozen=True)
class Try:
    """An attempt."""

    loss_finite: bool = True
    gradients_sound: bool = True

    @property
    def sound(self) -> bool:
        return self.loss_finite and self.gradients_sound


BAD_LOSS = Try(loss_finite=False, gradients_sound=False)
BAD_GRADIENT = Try(gradients_sound=False)


def suspect(module: str, direction: Direction = "forward") -> Suspect:
    return Suspect(module, "matmul", direction, "a.py:1", "float16", "inf", 60.0, "Dense")


@dataclass
class Run:
    """A training whose batch fails until all of `culprits` compute in float32; a batch is its number."""

    culprits: Sequence[str] = ()
    direction: Direction = "forward"
    verdict: Verdict = "overflow_at_every_scale"
    suspects: tuple[Suspect, ...] | None = None
    plan: Plan | None = HALF
    guard: bool | Literal["report"] = True
    guard_state: GuardState = field(default_factory=GuardState)
    steps: int = 7
    at_floor: bool = False
    incidents: list[Incident] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)

    @property
    def scaled(self) -> bool:
        return self.plan is not None and self.plan.uses("float16")

    def failing(self) -> list[str]:
        return [c for c in self.culprits if self.plan is not None and self.plan.compute(c) != "float32"]

    def localise(self, batch: int) -> Diagnosis:
        suspects = self.suspects if self.suspects is not None else tuple(suspect(c) for c in self.failing()[:1])
        return Diagnosis(self.verdict, suspects=suspects, detail="as found", fix=("from outside",))

    def demoted(self, plan: Plan, suspect: Suspect) -> Plan:
        return plan.with_rule(Rule(path=suspect.module, compute="float32", reason="healed"))

    def use_plan(self, plan: Plan) -> None:
        self.plan = plan

    def attempt_again(self, batch: int) -> Try:
        self.tried.append(batch)
        return (BAD_LOSS if self.direction == "forward" else BAD_GRADIENT) if self.failing() else Try()

    def record(self, incident: Incident) -> Incident:
        self.incidents.append(incident)
        return incident

    def fix(self, modules: Sequence[str], *, done: bool) -> tuple[str, ...]:
        return (f"{'done' if done else 'to do'}: {', '.join(modules)}",)


def in_float32(run: Run) -> list[str]:
    assert run.plan is not None
    return [rule.name for rule in run.plan.layers if rule.compute == "float32"]


def test_the_culprit_is_demoted_and_the_same_batch_tried_again() -> None:
    run = Run(culprits=["fc"])
    attempt, incident, retries = heal(run, 42, BAD_LOSS)
    assert attempt.sound
    assert retries == 1
    assert run.tried == [42]
    assert in_float32(run) == ["fc"]
    assert run.incidents == [incident]
    assert incident is not None
    assert (incident.step, incident.kind, incident.action, incident.module) == (7, "healed", "float32", "fc")
    assert "done: fc" in incident.text
    assert run.guard_state == GuardState()


def test_culprits_are_found_one_behind_the_other() -> None:
    run = Run(culprits=["a", "b", "c"])
    outcome = heal(run, 0, BAD_LOSS)
    assert outcome.attempt.sound
    assert outcome.retries == 3
    assert in_float32(run) == ["a", "b", "c"]
    assert [incident.module for incident in run.incidents] == ["a", "b", "c"]
    assert outcome.incident == run.incidents[-1]


def test_all_suspects_of_the_first_ones_direction_are_demoted() -> None:
    run = Run(culprits=["a", "b"], suspects=(suspect("a"), suspect("b"), suspect("c", "backward")))
    assert heal(run, 0, BAD_LOSS).retries == 1
    assert in_float32(run) == ["a", "b"]
    assert "done: a, b, c" in run.incidents[0].text


def test_after_eight_rounds_everything_goes_to_float32() -> None:
    run = Run(culprits=[f"layer{number}" for number in range(20)])
    outcome = heal(run, 0, BAD_LOSS)
    assert outcome.attempt.sound
    assert outcome.retries == 9
    assert run.plan is not None
    assert not run.plan.uses("float16")
    assert run.plan.layers == ()
    assert run.plan.default.detail == "still not healthy after 8 layers went to float32: as found"


@pytest.mark.parametrize(
    ("suspects", "detail"),
    [
        ((), "the culprit could not be named: as found"),
        ((suspect("innocent"),), "'innocent' in float32 did not help: as found"),
    ],
)
def test_where_no_single_layer_is_to_blame_everything_goes_to_float32(
    suspects: tuple[Suspect, ...], detail: str
) -> None:
    plan = HALF.with_rule(Rule(path="innocent", compute="float32"))
    run = Run(culprits=["hidden"], suspects=suspects, plan=plan)
    assert heal(run, 0, BAD_LOSS).attempt.sound
    assert run.plan is not None
    assert run.plan.default.detail == detail
    assert not run.plan.uses("float16")


@pytest.mark.parametrize(("at_floor", "retries"), [(False, 1), (True, 2)])
def test_gradients_that_a_lower_loss_scale_may_cure_are_left_to_it(at_floor: bool, retries: int) -> None:
    run = Run(culprits=["a", "b"], direction="backward", at_floor=at_floor)
    outcome = heal(run, 0, BAD_GRADIENT)
    assert outcome.retries == retries
    assert outcome.attempt.sound is at_floor
    assert outcome.incident is not None
    assert outcome.incident.kind == "healed"


def test_in_float32_already_nothing_can_be_demoted() -> None:
    run = Run(suspects=(suspect("fc"),), plan=Plan.manual())
    outcome = heal(run, 0, BAD_LOSS)
    assert outcome.attempt is BAD_LOSS
    assert outcome.retries == 0
    assert [(i.kind, i.action) for i in run.incidents] == [("reported", "skipped")]
    assert run.guard_state.unhealed_in_a_row == 1
    assert run.plan == Plan.manual()


@pytest.mark.parametrize("verdict", ["not_a_precision_problem", "nonfinite_input", "not_reproducible"])
def test_what_no_precision_heals_is_left_out_and_the_fourth_in_a_row_stops(verdict: Verdict) -> None:
    run = Run(verdict=verdict, suspects=())
    for _ in range(PATIENCE - 1):
        outcome = heal(run, 0, BAD_LOSS)
        assert outcome.attempt is BAD_LOSS
        assert outcome.incident is not None
        assert outcome.incident.kind == "reported"
    with pytest.raises(TrainingStopped) as stopped:
        heal(run, 0, BAD_LOSS)
    assert stopped.value.diagnosis.verdict == verdict
    assert [(i.kind, i.action) for i in run.incidents[-2:]] == [("reported", "skipped"), ("stopped", "stopped")]
    assert run.tried == []
    assert run.plan == HALF


def test_broken_weights_stop_at_once() -> None:
    run = Run(verdict="nonfinite_parameters", suspects=())
    with pytest.raises(TrainingStopped):
        heal(run, 0, BAD_LOSS)
    assert [i.kind for i in run.incidents] == ["stopped"]


@pytest.mark.parametrize("verdict", ["loss_scale_too_high", "loss_scale_settling", "healthy"])
def test_a_harmless_verdict_is_no_incident(verdict: Verdict) -> None:
    run = Run(verdict=verdict, suspects=(suspect("fc"),))
    assert heal(run, 0, BAD_GRADIENT) == (BAD_GRADIENT, None, 0)
    assert run.incidents == []
    assert run.guard_state == GuardState()


@pytest.mark.parametrize(
    "verdict", ["overflow_at_every_scale", "nonfinite_parameters", "nonfinite_input", "not_reproducible"]
)
def test_report_changes_nothing_and_never_stops(verdict: Verdict) -> None:
    run = Run(verdict=verdict, suspects=(suspect("a"), suspect("b")), guard="report")
    for _ in range(2 * PATIENCE):
        outcome = heal(run, 0, BAD_LOSS)
        assert outcome.attempt is BAD_LOSS
        assert outcome.incident is not None
        assert (outcome.incident.kind, outcome.incident.action) == ("reported", "skipped")
    assert run.plan == HALF
    assert run.tried == []
    assert ("to do: a, b" in run.incidents[0].text) is (verdict == "overflow_at_every_scale")


def test_advice_from_outside_stands_where_there_is_no_plan_or_no_module_to_name() -> None:
    run = Run(suspects=(suspect("fc"),), plan=None)
    heal(run, 0, BAD_LOSS)
    assert "from outside" in run.incidents[0].text
    run = Run(culprits=["fc"], suspects=(suspect(""),))
    heal(run, 0, BAD_LOSS)
    assert "from outside" in run.incidents[0].text


def test_without_the_batch_the_steps_to_come_are_healed() -> None:
    run = Run(culprits=["fc"])
    incident = heal_later_steps(run, run.localise(0))
    assert incident is not None
    assert (incident.kind, incident.module) == ("healed", "fc")
    assert in_float32(run) == ["fc"]
    assert run.tried == []


def test_without_the_batch_too_the_fourth_failure_stops_and_report_never_does() -> None:
    run, watched = Run(plan=Plan.manual()), Run(guard="report")
    diagnosis = Diagnosis("overflow_at_every_scale", suspects=(suspect("fc"),))
    for _ in range(PATIENCE - 1):
        heal_later_steps(run, diagnosis)
    with pytest.raises(TrainingStopped):
        heal_later_steps(run, diagnosis)
    for _ in range(2 * PATIENCE):
        incident = heal_later_steps(watched, diagnosis)
        assert incident is not None
        assert incident.kind == "reported"
    assert watched.plan == HALF


def test_the_guards_word() -> None:
    run = Run(guard_state=GuardState(settled=True))
    assert judge(run, Try()) == "apply"
    assert [judge(run, BAD_GRADIENT) for _ in range(PATIENCE)] == ["skip", "skip", "skip", "localise"]
    assert judge(run, BAD_LOSS) == "localise"
    unsettled, at_floor, unscaled = Run(), Run(at_floor=True), Run(plan=Plan.manual())
    assert [judge(unsettled, BAD_GRADIENT) for _ in range(2 * PATIENCE)] == ["skip"] * 2 * PATIENCE
    assert judge(at_floor, BAD_GRADIENT) == judge(unscaled, BAD_GRADIENT) == "localise"
    unguarded = Run(guard=False, at_floor=True)
    assert (judge(unguarded, Try()), judge(unguarded, BAD_LOSS)) == ("apply", "skip")
    assert unguarded.guard_state == GuardState()
