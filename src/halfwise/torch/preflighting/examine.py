"""All batches under one trial: what goes wrong, and how the weight gradients compare with float32's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from halfwise.core.hazards import Hazard
from halfwise.core.preflight import LossScaleRange
from halfwise.core.profile import Profile
from halfwise.core.scale_range import loss_scale_range
from halfwise.torch.closure import Closure
from halfwise.torch.preflighting.compare import Comparison, compare_gradients
from halfwise.torch.preflighting.failures import hazard_of_failure
from halfwise.torch.preflighting.faults import (
    infinite_constants,
    lost_epsilons,
    overflows,
    silent_overflows,
)
from halfwise.torch.preflighting.observe import Run, observe
from halfwise.torch.preflighting.regions import Setting
from halfwise.torch.preflighting.trial import Trial
from halfwise.torch.preflighting.wrong import wrong_gradients
from halfwise.torch.tracing.slicing import scale_limit, suspect_of

__all__ = ["Examination", "Subject", "examine"]


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        model: what the closures run.
        closures: one per batch.
        layers: the layers to tell of, by path.
        profile: their exponent histograms in float32.
        references: runs in float32, traced, one per batch; empty where the code does not run in float32.
        setting: the policy on the target.
        loss_scale: the one to use, or None for one that suits.
    """

    model: nn.Module
    closures: tuple[Closure, ...]
    layers: Mapping[str, nn.Module]
    profile: Profile
    references: tuple[Run, ...]
    setting: Setting
    loss_scale: float | None = None


@dataclass
class Examination:
    """What was found.

    Attributes:
        hazards: what goes wrong, in the order in which it was found.
        traced: the runs of the batches at loss scale 1, traced.
        runs: the runs that gradients are taken from: the same, or in float16 those at the loss scale.
        comparisons: path -> weight gradients against float32's; empty where some batch did not run to the end.
        loss_scale: float16 alone: the scales that suit.
        limited_by: where gradients overflow first at a higher scale.
        notes: sentences on what is harmless.
    """

    hazards: list[Hazard] = field(default_factory=list)
    traced: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    loss_scale: LossScaleRange | None = None
    limited_by: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """Mean loss of the batches; None where one did not run to the end."""
        if not self.runs or any(run.replay is None for run in self.runs):
            return None
        return sum(run.loss for run in self.runs) / len(self.runs)

    def computes_in_half(self, path: str) -> bool:
        """Whether the layer's results were mostly in a 16-bit format."""
        counted = self.runs[0].layers.dtypes.get(path) if self.runs else None
        return bool(counted and counted.most_common(1)[0][0] in ("float16", "bfloat16"))


def examine(subject: Subject, trial: Trial) -> Examination:
    """Runs every batch under the trial and looks at what happens."""
    found = Examination()
    for number, closure in enumerate(subject.closures):
        run = _run(subject, trial, closure, 1.0, traced=True)
        found.traced.append(run)
        found.hazards += _faults(subject, run, subject.references[number] if subject.references else None)
        if run.trace is not None:
            found.notes += infinite_constants(run.trace)
    found.runs = found.traced
    _deduplicate(found)
    if not all(run.sound for run in found.runs):
        return found
    if subject.setting.half == "float16":
        _at_a_loss_scale(subject, trial, found)
    if subject.references and all(run.sound for run in found.runs) and not found.hazards:
        runs = found.runs
        found.comparisons = compare_gradients(subject.layers, subject.references, runs, subject.setting.products)
        found.hazards += wrong_gradients(subject, trial, found)
    return found


def _run(subject: Subject, trial: Trial, closure: Closure, scale: float, *, traced: bool) -> Run:
    setting = subject.setting
    return observe(
        subject.model,
        closure,
        lambda: trial.region(setting),
        scale,
        subject.layers,
        traced=traced,
        around=trial.around(subject.model, setting),
        emulated=setting.emulated,
    )


def _faults(subject: Subject, run: Run, reference: Run | None) -> list[Hazard]:
    if run.error is not None:
        return [hazard_of_failure(subject.model, run, subject.setting)]
    assert run.trace is not None
    if not run.sound:
        return overflows(run, subject.setting)
    faults = lost_epsilons(run.trace)
    if reference is not None and subject.setting.half != "float32":
        faults += silent_overflows(run, reference, subject.setting)
    return faults


def _at_a_loss_scale(subject: Subject, trial: Trial, found: Examination) -> None:
    """Finds the scales that suit, and runs again at one of them."""
    limits = []
    for run in found.runs:
        assert run.trace is not None
        assert run.replay is not None
        limits.append((scale_limit(run.trace, run.replay.seeds, 1.0).largest, run))
    largest, narrowest = min(limits, key=lambda limit: limit[0])
    paths = [path for path in subject.layers if found.computes_in_half(path)]
    found.loss_scale = loss_scale_range(subject.profile, paths, largest=largest, used=subject.loss_scale)
    used = found.loss_scale.used
    assert narrowest.trace is not None
    assert narrowest.replay is not None
    first = scale_limit(narrowest.trace, narrowest.replay.seeds, max(used, 2.0 * largest)).overflowing
    suspects = [suspect_of(narrowest.trace, record, scale=max(used, 2.0 * largest)) for record in first]
    found.limited_by = (suspects[0].module or suspects[0].source) if suspects else ""
    if used > largest:
        detail = f"gradients overflow at the loss scale {used:g}; the largest power of two that fits is {largest:g}"
        found.hazards += [
            Hazard(
                kind="loss_scale",
                module=suspect.module,
                module_class=suspect.module_class,
                operation=suspect.operation,
                direction="backward",
                source=suspect.source,
                detail=detail,
                fix=(f"loss_scale={found.loss_scale.highest:g}  # leaves room to grow",),
            )
            for suspect in suspects[:1]
        ] or [Hazard(kind="loss_scale", detail=detail)]
        return
    while used > 1.0:
        found.runs = [_run(subject, trial, closure, used, traced=False) for closure in subject.closures]
        if all(run.sound for run in found.runs) or subject.loss_scale is not None:
            return
        used = max(1.0, used / 8.0)  # what overflows at a scale is predicted but for operations that round upwards
        found.loss_scale = replace(found.loss_scale, highest=min(found.loss_scale.highest, used), used=used)
    found.runs = found.traced


def _deduplicate(found: Examination) -> None:
    unique = {(h.kind, h.module, h.operation, h.source): h for h in reversed(found.hazards)}
    found.hazards = list(reversed(unique.values()))
    found.notes = list(dict.fromkeys(found.notes))
