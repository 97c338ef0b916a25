"""`preflight`: what a model would do under a policy on hardware that is not at hand, found on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from halfwise.core.hazards import Hazard, by_gravity
from halfwise.core.preflight import Preflight, not_native, preflight_policy
from halfwise.core.targets import HERE, get_target
from halfwise.errors import UsageError
from halfwise.torch.closure import Closure, as_closures
from halfwise.torch.emulation import drift
from halfwise.torch.names import unwrap
from halfwise.torch.preflighting.cure import Cure, find_cure, plan_of
from halfwise.torch.preflighting.examine import Examination, Subject, examine
from halfwise.torch.preflighting.inspection import half_weights, lost_optimizer_epsilons
from halfwise.torch.preflighting.reference import Reference, reference_of
from halfwise.torch.preflighting.regions import Setting, setting_of
from halfwise.torch.preflighting.rows import layer_rows
from halfwise.torch.preflighting.trial import Trial, first_trial
from halfwise.torch.preflighting.updates import dead_updates
from halfwise.torch.region import device_type_of
from halfwise.torch.snapshot import modes_kept
from halfwise.torch.validate import as_optimizers, check_module

__all__ = ["preflight"]

_MOST_DEAD_UPDATES = 0.1
"""Share of a layer's weights that may stand still before that is a hazard."""

_NEAR = 0.125
"""Share of the format's largest value from which on a note tells that little room is left."""


def preflight(
    model: nn.Module,
    closure: Closure | Sequence[Closure],
    *,
    policy: str = "mixed_float16",
    target: str = "cuda:ampere",
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loss_scale: float | None = None,
) -> Preflight:
    """What `model` would do under `policy` on `target`: what overflows, vanishes, is wrong or does not run, and where.

    The closures run forward and backward here, in float32 and by the target's rules for mixed precision, which are
    emulated. Then the smallest change that lets the model train is looked for, and verified by running again. Nothing
    of the user's is changed: weights, gradients, buffers, generators, modes, optimizer. Of a GPU's arithmetic the order
    of additions is not emulated, and time is not estimated.

    Args:
        model: what the closures run, on the CPU. Where a plan is in force on it, that is examined.
        closure: runs forward and returns the loss, or `(loss, anything)`; it must not enter `torch.autocast` itself.
            Several closures are several batches.
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"float8"`, `"tensorfloat32"` or `"float32"`.
        target: `"cuda:volta"`, `"cuda:ampere"`, `"cuda:hopper"`, `"cuda:blackwell"`, `"tpu"` (by CUDA's lists),
            `"cpu:amx"`, `"cpu:avx2"`, or `"here"`.
        optimizer: where it is given, updates that half-precision weights would lose are looked for.
        loss_scale: for float16, the scale that training uses; None for one that suits.

    Raises:
        PolicyError: the policy or the target is unknown, or cannot be emulated for a model on this device.
        UsageError: the model is no module, a closure returns no loss, or the loss scale is no power of two.
        Exception: what a closure raises in float32 too.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Linear(64, 2)
        >>> _ = torch.nn.init.constant_(model.weight, 40.0)
        >>> found = hw.preflight(model, lambda: model(torch.full((1, 64), 60.0)).float().mean())
        >>> found.verdict, found.hazards[0].kind, found.hazards[0].module_class
        ('hazards', 'overflow', 'Linear')
    """
    check_module(model)
    closures = as_closures(closure)
    policy = preflight_policy(policy)
    optimizers = as_optimizers(optimizer) if optimizer is not None else ()
    _check_loss_scale(loss_scale)
    setting = setting_of(policy, target, device_type_of(model))
    with modes_kept(model):
        reference = reference_of(model, closures, setting)
        return _Preflight(model, closures, setting, reference, optimizers, loss_scale).result()


class _Preflight:
    """One preflight under way, its float32 runs done."""

    def __init__(
        self,
        model: nn.Module,
        closures: tuple[Closure, ...],
        setting: Setting,
        reference: Reference,
        optimizers: tuple[Optimizer, ...],
        loss_scale: float | None,
    ) -> None:
        self.model, self.setting, self.reference, self.optimizers = model, setting, reference, optimizers
        self.subject = Subject(
            model, closures, reference.layers, reference.profile, reference.runs, setting, loss_scale
        )

    def result(self) -> Preflight:
        native = not_native(self.setting.policy, self.setting.target)
        hazards = [native] if native is not None else []
        if self.reference.hazard is not None:
            return self._told([*hazards, self.reference.hazard], Examination(), None)
        if self.setting.compute == "float32":
            return self._told([*hazards, *self._inspected()], Examination(runs=list(self.reference.runs)), None)
        trial = first_trial(self.model)
        first = examine(self.subject, trial)
        self._check_that_it_runs_at_all(first)
        cure = find_cure(self.subject, trial, first)
        return self._told([*hazards, *cure.hazards, *self._inspected()], first, cure)

    def _check_that_it_runs_at_all(self, first: Examination) -> None:
        """A closure that raises in float32 and under the policy is broken, not a hazard."""
        if self.reference.error is not None and any(run.error is not None for run in first.runs):
            raise self.reference.error

    def _inspected(self) -> list[Hazard]:
        return [*half_weights(self.model), *lost_optimizer_epsilons(self.model, self.optimizers)]

    def _told(self, hazards: list[Hazard], first: Examination, cure: Cure | None) -> Preflight:
        subject, setting = self.subject, self.setting
        runs = cure.last.runs if cure is not None else first.runs
        gradients = runs[0].gradients if runs else {}
        dead = dead_updates(subject.layers, self.optimizers, gradients)
        if dead and max(dead.values()) > _MOST_DEAD_UPDATES:
            hazards.append(_dead(subject, dead))
        scale = first.loss_scale or (cure.last.loss_scale if cure is not None else None)
        plan = None
        if cure is not None and (cure.reasons or not cure.hazards):
            plan = plan_of(subject, cure, loss_scale=cure.last.loss_scale)
        losses = [run.loss for run in self.reference.runs]
        found = Preflight(
            policy=setting.policy,
            target=setting.target,
            framework="torch",
            model=type(unwrap(self.model)).__name__,
            loss_float32=sum(losses) / len(losses) if losses else math.nan,
            loss=first.loss,
            loss_scale=scale,
            layers=layer_rows(subject, first, dead),
            hazards=by_gravity(hazards),
            plan=plan,
            cured=cure.cured if cure is not None and cure.hazards else None,
            loss_in_float32=cure is not None and cure.trial.loss_outside,
            alternative=self._alternative(cure),
            batches=len(subject.closures),
        )
        return replace(found, notes=tuple(self._notes(found, first, cure)))

    def _notes(self, found: Preflight, first: Examination, cure: Cure | None) -> list[str]:
        notes = [*self.reference.notes, *dict.fromkeys([*first.notes, *(cure.last.notes if cure else [])])]
        notes += _near_the_limit(found, self.setting)
        if cure is not None and cure.trial.loss_outside:
            device = self.setting.autocast_device
            notes.append(
                "the cure computes what lies outside the model in float32: "
                f'with torch.autocast("{device}", enabled=False): loss = criterion(output.float(), y)'
            )
        if self.setting.emulated:
            notes += [f"this PyTorch is another than was copied: {sentence}" for sentence in drift()[:3]]
            notes.append(
                f"{self.setting.target}'s rules were emulated on {self.setting.on}; "
                "additions in another order are not, and time is not estimated"
            )
        return notes

    def _alternative(self, cure: Cure | None) -> str:
        """The other policy of 16 bits, where the target has it and it does without hazards."""
        target, other = self.setting.target, "mixed_bfloat16"
        if self.setting.policy != "mixed_float16" or cure is None or not cure.hazards:
            return ""
        if target == HERE or "bfloat16" not in get_target(target).formats:
            return ""
        setting = self.setting._replace(policy=other, compute="bfloat16", half="bfloat16")
        subject = replace(self.subject, setting=setting, loss_scale=None)
        return "" if examine(subject, Trial()).hazards else other


def _dead(subject: Subject, dead: dict[str, float]) -> Hazard:
    worst = max(dead, key=dead.__getitem__)
    formats = sorted({str(p.dtype).removeprefix("torch.") for p in subject.layers[worst].parameters()})
    return Hazard(
        kind="dead_updates",
        module=worst,
        module_class=type(subject.layers[worst]).__name__,
        detail=f"{dead[worst]:.0%} of its weights, stored in {' and '.join(formats)}, do not move at the next update",
        fix=("model.float()  # float32 weights; the policy computes in half from them",),
    )


def _near_the_limit(found: Preflight, setting: Setting) -> list[str]:
    if setting.half != "float16":
        return []
    half = [row for row in found.layers if row.formats[:1] == ("float16",)]
    if not half:
        return []
    row = max(half, key=lambda row: row.largest_activation)
    if not 65504.0 * _NEAR < row.largest_activation <= 65504.0:
        return []
    return [
        f"{row.path or 'the model'} reaches {row.largest_activation:.3g} of float16's 65504: it fits now, "
        "with little room to grow"
    ]


def _check_loss_scale(loss_scale: float | None) -> None:
    if loss_scale is None:
        return
    is_number = isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool)
    if not (is_number and math.isfinite(loss_scale) and loss_scale > 0 and math.frexp(loss_scale)[0] == 0.5):
        raise UsageError(f"preflight(loss_scale={loss_scale!r}): give a power of two, such as 65536.0, or None")
