"""The global policy: what the layers that are made from now on compute in, with `"auto"` and plans among the choices.

Keras knows a fixed set of policy names, and a policy never sees the layer that holds it. So under `"auto"` and under a
plan layers are built in float32, marked as undecided, and the precision of each is decided when training begins: by
`PrecisionGuard`, or before by `apply`. A model that trains undecided says so once.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from os import PathLike
from typing import Any
from weakref import WeakSet

import keras
from keras import Layer
from keras.src.backend.common import global_state

from halfwise.core.options import as_policy
from halfwise.core.plan import Plan
from halfwise.core.policy import POLICIES, disabled
from halfwise.errors import PolicyError
from halfwise.keras.names import named_layers

__all__ = ["UndecidedPolicy", "global_policy", "set_global_policy", "undecided_layers", "wanted_by"]

_LOG = logging.getLogger("halfwise")

_QUANTISATIONS = (
    "int8",
    "int4",
    "float8",
    "gptq",
    "awq",
)  # Keras' quantisation policies, which Keras carries out

_told: WeakSet[Layer] = WeakSet()


class UndecidedPolicy(keras.DTypePolicy):
    """What a layer holds between its making and the decision: float32, with the wish for something better.

    It is saved and cloned as Keras' own float32 policy, so that a file of an undecided model can be read without
    halfwise.

    Attributes:
        wanted: `"auto"`, or the plan to apply.
    """

    def __init__(self, wanted: str | Plan) -> None:
        super().__init__("float32")
        self.wanted = wanted

    # Keras writes down the class of a policy by its `__class__`.
    __class__ = property(lambda _: keras.DTypePolicy)

    @property
    def compute_dtype(self) -> str:
        """`"float32"`. Layers ask for it in each call, which is how undecided training is noticed."""
        context = global_state.get_global_attribute("current_call_ctx")
        if context is not None and getattr(context, "training", None) is True:
            _tell_undecided(context.entry_layer, self.wanted)
        return "float32"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | Plan):
            return self.wanted == other
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash("float32")

    def __repr__(self) -> str:
        what = f'"{self.wanted}"' if isinstance(self.wanted, str) else "a plan"
        return f"<DTypePolicy {what}, float32 until training begins>"

    def __reduce__(self) -> tuple[Any, ...]:
        return UndecidedPolicy, (self.wanted,)


def set_global_policy(policy: str | Plan | PathLike[str] | keras.DTypePolicy) -> None:
    """Sets what the layers made from now on compute in. As in Keras it holds in this thread, until `clear_session()`.

    Args:
        policy: `"auto"`, `"mixed_float16"`, `"mixed_bfloat16"`, `"float32"`, a `Plan`, or the path of a plan file; also
            a policy object of Keras or the name of one of its quantisation policies, which Keras carries out alone.

    Raises:
        PolicyError: the policy is unknown, or keeps the weights in half precision too; PlanError: no readable plan.

    Environment: under `HALFWISE_DISABLE=1` the policy is `"float32"`.

    Example:
        >>> import keras, halfwise.keras as hw
        >>> hw.set_global_policy("auto")
        >>> keras.layers.Dense(1).compute_dtype, hw.global_policy()
        ('float32', <DTypePolicy "auto", float32 until training begins>)
        >>> hw.set_global_policy("float32")
    """
    keras.config.set_dtype_policy("float32" if disabled() else _keras_policy(policy))


def global_policy() -> keras.DTypePolicy:
    """The policy that layers made now would hold; equal to `"auto"` (or to the plan) where that was set.

    Example:
        >>> import halfwise.keras as hw
        >>> hw.set_global_policy("mixed_bfloat16")
        >>> hw.global_policy().name
        'mixed_bfloat16'
        >>> hw.set_global_policy("float32")
    """
    return keras.config.dtype_policy()


def undecided_layers(model: Layer) -> dict[str, Layer]:
    """`path -> layer` of the layers whose precision is still to be decided."""
    return {path: layer for path, layer in named_layers(model).items() if _is_undecided(layer._dtype_policy)}


def wanted_by(model: Layer) -> str | Plan | None:
    """What the model is to be trained under: `"auto"`, a plan, or None where its layers' policies say it.

    The model's undecided layers say so themselves. A model without any, all in float32, follows the global policy: it
    may have been built before, cloned, or read from a file.
    """
    layers = named_layers(model).values()
    for layer in layers:
        if _is_undecided(layer._dtype_policy):
            return layer._dtype_policy.wanted
    policy = global_policy()
    if _is_undecided(policy) and all(layer.compute_dtype == "float32" for layer in _computing(layers)):
        return policy.wanted
    return None


def _computing(layers: Iterable[Layer]) -> Iterable[Layer]:
    return (layer for layer in layers if keras.backend.is_float_dtype(layer.compute_dtype))


def _is_undecided(policy: object) -> bool:
    return type(policy) is UndecidedPolicy


def _keras_policy(policy: object) -> keras.DTypePolicy | str:
    if isinstance(policy, keras.DTypePolicy):
        return policy
    if isinstance(policy, str) and (policy.startswith(_QUANTISATIONS) or policy == "float64"):
        return policy
    if not isinstance(policy, str | Plan | PathLike):
        raise PolicyError(
            f"Invalid `policy` argument: {policy!r}. Allowed: {', '.join(map(repr, POLICIES))}, a Plan, the path of a "
            "plan file (plan.toml), or a keras.DTypePolicy."
        )
    wanted = as_policy(policy)
    return UndecidedPolicy(wanted) if isinstance(wanted, Plan) or wanted == "auto" else wanted


def _tell_undecided(entry: Layer, wanted: str | Plan) -> None:
    if entry in _told:
        return
    model = _model_around(entry)
    told_before = model in _told
    _told.update((entry, model))
    if told_before:
        return
    what = f'the policy "{wanted}"' if isinstance(wanted, str) else "the global plan"
    before = "hw.apply(model, hw.plan(model, x, y))" if isinstance(wanted, str) else "hw.apply(model, plan)"
    _LOG.warning(
        f"{what} is not in force yet: the model {model.name!r} trains in float32. Add callbacks=[hw.PrecisionGuard()] "
        f"to model.fit(...); in a loop of your own use hw.step(model, x, y), or call {before} before training."
    )


def _model_around(entry: Layer) -> Layer:
    """The outermost model whose method is running: on JAX each layer of a model is called as if it stood alone."""
    model, frame = entry, inspect.currentframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), keras.Model):
            model = owner
        frame = frame.f_back
    return model
