"""Why weight gradients are wrong although nothing overflows: digits were lost, or gradients vanished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfwise.core.formats import get_format
from halfwise.core.hazards import Hazard
from halfwise.core.scale_range import underflow_share
from halfwise.torch.preflighting.faults import lost_digits
from halfwise.torch.preflighting.observe import observe
from halfwise.torch.preflighting.trial import Trial
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.slicing import suspect_of

if TYPE_CHECKING:
    from halfwise.torch.preflighting.examine import Examination, Subject

__all__ = ["MOSTLY", "wrong_gradients"]

MOSTLY = 0.3
"""Share of a layer's gradients that round to zero from which on that explains why its weight gradients are wrong."""


def wrong_gradients(subject: Subject, trial: Trial, found: Examination) -> list[Hazard]:
    """The hazards behind the comparisons that say `wrong`; the layers of one cause make one hazard.

    Where no cause is found a note is added to `found` instead: towards the end of a training, gradients are small
    differences of large ones, and half precision changes them a lot without harm.
    """
    wrong = [path for path, comparison in found.comparisons.items() if comparison.wrong]
    if not wrong or not any(reference.loss for reference in subject.references):  # a loss of 0 teaches nothing more
        return []
    if found.loss_scale is not None:
        used = found.loss_scale.used
        vanished = [path for path in wrong if underflow_share(subject.profile, path, used) > MOSTLY]
        if vanished:
            return [_vanishing(subject, trial, found, vanished)]
    for run, reference in zip(found.traced, subject.references, strict=True):
        for hazard in lost_digits(run, reference, get_format(subject.setting.products).eps)[:1]:
            return [_with_detail(hazard, f"{hazard.detail}; weight gradients of {_some(wrong)} are wrong")]
    dead = [path for path in wrong if found.comparisons[path].dead]
    if dead:
        return [
            Hazard(
                kind="dead_layer",
                module=dead[-1],
                module_class=type(subject.layers[dead[-1]]).__name__,
                direction="backward",
                detail=f"weight gradients of {_some(dead)} are 0 in {subject.setting.half}, and not in float32",
            )
        ]
    worst = max(wrong, key=lambda path: found.comparisons[path].relative_error)
    found.notes.append(
        f"weight gradients of {_some(wrong)} differ by up to {found.comparisons[worst].relative_error:.0%} from "
        "float32's, by no fault of one operation: they are sums that nearly cancel out"
    )
    return []


def _vanishing(subject: Subject, trial: Trial, found: Examination, vanished: list[str]) -> Hazard:
    """One hazard at the operation at which gradients first become zero on the way back."""
    assert found.loss_scale is not None
    used = found.loss_scale.used
    last = vanished[-1]
    limit = f", where {found.limited_by} comes near float16's limit" if found.limited_by else ""
    share = max(underflow_share(subject.profile, path, used) for path in vanished)
    detail = f"{share:.0%} of the gradients in {_some(vanished)} round to zero at the loss scale {used:g}{limit}"
    place = _where_it_vanishes(subject, trial, used) or Hazard(
        kind="vanishing", module=last, module_class=type(subject.layers[last]).__name__, direction="backward"
    )
    fix = ("keep it in float32 as the plan does, or bring its factors nearer to 1",)
    return Hazard(**{**vars(place), "detail": detail, "fix": fix})


def _where_it_vanishes(subject: Subject, trial: Trial, scale: float) -> Hazard | None:
    """The first operation of backward that makes nothing but zeros in float16 of gradients that were not zero."""
    for closure in subject.closures:
        run = observe(
            subject.model,
            closure,
            lambda: trial.region(subject.setting),
            scale,
            {},
            traced=True,
            around=trial.around(subject.model, subject.setting),
            emulated=subject.setting.emulated,
        )
        if run.trace is None or run.replay is None:
            continue
        records = run.trace.settle()
        follows = set(run.replay.seeds)
        for record in records:
            if record.direction != "backward" or not any(given.record in follows for given in record.inputs):
                continue
            follows.add(record.index)
            if _vanishes(record, records):
                suspect = suspect_of(run.trace, record)
                return Hazard(
                    kind="vanishing",
                    module=suspect.module,
                    module_class=suspect.module_class,
                    operation=suspect.operation,
                    direction="backward",
                    source=suspect.source,
                )
    return None


def _vanishes(record: Record, records: list[Record]) -> bool:
    if record.dtype != "float16" or record.largest != 0.0 or not record.inputs:
        return False
    return all(records[given.record].largest > 0.0 for given in record.inputs)


def _with_detail(hazard: Hazard, detail: str) -> Hazard:
    return Hazard(**{**vars(hazard), "detail": detail})


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return ", ".join(path or "(the model)" for path in paths[:2]) + more
