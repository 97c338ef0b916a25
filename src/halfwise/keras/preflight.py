"""`preflight`: what a Keras model would do under a policy on hardware that is not at hand, found on a CPU.

Keras has no autocast lists: a layer computes in the format that its policy says, on every device, so that running the
policy here shows what it does there. A GPU's order of additions and its fused kernels are not shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.hazards import Hazard, HazardKind, by_gravity
from halfwise.core.options import plan_of_policy
from halfwise.core.plan import Plan, Rule
from halfwise.core.preflight import PREFLIGHT_POLICIES, LayerRow, Preflight, not_native, preflight_policy
from halfwise.core.profile import Profile
from halfwise.core.scale_range import GRADIENT_ROLES, largest_gradient, loss_scale_range, underflow_share
from halfwise.core.targets import HERE, get_target
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.apply import AppliedPlan
from halfwise.keras.diagnose import diagnose_under, plan_to_examine
from halfwise.keras.guarded_step import Step
from halfwise.keras.localise import FLOAT32
from halfwise.keras.probe import Observer, as_in_fit, built, probe, tapped_layers, to_numpy
from halfwise.keras.profile import Recorder, parameters, profiled_layers
from halfwise.keras.training_step import OwnStep
from halfwise.keras.validate import check_batch, check_model

__all__ = ["preflight"]

_MOST_CURES = 8
"""Layers that are moved to float32 before the search for a cure is given up."""

_VANISHED = 0.5
"""Share of a layer's gradients that round to zero, at the loss scale, from which on its training signal is lost."""

_KINDS: dict[str, HazardKind] = {
    "gradient_vanishes": "half_head",
    "loss_scale_too_high": "loss_scale",
    "not_a_precision_problem": "unsound_in_float32",
    "nonfinite_input": "unsound_in_float32",
    "nonfinite_parameters": "unsound_in_float32",
    "overflow_at_every_scale": "overflow",
}


def preflight(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    policy: str = "mixed_float16",
    target: str = "cuda:ampere",
) -> Preflight:
    """What `model` would do under `policy` on `target`: what overflows, vanishes, is wrong or does not run, and where.

    One training step per batch runs here, in float32 and under the policy. Then layers are moved to float32 until the
    model trains, and that is verified by running again. Nothing is changed: weights, statistics, metrics, seeds, dtype
    policies.

    Args:
        model: compiled, or with `loss` given; variables in float32. It is built if it is not.
        x, y, sample_weight: one batch; or `x` alone: a list of batches `(x, y)` or `(x, y, sample_weight)`.
        loss: what `model.compile` takes as a loss; default the compiled one.
        policy: `"mixed_float16"`, `"mixed_bfloat16"` or `"float32"`.
        target: `"cuda:volta"`, `"cuda:ampere"`, `"cuda:hopper"`, `"cuda:blackwell"`, `"tpu"`, `"cpu:amx"`,
            `"cpu:avx2"`, or `"here"`.

    Raises:
        PolicyError: the policy or the target is unknown, or cannot be run here: Keras computes in neither float8 nor
            tensorfloat32 on a CPU.
        UsageError: this is no Keras model, or there is no loss or no data.

    Example:
        >>> import keras, numpy as np
        >>> large = keras.initializers.Constant(40.0)
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2, kernel_initializer=large, name="fc")])
        >>> found = preflight(model, np.full((4, 64), 60.0), np.zeros((4, 2)), loss="mse")
        >>> found.verdict, found.hazards[0].kind, found.hazards[0].module
        ('hazards', 'overflow', 'fc')
    """
    check_model(model)
    policy = preflight_policy(policy)
    compute = PREFLIGHT_POLICIES[policy]
    if compute in ("float8", "tensorfloat32"):
        raise PolicyError(
            f"preflight(policy={policy!r}): Keras' layers cannot be run in {compute} on a CPU. Allowed with Keras: "
            "'mixed_float16', 'mixed_bfloat16', 'float32'"
        )
    native = not_native(policy, target)
    batches = [keras.tree.map_structure(as_in_fit, batch) for batch in _batches(x, y, sample_weight)]
    if loss is None and not model.compiled:
        raise UsageError("preflight() needs a loss: compile the model before, or give loss=...")
    step: Step = model.train_step if loss is None else OwnStep(model, loss)
    built(model, batches[0], step)
    found = _Preflight(model, batches, step, policy, compute, target).result()
    return replace(found, hazards=by_gravity([*([native] if native else []), *found.hazards]))


@dataclass(frozen=True)
class _Seen:
    """What the steps on all batches did under one plan.

    Attributes:
        loss: the mean.
        gradients: for each batch, `id(variable) -> gradient`, unscaled, float64.
        formats: path -> how often its outputs had which dtype.
        error: what a step raised, or None.
    """

    loss: float = math.nan
    gradients: tuple[dict[int, Any], ...] = ()
    formats: dict[str, Counter[str]] | None = None
    error: Exception | None = None

    @property
    def finite(self) -> bool:
        """Loss and all gradients are."""
        return math.isfinite(self.loss) and all(np.isfinite(g).all() for one in self.gradients for g in one.values())


class _Dtypes(Observer):
    """Notes what layers really return."""

    def __init__(self) -> None:
        self.formats: dict[str, Counter[str]] = {}

    def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:  # noqa: ARG002
        names = (keras.backend.standardize_dtype(tensor.dtype) for tensor in outputs)
        self.formats.setdefault(path, Counter()).update(names)


class _Preflight:
    """One preflight under way."""

    def __init__(
        self, model: keras.Model, batches: Sequence[Any], step: Step, policy: str, compute: str, target: str
    ) -> None:
        self.model, self.batches, self.step = model, batches, step
        self.policy, self.compute, self.target = policy, compute, target
        self.name = type(model).__name__
        self.layers = profiled_layers(model)

    def result(self) -> Preflight:
        profile, exact = self._in_float32()
        told = Preflight(
            policy=self.policy,
            target=self.target,
            framework="keras",
            model=self.name,
            loss_float32=exact.loss,
            batches=len(self.batches),
        )
        with AppliedPlan(self.model, FLOAT32, settle=False):
            in_float32 = self._diagnosed(FLOAT32, "float32", 1.0)
        if not in_float32.healthy:
            return replace(told, hazards=(_hazard(in_float32, self._class_of(in_float32.module)),))
        plan = self._plan()
        scales = None
        if self.compute == "float16":
            scales = loss_scale_range(profile, self.layers)
        scale = scales.used if scales is not None else 1.0
        seen = self._run(plan, scale)
        rows = tuple(self._rows(profile, exact, seen, scale))
        hazards, cure, cured = self._cured(plan, profile, exact, seen, scale)
        return replace(
            told,
            loss=None if seen.error is not None else seen.loss,
            loss_scale=scales,
            layers=rows,
            hazards=tuple(hazards),
            plan=cure,
            cured=cured if hazards else None,
            alternative=self._alternative(profile, exact) if hazards else "",
            notes=(
                f"the policy was run on this machine; how {self.target} orders additions is not foretold, "
                "and time is not estimated",
            ),
        )

    def _plan(self) -> Plan:
        """The policy, or where some layers compute in its format already, what the layers' own policies say."""
        standing = plan_to_examine(self.model, self.compute)
        if standing.layers or self.compute == "float32":
            return standing
        return plan_of_policy(self.policy, framework="keras", model=self.name)

    def _in_float32(self) -> tuple[Profile, _Seen]:
        recorder, losses, gradients = Recorder(self.model), [], []
        with AppliedPlan(self.model, FLOAT32, settle=False):
            for batch in self.batches:
                probed = recorder.record(batch, step=self.step)
                recorder.keep()
                losses.append(probed.loss)
                gradients.append(_by_variable(probed.gradients, 1.0))
        return recorder.profile, _Seen(math.fsum(losses) / len(losses), tuple(gradients))

    def _run(self, plan: Plan, scale: float) -> _Seen:
        dtypes, losses, gradients = _Dtypes(), [], []
        try:
            with AppliedPlan(self.model, plan, settle=False):
                for batch in self.batches:
                    probed = probe(self.model, batch, dtypes, step=self.step, loss_scale=scale)
                    losses.append(probed.loss)
                    gradients.append(_by_variable(probed.gradients, scale))
        except Exception as error:
            return _Seen(error=error, formats=dtypes.formats)
        return _Seen(math.fsum(losses) / len(losses), tuple(gradients), dtypes.formats)

    def _diagnosed(self, plan: Plan, half_format: str, scale: float) -> Diagnosis:
        """The first batch's failure under the plan, or that it is healthy."""
        for batch in self.batches:
            data = (*batch, *(None,) * (3 - len(batch)))
            found = diagnose_under(plan, self.model, data, half_format=half_format, loss_scale=scale, step=self.step)
            if not found.healthy:
                return found
        return Diagnosis("healthy")

    def _cured(
        self, plan: Plan, profile: Profile, exact: _Seen, seen: _Seen, scale: float
    ) -> tuple[list[Hazard], Plan | None, bool]:
        """What is wrong under the plan, one layer after the other, each moved to float32 before the next is sought."""
        hazards: list[Hazard] = []
        if self.compute == "float32":
            return hazards, plan, True
        for _ in range(_MOST_CURES):
            hazard = self._next_hazard(plan, profile, exact, seen, scale)
            if hazard is None:
                return hazards, plan, True
            hazards.append(hazard)
            if hazard.module not in tapped_layers(self.model) or plan.compute(hazard.module) == "float32":
                return hazards, None, False
            reason = "range" if hazard.kind in ("overflow", "vanishing", "dead_output") else "hazard"
            plan = plan.with_rule(
                Rule(path=hazard.module, compute="float32", reason=reason, detail=hazard.detail or hazard.what)  # type: ignore[arg-type]
            )
            seen = self._run(plan, scale)
        return hazards, None, False

    def _next_hazard(self, plan: Plan, profile: Profile, exact: _Seen, seen: _Seen, scale: float) -> Hazard | None:
        if seen.error is not None:
            return Hazard(kind="unsupported", detail=f"a step raises {type(seen.error).__name__}: {seen.error}"[:300])
        found = self._diagnosed(plan, self.compute, scale)
        if not found.healthy:
            return _hazard(found, self._class_of(found.module), silent=seen.finite)
        for path, layer in self.layers.items():
            if plan.compute(path) == "float32":
                continue
            if _dead(layer, exact, seen):
                detail = "its weight gradients are exactly 0 under the policy"
                return Hazard(kind="dead_layer", module=path, module_class=type(layer).__name__, detail=detail)
            if self.compute != "float16" or not parameters(layer):
                continue
            share = underflow_share(profile, path, scale)
            if share > _VANISHED:
                detail = f"{share:.0%} of its gradients round to zero at the loss scale {scale:g}"
                return Hazard(kind="vanishing", module=path, module_class=type(layer).__name__, detail=detail)
        return None

    def _alternative(self, profile: Profile, exact: _Seen) -> str:
        """bfloat16, where the target has it and it does without hazards."""
        if self.policy != "mixed_float16" or self.target == HERE:
            return ""
        if "bfloat16" not in get_target(self.target).formats:
            return ""
        other = _Preflight(self.model, self.batches, self.step, "mixed_bfloat16", "bfloat16", self.target)
        plan = plan_of_policy("mixed_bfloat16", framework="keras", model=self.name)
        seen = other._run(plan, 1.0)
        return "" if other._next_hazard(plan, profile, exact, seen, 1.0) is not None else "mixed_bfloat16"

    def _rows(self, profile: Profile, exact: _Seen, seen: _Seen, scale: float) -> Iterator[LayerRow]:
        for path, layer in self.layers.items():
            activation = profile.get(path, "activation")
            if activation is None:
                continue
            counted = (seen.formats or {}).get(path)
            formats = tuple(name for name, _ in counted.most_common()) if counted else ()
            low = formats[0] if formats and formats[0] in ("float16", "bfloat16") else None
            cosine, error = _compared(layer, exact, seen)
            overflow = 0.0
            if low is not None:
                gradients = [h for role in GRADIENT_ROLES if (h := profile.get(path, role)) is not None]
                overflow = max([activation.overflow(low).lower, *(h.overflow(low, scale).lower for h in gradients)])
            yield LayerRow(
                path=path,
                kind=type(layer).__name__,
                formats=formats,
                largest_activation=activation.largest,
                largest_gradient=largest_gradient(profile, path),
                overflow=overflow,
                underflow=underflow_share(profile, path, scale, low) if low is not None else 0.0,
                cosine=cosine,
                relative_error=error,
                dead=_dead(layer, exact, seen),
            )

    def _class_of(self, path: str) -> str:
        layer = tapped_layers(self.model).get(path)
        return type(layer).__name__ if layer is not None else ""


def _hazard(found: Diagnosis, module_class: str, *, silent: bool = False) -> Hazard:
    """The hazard that a diagnosis tells of; `silent` where loss and gradients are finite all the same."""
    kind = _KINDS.get(found.verdict, "overflow")
    if kind == "overflow" and silent:
        kind = "dead_output"
    return Hazard(
        kind=kind,
        module=found.module,
        module_class=found.suspects[0].module_class or module_class if found.suspects else module_class,
        operation=found.operation,
        direction=found.direction,
        source=found.source,
        detail=found.detail,
        fix=found.fix,
    )


def _batches(x: Any, y: Any, sample_weight: Any) -> list[tuple[Any, ...]]:
    is_list = isinstance(x, list | tuple) and x and all(isinstance(batch, list | tuple) for batch in x)
    found = [tuple(batch) for batch in x] if y is None and is_list else [(x, y, sample_weight)]
    for batch in found:
        check_batch("preflight", *(*batch, *(None,) * (3 - len(batch))))
    return found


def _by_variable(gradients: Sequence[tuple[Any, Any]], scale: float) -> dict[int, Any]:
    return {id(variable): to_numpy(gradient).astype(np.float64) / scale for variable, gradient in gradients}


def _pairs(layer: keras.Layer, exact: _Seen, seen: _Seen) -> list[tuple[Any, Any]]:
    keys = [id(variable) for variable in parameters(layer)]
    return [
        (full[key], half[key])
        for full, half in zip(exact.gradients, seen.gradients, strict=False)
        for key in keys
        if key in full and key in half and full[key].shape == half[key].shape
    ]


def _compared(layer: keras.Layer, exact: _Seen, seen: _Seen) -> tuple[float | None, float | None]:
    """Cosine and relative error of the layer's weight gradients; None where there is nothing to compare."""
    pairs = _pairs(layer, exact, seen)
    size, other = (math.sqrt(sum(float(np.square(pair[i]).sum()) for pair in pairs)) for i in (0, 1))
    if not pairs or not size > 0.0:
        return None, None
    apart = math.sqrt(sum(float(np.square(a - b).sum()) for a, b in pairs))
    dot = sum(float((a * b).sum()) for a, b in pairs)
    cosine = dot / (size * other) if 0.0 < other < math.inf else None
    return cosine, apart / size


def _dead(layer: keras.Layer, exact: _Seen, seen: _Seen) -> bool:
    pairs = _pairs(layer, exact, seen)
    return bool(pairs) and any(a.any() for a, _ in pairs) and not any(b.any() for _, b in pairs)
