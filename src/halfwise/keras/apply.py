"""Carrying out a plan on a Keras model, and taking it back.

Keras computes in what a layer's `dtype_policy` says, so a plan becomes one policy per layer. Three things come on top:

- Layers that are one whole (recurrent ones, attention, wrappers) hand their precision on to what is inside.
- Sequential and functional models, which compute nothing, stay in float32 unless the plan names them: else the model
  would round its inputs before a first layer that is to see them in float32.
- A layer with code of its own around other layers gets what these return in float32, where it is to compute in float32.

Functions that Keras compiled before would silently keep the old precision, so they are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self
from weakref import ref

import keras
from keras import Layer

from halfwise.core.plan import Default, Plan, Rule
from halfwise.core.policy import disabled
from halfwise.errors import PlanError, UsageError
from halfwise.keras.names import children, named_layers, own_code, own_names, routes, whole
from halfwise.keras.optimizer import set_optimizer, settle_optimizer
from halfwise.keras.save import plan_path

__all__ = ["AppliedPlan", "applied_plan", "apply", "computes", "forget_compiled_code", "policy_name"]

_POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
_STANDING = "_halfwise_standing"
_STORAGE = ("parameters", "saved_activations", "optimizer_state")


def apply(model: keras.Model, plan: Plan | str | PathLike[str]) -> AppliedPlan:
    """Makes `model` compute as `plan` says, from now on and in every mode: `fit`, `evaluate`, `predict`, `export`.

    Where a layer computes in float16 the model's optimizer scales the loss (`LossScaleOptimizer`), also if the model is
    compiled later. `model.save(...)` writes the plan beside the file. A plan that is applied already is replaced, and
    in force again once the new one is removed.

    Args:
        model: a built or unbuilt model with float32 variables.
        plan: what to carry out, or the path of a plan file. Storage formats other than float32, and formats that
            Keras cannot compute in, are refused by name. Layers without a rule compute in the default.

    Returns:
        A handle; `handle.remove()` or leaving `with handle:` restores the model as it was.

    Raises:
        UsageError: `model` is no layer, or `plan` no plan.
        PlanError: the plan names layers that do not exist, or asks for what cannot be executed here.

    Example:
        >>> import keras, halfwise.keras as hw
        >>> layers = [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2, name="head")]
        >>> model = keras.Sequential(layers)
        >>> with hw.apply(model, hw.Plan.manual({"head": "float32"}, default="bfloat16", framework="keras")):
        ...     [layer.compute_dtype for layer in model.layers]
        ['bfloat16', 'float32']
    """
    if isinstance(plan, PathLike) or (isinstance(plan, str) and plan.endswith(".toml")):
        plan = Plan.load(fspath(plan))
    return AppliedPlan(model, plan)


class AppliedPlan:
    """A plan in force on a model. Made by `apply`; a context manager.

    Args:
        model, plan: as for `apply`.
        settle: False leaves the optimizer and the compiled functions to the caller.

    Attributes:
        plan: what is in force, its paths spelled as `named_layers` spells them.
    """

    def __init__(self, model: keras.Model, plan: Plan | str, *, settle: bool = True) -> None:
        if not isinstance(model, Layer):
            raise UsageError(f"apply(model={model!r}): give a keras.Model")
        if not isinstance(plan, Plan):
            raise UsageError(f"apply(plan={plan!r}): give a halfwise Plan, such as Plan.load('plan.toml')")
        if plan.framework != "keras":
            raise PlanError(
                f"the plan is for framework {plan.framework!r}; this is the Keras adapter. Make one with "
                "halfwise.keras, or say Plan.manual(..., framework='keras')"
            )
        self.plan = _with_canonical_paths(plan, model)
        self._model = ref(model)
        self._settle = settle
        self._replaced: tuple[Any, Any] | None = None
        _refuse_what_cannot_run(model, self.plan)
        if disabled():
            return
        standing = _standing_of(model) or _Standing(model)
        model.__dict__[_STANDING] = standing
        standing.stack.append(self)
        standing.enforce(model)
        if settle:
            forget_compiled_code(model)
            self._replaced = settle_optimizer(model, self.plan)

    def remove(self) -> None:
        """Restores the model as it was before, an earlier plan included. Doing so twice is harmless."""
        model = self._model()
        standing = _standing_of(model) if model is not None else None
        if model is None or standing is None or self not in standing.stack:
            return
        standing.stack.remove(self)
        standing.enforce(model)
        if self._settle:
            forget_compiled_code(model)
            if self._replaced is not None and model.optimizer is self._replaced[1]:
                set_optimizer(model, self._replaced[0])
        if not standing.stack:
            del model.__dict__[_STANDING]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def applied_plan(model: keras.Model) -> Plan | None:
    """The plan in force on the model, or None."""
    standing = _standing_of(model)
    return standing.stack[-1].plan if standing is not None and standing.stack else None


def computes(model: keras.Model, plan: Plan) -> dict[str, str]:
    """`path -> format` that each layer computes in under the plan. Layers that the plan does not reach are left out.

    Such are layers with variables or results other than float32 (embedded text preprocessing, quantised layers).
    """
    layers = named_layers(model)
    inside: dict[str, str] = {}  # path -> the whole layer around it
    found: dict[str, str] = {}
    for path, layer in layers.items():
        around = next((p for p in _ancestors(path) if p in layers and whole(layers[p])), None)
        inside[path] = path if around is None else inside.get(around, around)
        if not _reached(layer):
            if (rule := plan.match(path)) is not None and rule.pattern is None and rule.compute != layer.compute_dtype:
                raise PlanError(
                    f"the plan asks for {rule.compute} in {path!r}, whose variables are {layer.variable_dtype} and "
                    f"which computes in {layer.compute_dtype}; build the layer with dtype='float32', or drop the entry"
                )
            continue
        if routes(layer) and plan.match(path) is None:
            found[path] = "float32"
        else:
            found[path] = plan.compute(inside[path])
    return found


def policy_name(format_name: str) -> str:
    """Keras' policy that computes in the format and keeps variables in float32."""
    return _POLICIES[format_name]


def forget_compiled_code(model: keras.Model) -> None:
    """Has Keras compile the model's functions anew when they are needed next."""
    if isinstance(model, keras.Model):
        model.train_function = model.test_function = model.predict_function = None


class _Standing:
    """How a model stood before any plan, and the plans that are on it, the last one in force."""

    def __init__(self, model: keras.Model) -> None:
        self.stack: list[AppliedPlan] = []
        self._policies: list[tuple[Layer, Any]] = [(layer, layer._dtype_policy) for layer in _all(model)]
        self._raised: list[_RaisedOutputs] = []
        self._hooked = False

    def enforce(self, model: keras.Model) -> None:
        """Puts the last plan in force, on the model as it stood before any."""
        for layer, policy in self._policies:
            layer._dtype_policy = policy
        for raised in self._raised:
            raised.remove()
        self._raised = []
        if self.stack:
            self._carry_out(model, computes(model, self.stack[-1].plan))
        if self._hooked != bool(self.stack):
            self._hooked = bool(self.stack)
            (_hook if self.stack else _unhook)(model)

    def _carry_out(self, model: keras.Model, formats: Mapping[str, str]) -> None:
        layers = named_layers(model)
        for path, name in formats.items():
            layers[path]._dtype_policy = keras.DTypePolicy(policy_name(name))
        by_layer = {id(layer): formats.get(path) for path, layer in layers.items()}
        for layer in layers.values():
            if own_code(layer) and by_layer[id(layer)] == "float32":
                halves = [child for child in children(layer) if by_layer.get(id(child)) not in (None, "float32")]
                self._raised += [_RaisedOutputs(child) for child in halves]


def _standing_of(model: keras.Model) -> _Standing | None:
    """Kept on the model itself: a table beside it would keep the model, through its layers, for ever."""
    return model.__dict__.get(_STANDING)


class _RaisedOutputs:
    """Stands in for a layer's `call`: what it returns in half precision comes back in float32."""

    def __init__(self, layer: Layer) -> None:
        self._layer = ref(layer)
        self._earlier: Callable[..., Any] | None = layer.__dict__.get("call")
        inner = layer.call

        def call(*args: Any, **kwargs: Any) -> Any:
            return keras.tree.map_structure(_raised, inner(*args, **kwargs))

        self._call = call
        layer.__dict__["call"] = call

    def remove(self) -> None:
        """Takes it back."""
        layer = self._layer()
        if layer is None or layer.__dict__.get("call") is not self._call:
            return
        if self._earlier is None:
            del layer.__dict__["call"]
        else:
            layer.__dict__["call"] = self._earlier


def _raised(value: Any) -> Any:
    half = keras.ops.is_tensor(value) and keras.backend.standardize_dtype(value.dtype) in ("float16", "bfloat16")
    if not half:
        return value
    raised = keras.ops.cast(value, "float32")
    if (logits := getattr(value, "_keras_logits", None)) is not None:
        raised._keras_logits = logits  # by which Keras computes a loss from probabilities without losing its gradient
    return raised


def _hook(model: keras.Model) -> None:
    """Has `model.compile` keep the loss scaled, and `model.save` write the plan beside the file."""
    if not isinstance(model, keras.Model):
        return
    weak = ref(model)
    cls = type(model)

    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001
        own = weak()
        result = cls.compile(own, *args, **kwargs)
        if (plan := applied_plan(own)) is not None:
            settle_optimizer(own, plan)
        return result

    def save(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        own = weak()
        result = cls.save(own, filepath, *args, **kwargs)
        if (plan := applied_plan(own)) is not None and str(filepath).endswith(".keras"):
            plan.save(plan_path(filepath))
        return result

    model.__dict__.update(compile=compile, save=save)


def _unhook(model: keras.Model) -> None:
    for name in ("compile", "save"):
        model.__dict__.pop(name, None)


def _refuse_what_cannot_run(model: keras.Model, plan: Plan) -> None:
    entries: list[tuple[str, Default | Rule]] = [("default", plan.default), *((r.name, r) for r in plan.layers)]
    for name, entry in entries:
        if entry.compute not in _POLICIES:
            raise PlanError(
                f"the plan asks for {entry.compute} in {name!r}; Keras computes in {', '.join(_POLICIES)} here"
            )
        for storage in _STORAGE:
            if getattr(entry, storage) not in (None, "float32"):
                raise PlanError(
                    f"the plan asks for {storage} = {getattr(entry, storage)!r} in {name!r}, which cannot be executed "
                    "yet; remove the entry (storage stays in float32)"
                )
    plan.check_paths(named_layers(model), type(model).__name__)
    computes(model, plan)


def _with_canonical_paths(plan: Plan, model: keras.Model) -> Plan:
    """`plan` with paths that were typed as Keras numbers the layers in this session."""
    known, spelled = named_layers(model), own_names(model)

    def canonical(rule: Rule) -> Rule:
        foreign = rule.path is not None and rule.path not in known and rule.path in spelled
        return replace(rule, path=spelled[str(rule.path)]) if foreign else rule

    return replace(plan, layers=tuple(canonical(rule) for rule in plan.layers))


def _reached(layer: Layer) -> bool:
    """False for layers whose precision is no matter of compute formats."""
    return (
        layer.variable_dtype == "float32"
        and layer.compute_dtype in _POLICIES
        and getattr(layer, "quantization_mode", None) is None
    )


def _all(model: keras.Model) -> list[Layer]:
    return list(model._flatten_layers())


def _ancestors(path: str) -> list[str]:
    """The layers around `path`, the outermost first."""
    parts = path.split(".")
    return ["", *(".".join(parts[:n]) for n in range(1, len(parts)))] if path else []
