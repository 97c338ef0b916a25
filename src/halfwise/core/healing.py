"""Carrying out what the guard asks for: localise the culprit, demote it, run the same batch again; or say why not.

Each adapter's engine is the patient. What a batch is, how it is run and how a culprit is found are its own affair;
what follows from the findings is the same for all of them, and stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from halfwise.core.demotion import float32_everywhere
from halfwise.core.diagnosis import Diagnosis, Incident, Suspect
from halfwise.core.guard import Action, GuardState, Observation, conclude, observe, unhealed
from halfwise.core.plan import Plan
from halfwise.errors import TrainingStopped

__all__ = ["Attempt", "Outcome", "Patient", "heal", "heal_later_steps", "judge"]

_ROUNDS = 8  # layers in a row that may turn out to be the next culprit, before everything goes to float32


class Attempt(Protocol):
    """One try at a batch: forward, backward, gradients unscaled and measured."""

    @property
    def loss_finite(self) -> bool:
        """The loss is finite."""

    @property
    def gradients_sound(self) -> bool:
        """The sum over all gradients of (g / scale)^2 is finite in float32."""

    @property
    def sound(self) -> bool:
        """The step may be applied."""


Batch = TypeVar("Batch", contravariant=True)
Tried = TypeVar("Tried", bound=Attempt)
TriedOut = TypeVar("TriedOut", bound=Attempt, covariant=True)


class Patient(Protocol[Batch, TriedOut]):
    """A training that can be healed.

    Attributes:
        guard_state: the guard's memory; replaced here.
    """

    guard_state: GuardState

    @property
    def guard(self) -> bool | Literal["report"]:
        """True may change precision; `"report"` neither does so nor stops; False only skips."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while evidence is gathered, which happens in float32."""

    @property
    def steps(self) -> int:
        """The number of the step under way, from 0."""

    @property
    def scaled(self) -> bool:
        """The loss is scaled, because something computes in float16."""

    @property
    def at_floor(self) -> bool:
        """The loss scale can go no lower."""

    def localise(self, batch: Batch) -> Diagnosis:
        """Why the step failed and where, from replays of the batch that leave no trace."""

    def demoted(self, plan: Plan, suspect: Suspect) -> Plan:
        """`plan` with the suspect's own code in float32: `halfwise.core.demotion.demoted` over the adapter's tree."""

    def use_plan(self, plan: Plan) -> None:
        """Puts the plan in force; a loss scale that is in use stays where it stands."""

    def attempt_again(self, batch: Batch) -> TriedOut:
        """The same batch once more, from the state before the step: buffers, generators, no gradients."""

    def record(self, incident: Incident) -> Incident:
        """Keeps the incident, says it, and returns it."""

    def fix(self, modules: Sequence[str], *, done: bool) -> tuple[str, ...]:
        """Lines to paste: how to train with `modules` in float32, which is what was just `done`, or still has to be."""


class Outcome(NamedTuple, Generic[Tried]):
    """How it ended: the last attempt at the batch, what was recorded, how often the batch was run again."""

    attempt: Tried
    incident: Incident | None
    retries: int


def judge(patient: Patient[Batch, Tried], attempt: Attempt) -> Action:
    """The guard's word on an attempt; without a guard, apply or skip. Only an attempt that is not sound is observed."""
    if attempt.sound:
        return "apply"
    if not patient.guard:
        return "skip"
    seen = Observation(
        loss_finite=attempt.loss_finite,
        gradients_sound=attempt.gradients_sound,
        scaled=patient.scaled,
        at_floor=patient.at_floor,
    )
    patient.guard_state, action = observe(patient.guard_state, seen)
    return action


def heal(patient: Patient[Batch, Tried], batch: Batch, attempt: Tried) -> Outcome[Tried]:
    """Tries to get a failed batch through by changing precision.

    Args:
        patient: the training.
        batch: what failed, in whatever form the patient's `localise` and `attempt_again` take it.
        attempt: how it failed.

    Raises:
        TrainingStopped: the guard's patience is at its end, or the weights are broken already.
    """
    incident: Incident | None = None
    retries = 0
    while True:
        diagnosis = _with_fix(patient, patient.localise(batch))
        patient.guard_state, conclusion = conclude(patient.guard_state, diagnosis)
        if conclusion == "demote" and patient.guard != "report":
            plan = _next_plan(patient, diagnosis, last_resort=retries >= _ROUNDS)
            if plan is not None:
                incident = patient.record(Incident.of(diagnosis, step=patient.steps, kind="healed", action="float32"))
                patient.use_plan(plan)
                attempt = patient.attempt_again(batch)
                retries += 1
                if attempt.sound or (attempt.loss_finite and patient.scaled and not patient.at_floor):
                    return Outcome(attempt, incident, retries)  # healthy, or a lower loss scale may cure what is left
                continue
            patient.guard_state, conclusion = unhealed(patient.guard_state)
        return Outcome(attempt, _left_out(patient, diagnosis, stop=conclusion == "stop") or incident, retries)


def heal_later_steps(patient: Patient[Batch, Tried], diagnosis: Diagnosis) -> Incident | None:
    """After a failed step that cannot be tried again: changes precision for the steps to come.

    Raises:
        TrainingStopped: as `heal` does.
    """
    diagnosis = _with_fix(patient, diagnosis)
    patient.guard_state, conclusion = conclude(patient.guard_state, diagnosis)
    if conclusion == "demote" and patient.guard != "report":
        plan = _next_plan(patient, diagnosis, last_resort=False)
        if plan is not None:
            patient.use_plan(plan)
            return patient.record(Incident.of(diagnosis, step=patient.steps, kind="healed", action="float32"))
        patient.guard_state, conclusion = unhealed(patient.guard_state)
    return _left_out(patient, diagnosis, stop=conclusion == "stop")


def _with_fix(patient: Patient[Batch, Tried], diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with advice for somebody who trains under the guard already."""
    if diagnosis.verdict != "overflow_at_every_scale" or patient.plan is None or not diagnosis.module:
        return diagnosis
    modules = tuple(dict.fromkeys(suspect.module for suspect in diagnosis.suspects if suspect.module))
    return replace(diagnosis, fix=patient.fix(modules, done=patient.guard != "report"))


def _left_out(patient: Patient[Batch, Tried], diagnosis: Diagnosis, *, stop: bool) -> Incident | None:
    """Records that a batch is left out; ends the run where the guard says so. A harmless verdict is no incident."""
    if stop and patient.guard != "report":
        patient.record(Incident.of(diagnosis, step=patient.steps, kind="stopped", action="stopped"))
        raise TrainingStopped(diagnosis)
    if diagnosis.healthy or diagnosis.verdict == "loss_scale_too_high":
        return None
    return patient.record(Incident.of(diagnosis, step=patient.steps, kind="reported", action="skipped"))


def _next_plan(patient: Patient[Batch, Tried], diagnosis: Diagnosis, *, last_resort: bool) -> Plan | None:
    """The plan in force with the suspects in float32; None where everything is in float32 already."""
    before = patient.plan
    if before is None or not (before.uses("float16") or before.uses("bfloat16")):
        return None
    if last_resort:
        return float32_everywhere(
            before, f"still not healthy after {_ROUNDS} layers went to float32: {diagnosis.detail}"
        )
    if not diagnosis.suspects:
        return float32_everywhere(before, f"the culprit could not be named: {diagnosis.detail}")
    plan = before
    for suspect in diagnosis.suspects:
        if suspect.direction == diagnosis.direction:
            plan = patient.demoted(plan, suspect)
    if any(change.field == "compute" for change in before.diff(plan)):
        return plan
    return float32_everywhere(before, f"{diagnosis.module!r} in float32 did not help: {diagnosis.detail}")
