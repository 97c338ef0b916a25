"""Runs of the image workload from start to summary: what `halfwise train image` calls."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import halfwise.torch as hw
from halfwise.core.policy import POLICIES, parse_policy
from halfwise.core.record import RunRecord
from halfwise.errors import PolicyError, UsageError
from halfwise.workloads.compare import compare_with_float32
from halfwise.workloads.data import ImageData, load_images
from halfwise.workloads.settings import ImageSettings, describe_environment, environment_changes
from halfwise.workloads.training import ImageTraining, View

__all__ = ["finish", "new_run", "resumed_run"]

_TINY = 256  # values per image


def new_run(settings: ImageSettings, directory: Path | None, view: View) -> tuple[ImageTraining, RunRecord]:
    """A training and its fresh record. Nothing is written before everything has been checked.

    Args:
        settings: `policy` may be any spelling of a policy, or the path of a plan.
        directory: for the record; None takes the first free one of `runs/image-POLICY-1`, `-2`, ...
        view: is told what happens.

    Raises:
        UsageError: policy, plan, data or directory cannot be used.
    """
    plan = None
    if settings.policy.endswith(".toml") or Path(settings.policy).is_file():
        plan = hw.Plan.load(settings.policy)
    else:
        settings = replace(settings, policy=parse_policy(settings.policy))
    data = _load(settings)
    _use_one_thread_for_tiny_images(data)
    training = ImageTraining(settings, data, plan=plan, view=view)
    target = directory or _free_directory("plan" if plan is not None else settings.policy)
    text = None if plan is None else Path(settings.policy).read_text(encoding="utf-8")
    return training, RunRecord.create(target, _environment(training), plan=text)


def resumed_run(directory: Path, given: Mapping[str, Any], view: View) -> tuple[ImageTraining, RunRecord]:
    """The training that `directory` records, ready to go on. Its settings hold; `given` may only raise `epochs`.

    Raises:
        UsageError: there is no run, or `given` contradicts its settings.
        DataError: the record is damaged.
    """
    record = RunRecord.open(directory)
    before = record.environment()
    settings = ImageSettings.from_dict(before.get("settings"))
    for name, value in given.items():
        kept = getattr(settings, name)
        if name != "epochs" and value != kept and not (name == "policy" and _same_policy(str(value), kept)):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"the run in {str(directory)!r} was started with {option} {kept}, not {value}. A run goes on as it "
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
    plan = None if settings.policy in POLICIES else hw.Plan.load(record.plan_path)
    data = _load(settings)
    _use_one_thread_for_tiny_images(data)
    training = ImageTraining(settings, data, plan=plan, view=view)
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


def finish(training: ImageTraining, record: RunRecord, results: Mapping[str, Any]) -> dict[str, Any]:
    """Measures what the plan cost and writes `summary.json`.

    Args:
        training: trained.
        record: its record.
        results: what `training.run` returned.

    Returns:
        The summary.
    """
    mp, settings = training.mp, training.settings
    plan = mp.plan
    training.view.measuring()
    half = plan is not None and (plan.default.compute != "float32" or any(r.compute != "float32" for r in plan.layers))
    summary = {
        "workload": "image",
        "framework": "torch",
        "network": settings.network,
        "policy": settings.policy,
        "data": training.data.describe(),
        "seed": settings.seed,
        "epochs": settings.epochs,
        **results,
        "median_step_seconds": statistics.median(row["seconds"] for row in record.metrics()),
        "step_time": asdict(compare_with_float32(training)) if half else None,
        "loss_scale": mp.loss_scale,
        "skipped_steps": mp.skipped_steps,
        "incidents": [incident.as_dict() for incident in record.events()],
        "plan": None if plan is None else _described(plan),
    }
    record.write_summary(summary)
    return summary


def _same_policy(given: str, kept: str) -> bool:
    try:
        return parse_policy(given) == kept
    except PolicyError:  # the path of a plan
        return False


def _load(settings: ImageSettings) -> ImageData:
    data = load_images(settings.data)
    return data if settings.limit is None else data.first(settings.limit)


def _use_one_thread_for_tiny_images(data: ImageData) -> None:
    # A step on 8 x 8 pixels takes about a millisecond. Threads only wait for each other then, tens of times as long
    # where others want the cores; such times are worth nothing to "auto". Whoever sets OMP_NUM_THREADS is obeyed.
    if math.prod(data.shape) <= _TINY and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _environment(training: ImageTraining) -> dict[str, Any]:
    return describe_environment(
        training.settings, model=training.model, device=training.device, data=training.data.describe()
    )


def _free_directory(policy: str) -> Path:
    number = 1
    while (directory := Path("runs") / f"image-{policy}-{number}").exists():
        number += 1
    return directory


def _described(plan: hw.Plan) -> dict[str, Any]:
    def entry(rule: Any) -> dict[str, Any]:
        return {"compute": rule.compute, "reason": rule.reason, "detail": rule.detail}

    return {
        "default": entry(plan.default),
        "layers": [{"name": rule.name, **entry(rule)} for rule in plan.layers],
    }
