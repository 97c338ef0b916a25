"""What a plan, and the run around it, say about the model or one module: gathered as data, for screens and JSON."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfwise.core.diagnosis import Incident
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.plan import REASONS, Default, Plan, Rule
from halfwise.core.profile import ACTIVATION, ACTIVATION_GRADIENT, WEIGHT, WEIGHT_GRADIENT, Profile
from halfwise.core.record import RunRecord
from halfwise.errors import PlanError, UsageError

__all__ = ["Sources", "explain_module", "explain_plan", "read_sources"]

_RANGE_FORMATS = ("float16", "bfloat16")


@dataclass(frozen=True)
class Sources:
    """Everything that an explanation draws on.

    Attributes:
        origin: the plan file or run directory that was read.
        plan: the plan.
        modules: module path -> class name, where a run recorded them.
        profile: exponent histograms, or None.
        incidents: what the guard did in the run.
        summary: the run's closing numbers, or None.
    """

    origin: Path
    plan: Plan
    modules: Mapping[str, str] = field(default_factory=dict)
    profile: Profile | None = None
    incidents: tuple[Incident, ...] = ()
    summary: Mapping[str, Any] | None = None


def read_sources(path: str | Path) -> Sources:
    """The plan in a file, or the plan and all that belongs to it in a run directory.

    Raises:
        UsageError: there is neither a file nor a run, or the run has no plan yet; PlanError, DataError: malformed.
    """
    origin = Path(path)
    if not origin.exists():
        raise UsageError(f"{str(origin)!r} does not exist; give a plan file (plan.toml) or a run directory.")
    if origin.is_file():
        return Sources(origin, Plan.load(origin))
    record = RunRecord.open(origin)
    if not record.plan_path.is_file():
        raise UsageError(
            f"the run in {str(origin)!r} has no plan yet: it is still gathering evidence, or was stopped then."
        )
    modules = record.environment().get("modules")
    return Sources(
        origin,
        Plan.load(record.plan_path),
        modules=modules if isinstance(modules, Mapping) else {},
        profile=Profile.load(record.profile_path) if record.profile_path.is_file() else None,
        incidents=tuple(record.events()),
        summary=record.summary(),
    )


def explain_plan(sources: Sources) -> dict[str, Any]:
    """The whole plan: default, layers, loss scale, incidents; and the run's closing numbers where there are any."""
    plan, summary = sources.plan, sources.summary
    chosen = ("policy", "test_accuracy", "steps", "skipped_steps", "step_time", "format_times")
    return {
        "origin": str(sources.origin),
        "framework": plan.framework,
        "model": plan.model,
        "target": plan.target,
        "default": _entry(plan.default),
        "loss_scale": vars(plan.loss_scale) if plan.loss_scale is not None else None,
        "layers": [{"name": rule.name, **_entry(rule)} for rule in plan.layers],
        "incidents": [incident.as_dict() for incident in sources.incidents],
        "run": {name: summary[name] for name in chosen if name in summary} if summary is not None else None,
    }


def explain_module(sources: Sources, module: str) -> dict[str, Any]:
    """All that is known about one module: what holds for it and why, its ranges, its incidents.

    Raises:
        PlanError: neither the plan nor the run knows the module.
    """
    plan, profile = sources.plan, sources.profile
    known = {*sources.modules, *(rule.path for rule in plan.layers if rule.path is not None)}
    known |= set(profile.paths()) if profile is not None else set()
    if module not in known and plan.match(module) is None:
        raise PlanError(_unknown(sources, module, sorted(known - {""})))
    entry = plan.rule_for(module)
    return {
        "origin": str(sources.origin),
        "module": module,
        "class": sources.modules.get(module, ""),
        "from": entry.name if isinstance(entry, Rule) else "default",
        **_entry(entry),
        "loss_scale": _power_of_two(plan),
        "ranges": _ranges(profile, module, _power_of_two(plan)),
        "incidents": [i.as_dict() for i in sources.incidents if i.module == module or module in i.suspects],
    }


def _entry(entry: Rule | Default) -> dict[str, Any]:
    storage = {name: getattr(entry, name) for name in ("parameters", "saved_activations", "optimizer_state")}
    return {
        "compute": entry.compute,
        **{name: value for name, value in storage.items() if value not in (None, "float32")},
        "reason": entry.reason,
        "reason_text": REASONS[entry.reason],
        "detail": entry.detail,
        "evidence": dict(entry.evidence),
    }


def _power_of_two(plan: Plan) -> float:
    """The loss scale to judge gradients at: the plan's first, rounded down to a power of two; 1 where it has none."""
    return 1.0 if plan.loss_scale is None else 2.0 ** math.floor(math.log2(plan.loss_scale.initial))


def _ranges(profile: Profile | None, module: str, loss_scale: float) -> dict[str, dict[str, Any]]:
    """Per role: how many values, how large, and what share of them the half-precision formats lose."""
    if profile is None:
        return {}
    scales = {ACTIVATION: 1.0, WEIGHT: 1.0, ACTIVATION_GRADIENT: loss_scale, WEIGHT_GRADIENT: loss_scale}
    found = {role: profile.get(module, role) for role in scales}
    return {role: _range(histogram, scales[role]) for role, histogram in found.items() if histogram is not None}


def _range(histogram: ExponentHistogram, loss_scale: float) -> dict[str, Any]:
    return {
        "values": histogram.total,
        "zeros": histogram.zeros,
        "infinities": histogram.infinities,
        "nans": histogram.nans,
        "largest": histogram.largest,
        **{
            f"{kind}_{name}": getattr(histogram, kind)(name, loss_scale if name == "float16" else 1.0).upper
            for name in _RANGE_FORMATS
            for kind in ("overflow", "underflow")
        },
    }


def _unknown(sources: Sources, module: str, known: list[str]) -> str:
    near = difflib.get_close_matches(module, known, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    elif known:
        hint = f"it knows {', '.join(map(repr, known[:8]))}" + (
            f" and {len(known) - 8} more." if len(known) > 8 else "."
        )
    else:
        hint = f"it has no entry of its own for any module: {sources.plan.default.compute} everywhere."
    return f"{str(sources.origin)!r} knows no module {module!r}; {hint}"
