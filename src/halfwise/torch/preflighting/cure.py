"""The smallest change of precision that lets the model train: found by trying, and verified by running."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from halfwise.core.hazards import Hazard, HazardKind
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Default, Plan, Reason, Rule
from halfwise.core.preflight import LossScaleRange, native_format
from halfwise.core.ranges import LOSS_SCALES
from halfwise.core.scale_range import largest_fitting_scale, largest_gradient, underflow_share
from halfwise.torch.names import unwrap
from halfwise.torch.preflighting.examine import Examination, Subject, examine
from halfwise.torch.preflighting.trial import Trial
from halfwise.torch.preflighting.wrong import MOSTLY

__all__ = ["Cure", "find_cure", "plan_of"]

_MOST_ROUNDS = 12

_REASONS: dict[HazardKind, Reason] = {
    "overflow": "range",
    "dead_output": "range",
    "vanishing": "range",
    "unsupported": "operation",
    "custom_function": "operation",
    "precision": "sensitivity",
}


@dataclass(frozen=True)
class Cure:
    """What was tried last.

    Attributes:
        trial: how the model ran.
        reasons: module path -> the hazard that put it into float32.
        hazards: all that were found on the way, the first ones first.
        last: what the last examination found.
        cured: it found no hazard.
    """

    trial: Trial
    reasons: dict[str, Hazard] = field(default_factory=dict)
    hazards: tuple[Hazard, ...] = ()
    last: Examination = field(default_factory=Examination)
    cured: bool = False


def find_cure(subject: Subject, trial: Trial, first: Examination) -> Cure:
    """Keeps culprits in float32, one after another, until nothing goes wrong or nothing is left to try."""
    cure = Cure(trial, hazards=tuple(first.hazards), last=first, cured=not first.hazards)
    for _ in range(_MOST_ROUNDS):
        if cure.cured:
            break
        extended = _extended(subject, cure)
        if extended is None:
            break
        subject, following = extended
        last = examine(subject, following.trial)
        known = {_key(hazard) for hazard in cure.hazards}
        new = tuple(hazard for hazard in last.hazards if _key(hazard) not in known)
        cure = replace(following, hazards=cure.hazards + new, last=last, cured=not last.hazards)
    return cure


def _extended(subject: Subject, cure: Cure) -> tuple[Subject, Cure] | None:
    """Subject and trial with the culprits of the last examination moved; None where nothing is left to move."""
    trial, reasons, progress = cure.trial, dict(cure.reasons), False
    for hazard in cure.last.hazards:
        paths = [] if hazard.kind == "loss_scale" else [hazard.module]
        if hazard.kind == "loss_scale" and subject.loss_scale is not None:
            subject, progress = replace(subject, loss_scale=None), True
        if hazard.kind == "vanishing":
            scale, unfit = _unfit(subject, cure.last)
            subject, paths = replace(subject, loss_scale=scale), list(dict.fromkeys([*unfit, *paths]))
        for path in paths:
            if not path and not hazard.module_class:
                progress = progress or not trial.loss_outside
                trial = replace(trial, loss_outside=True, in_force=False)
            elif (moved := trial.with_float32(subject.model, path, subject.setting.half)) is not None:
                trial, progress = moved, True
                reasons.setdefault(path, hazard)
    return (subject, Cure(trial, reasons)) if progress else None


def _unfit(subject: Subject, last: Examination) -> tuple[float, list[str]]:
    """The loss scale at which the fewest layers do not fit float16, and these."""
    half = [path for path in subject.layers if last.computes_in_half(path)]
    largest = {path: largest_gradient(subject.profile, path) for path in half}

    def unfit(scale: float) -> list[str]:
        too_large = (path for path in half if largest_fitting_scale(largest[path]) < scale)
        too_small = (path for path in half if underflow_share(subject.profile, path, scale) > MOSTLY)
        return list(dict.fromkeys([*too_large, *too_small]))

    best = min(LOSS_SCALES, key=lambda scale: (len(unfit(scale)), -scale))
    return best, unfit(best)


def plan_of(subject: Subject, cure: Cure, *, loss_scale: LossScaleRange | None) -> Plan:
    """The trial as a plan, with the hazards as reasons."""
    setting = subject.setting
    rules = []
    for path, compute in cure.trial.rules.items():
        hazard = cure.reasons.get(path)
        if hazard is not None:
            reason = _REASONS.get(hazard.kind, "hazard")
            rules.append(Rule(path=path, compute=compute, reason=reason, detail=hazard.detail))
        else:
            detail = "what encloses it is kept in float32" if cure.reasons else "of the plan in force"
            rules.append(Rule(path=path, compute=compute, reason="policy", detail=detail))
    settings = None
    if setting.half == "float16":
        initial = loss_scale.highest if loss_scale is not None else LossScaleSettings().initial
        settings = LossScaleSettings(initial=initial, hysteresis=2)
    default = Default(compute=native_format(setting.policy), reason="policy", detail=f"policy {setting.policy!r}")
    return Plan(
        framework="torch",
        model=type(unwrap(subject.model)).__name__,
        target=setting.target,
        default=default,
        loss_scale=settings,
        layers=tuple(rules),
    )


def _key(hazard: Hazard) -> tuple[str, ...]:
    return (hazard.kind, hazard.module, hazard.operation, hazard.source)
