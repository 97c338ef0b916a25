"""Runs of the built-in workloads from start to summary: what `halfwise train` calls."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from halfwise.core.plan import Plan
from halfwise.core.policy import POLICIES, parse_policy
from halfwise.core.record import RunRecord
from halfwise.errors import PolicyError, UsageError
from halfwise.workloads.compare import compare_with_float32
from halfwise.workloads.datasets import Dataset, load_data
from halfwise.workloads.environment import environment_changes
from halfwise.workloads.frameworks import choose_backend, make_training
from halfwise.workloads.settings import Settings
from halfwise.workloads.training import Training, View

__all__ = ["finish", "new_run", "resumed_run"]


_ELSEWHERE = "cuda:hopper"  # a current GPU; a trial on a laptop shall show more than "float32"


def new_run(settings: Settings, directory: Path | None, view: View) -> tuple[Training, RunRecord]:
    """A training and its fresh record. Nothing is written before everything has been checked.

    Args:
        settings: `policy` may be any spelling of a policy, or the path of a plan.
        directory: for the record; None takes the first free one of `runs/WORKLOAD-POLICY-1`, `-2`, ...
        view: is told what happens.

    Raises:
        UsageError: framework, policy, plan, data or directory cannot be used.
        MissingDependencyError: a package is not installed.
    """
    settings = choose_backend(settings)
    plan = None
    if settings.policy.endswith(".toml") or Path(settings.policy).is_file():
        plan = Plan.load(settings.policy)
    else:
        settings = replace(settings, policy=parse_policy(settings.policy))
    training = make_training(settings, _load(settings), plan=plan, view=view)
    target = directory or _free_directory(settings.workload, "plan" if plan is not None else settings.policy)
    text = None if plan is None else Path(settings.policy).read_text(encoding="utf-8")
    return training, RunRecord.create(target, _environment(training), plan=text)


def resumed_run(workload: str, directory: Path, given: Mapping[str, Any], view: View) -> tuple[Training, RunRecord]:
    """The training that `directory` records, ready to go on. Its settings hold; `given` may only raise `epochs`.

    Raises:
        UsageError: there is no run, or `given` contradicts its settings.
        DataError: the record is damaged.
    """
    record = RunRecord.open(directory)
    before = record.environment()
    settings = Settings.from_dict(before.get("settings"))
    if settings.workload != workload:
        raise UsageError(
            f"the run in {str(directory)!r} is one of `halfwise train {settings.workload}`, not {workload}; "
            f"use that command to go on, or give another --out."
        )
    for name, value in given.items():
        kept = getattr(settings, name)
        if name != "epochs" and value != kept and not (name == "policy" and _same_policy(str(value), kept)):
            option = "--" + name.replace("_", "-")
            started = f"without {option}" if kept is None else f"with {option} {kept}"
            raise UsageError(
                f"the run in {str(directory)!r} was started {started}, not {value}. A run goes on as it "
                f"began (only --epochs may change): leave {option} out, or start a new run with another --out."
            )
    epochs = given.get("epochs", settings.epochs)
    if epochs < settings.epochs:
        raise UsageError(
            f"--epochs {epochs} is less than the {settings.epochs} that the run in {directory} was started with; "
            "leave --epochs out to finish it, or give more"
        )
    settings = replace(settings, epochs=epochs)
    # The record has its own copy of the plan: the file may be gone or changed by now.
    plan = None if settings.policy in POLICIES else Plan.load(record.plan_path)
    training = make_training(choose_backend(settings), _load(settings), plan=plan, view=view)
    now = _environment(training)
    if before.get("data") != now["data"]:
        raise UsageError(
            f"the data {settings.data!r} are not those that the run in {str(directory)!r} began with "
            f"({before.get('data')} before, {now['data']} now): put them back, or start a new run."
        )
    if changes := environment_changes(before, now):
        view.message(
            f"this is not quite the environment that the run began in ({'; '.join(changes)}): it goes on, but the last "
            "bits of its numbers may differ from an uninterrupted run"
        )
    record.write_environment({**before, "settings": settings.as_dict()})
    return training, record


def finish(training: Training, record: RunRecord, results: Mapping[str, Any]) -> dict[str, Any]:
    """Measures what the plan cost and writes `summary.json`.

    Args:
        training: trained.
        record: its record.
        results: what `training.run` returned.

    Returns:
        The summary.
    """
    precision, settings = training.precision, training.settings
    plan = precision.plan
    training.view.measuring()
    half = plan is not None and (plan.default.compute != "float32" or any(r.compute != "float32" for r in plan.layers))
    summary = {
        "workload": settings.workload,
        "framework": settings.framework,
        "backend": settings.backend,
        "loop": settings.loop,
        "network": settings.network,
        "policy": settings.policy,
        "data": training.data.describe(),
        "seed": settings.seed,
        "epochs": settings.epochs,
        **results,
        "median_step_seconds": statistics.median(row["seconds"] for row in record.metrics()),
        "step_time": asdict(compare_with_float32(training)) if half else None,
        "loss_scale": precision.loss_scale,
        "skipped_steps": precision.skipped_steps,
        "incidents": [incident.as_dict() for incident in record.events()],
        "plan": None if plan is None else _described(plan),
        "elsewhere": training.elsewhere(_ELSEWHERE),
    }
    record.write_summary(summary)
    return summary


def _same_policy(given: str, kept: str) -> bool:
    try:
        return parse_policy(given) == kept
    except PolicyError:  # the path of a plan
        return False


def _load(settings: Settings) -> Dataset:
    data = load_data(settings.workload, settings.data)
    return data if settings.limit is None else data.first(settings.limit)


def _environment(training: Training) -> dict[str, Any]:
    settings = training.settings
    return {
        "workload": settings.workload,
        "framework": settings.framework,
        "settings": settings.as_dict(),
        "data": training.data.describe(),
        **training.environment(),
    }


def _free_directory(workload: str, policy: str) -> Path:
    number = 1
    while (directory := Path("runs") / f"{workload}-{policy}-{number}").exists():
        number += 1
    return directory


def _described(plan: Plan) -> dict[str, Any]:
    def entry(rule: Any) -> dict[str, Any]:
        return {"compute": rule.compute, "reason": rule.reason, "detail": rule.detail}

    return {
        "default": entry(plan.default),
        "layers": [{"name": rule.name, **entry(rule)} for rule in plan.layers],
    }
