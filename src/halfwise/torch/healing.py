"""Carrying out what the guard asks for: localise the culprit, demote it, run the same batch again; or say why not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from halfwise.core.diagnosis import Diagnosis, Incident
from halfwise.core.guard import conclude, unhealed
from halfwise.core.plan import Plan
from halfwise.errors import TrainingStopped
from halfwise.torch.attempt import Attempt
from halfwise.torch.closure import Closure
from halfwise.torch.demote import demoted, float32_everywhere

if TYPE_CHECKING:
    from halfwise.torch.engine import Engine

__all__ = ["Outcome", "heal", "heal_later_steps"]

_ROUNDS = 8  # layers in a row that may turn out to be the next culprit, before everything goes to float32


class Outcome(NamedTuple):
    """How it ended: the last attempt at the batch, what was recorded, how often the batch was run again."""

    attempt: Attempt
    incident: Incident | None
    retries: int


def heal(engine: Engine, closures: tuple[Closure, ...], attempt: Attempt) -> Outcome:
    """Tries to get a failed batch through by changing precision.

    Raises:
        TrainingStopped: the guard's patience is at its end, or the weights are broken already.
    """
    incident: Incident | None = None
    retries = 0
    while True:
        diagnosis = _with_fix_for(engine, engine.localise(closures))
        engine.guard_state, conclusion = conclude(engine.guard_state, diagnosis)
        if conclusion == "demote" and engine.guard != "report":
            plan = _next_plan(engine, diagnosis, last_resort=retries >= _ROUNDS)
            if plan is not None:
                incident = engine.record(Incident.of(diagnosis, step=engine.steps, kind="healed", action="float32"))
                engine.use_plan(plan)
                attempt = engine.attempt_again(closures)
                retries += 1
                if attempt.sound or (attempt.loss_finite and engine.scaled and not engine.scale.at_floor):
                    return Outcome(attempt, incident, retries)  # healthy, or a lower loss scale may cure what is left
                continue
            engine.guard_state, conclusion = unhealed(engine.guard_state)
        return Outcome(attempt, _left_out(engine, diagnosis, stop=conclusion == "stop") or incident, retries)


def heal_later_steps(engine: Engine, diagnosis: Diagnosis | None) -> Incident | None:
    """After a failed step without a closure, which cannot be tried again: changes precision for the steps to come.

    Without a `diagnosis`, that is after the first failure, the next step is traced to get one. Where that was asked for
    and could not be done (another dispatch mode is active), the failure counts as one that cannot be healed.

    Raises:
        TrainingStopped: as `heal` does.
    """
    if diagnosis is None and not engine.armed:
        engine.armed = True
        return None
    if diagnosis is None:
        detail = "the step could not be traced, because another dispatch mode (a profiler, a FLOP counter) is active"
        diagnosis = Diagnosis("not_reproducible", detail=detail)
    diagnosis = _with_fix_for(engine, diagnosis)
    engine.guard_state, conclusion = conclude(engine.guard_state, diagnosis)
    if conclusion == "demote" and engine.guard != "report":
        plan = _next_plan(engine, diagnosis, last_resort=False)
        if plan is not None:
            engine.use_plan(plan)
            return engine.record(Incident.of(diagnosis, step=engine.steps, kind="healed", action="float32"))
        engine.guard_state, conclusion = unhealed(engine.guard_state)
    return _left_out(engine, diagnosis, stop=conclusion == "stop")


def _with_fix_for(engine: Engine, diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with advice for somebody who trains under `MixedPrecision` already."""
    if diagnosis.verdict != "overflow_at_every_scale" or engine.plan is None or not diagnosis.module:
        return diagnosis
    if engine.guard == "report":
        modules = dict.fromkeys(suspect.module for suspect in diagnosis.suspects if suspect.module)
        rules = ", ".join(f'"{module}": "float32"' for module in modules)
        line = f'policy=hw.Plan.manual({{{rules}}}, default="{engine.plan.default.compute}")'
        return replace(diagnosis, fix=(line,))
    done = ("done. To begin like this next time:", 'mp.plan.save("plan.toml"), then policy="plan.toml"')
    return replace(diagnosis, fix=done)


def _left_out(engine: Engine, diagnosis: Diagnosis, *, stop: bool) -> Incident | None:
    """Records that a batch is left out; ends the run where the guard says so. A harmless verdict is no incident."""
    if stop and engine.guard != "report":
        engine.record(Incident.of(diagnosis, step=engine.steps, kind="stopped", action="stopped"))
        raise TrainingStopped(diagnosis)
    if diagnosis.healthy or diagnosis.verdict == "loss_scale_too_high":
        return None
    return engine.record(Incident.of(diagnosis, step=engine.steps, kind="reported", action="skipped"))


def _next_plan(engine: Engine, diagnosis: Diagnosis, *, last_resort: bool) -> Plan | None:
    """The plan in force with the suspects in float32; None where everything is in float32 already."""
    before = engine.plan
    if before is None or not (before.uses("float16") or before.uses("bfloat16")):
        return None
    if last_resort or not diagnosis.suspects:
        return float32_everywhere(
            before, f"still not healthy after {_ROUNDS} layers went to float32: {diagnosis.detail}"
        )
    plan = before
    for suspect in diagnosis.suspects:
        if suspect.direction == diagnosis.direction:
            plan = demoted(plan, engine.model, suspect)
    if any(change.field == "compute" for change in before.diff(plan)):
        return plan
    return float32_everywhere(before, f"{diagnosis.module!r} in float32 did not help: {diagnosis.detail}")
