"""Softmax heads: layers that turn the model's last numbers into probabilities.

In half precision the probability of a badly misclassified sample rounds to exactly 0, and with it the gradient: the
sample teaches nothing. So heads stay in float32 under "auto", and one in half precision is reported.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import Layer

from halfwise.core.plan import Plan, Reason
from halfwise.keras.apply import computes
from halfwise.keras.names import named_layers, routes, whole

__all__ = ["HEAD_REASON", "half_heads", "half_heads_text", "heads"]

HEAD_REASON: tuple[Reason, str] = (
    "hazard",
    "its probabilities round to 0 in half precision, and with them the gradients of badly misclassified samples",
)


def heads(model: keras.Model) -> tuple[str, ...]:
    """Paths of the layers whose softmax (or, at the very end, sigmoid) gives the model's output.

    Where the model is written in code, so that what comes last is not known: every layer with a softmax of its own.

    Example:
        >>> import keras
        >>> head = keras.layers.Dense(3, activation="softmax", name="head")
        >>> heads(keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), head]))
        ('head',)
    """
    layers = named_layers(model)
    inside = {id(part) for layer in layers.values() if whole(layer) for part in layer._flatten_layers()}
    last = _last(model)
    found = []
    for path, layer in layers.items():
        if id(layer) in inside:
            continue
        kind = _kind(layer)
        if (kind and id(layer) in last) if last is not None else kind == "softmax":
            found.append(path)
    return tuple(found)


def half_heads(model: keras.Model, plan: Plan) -> tuple[str, ...]:
    """Paths of the heads that compute in half precision under the plan."""
    formats = computes(model, plan)
    return tuple(path for path in heads(model) if formats.get(path, "float32") != "float32")


def half_heads_text(paths: tuple[str, ...]) -> str:
    """What to tell about heads in half precision."""
    one = len(paths) == 1
    names = ", ".join(map(repr, paths))
    return (
        f"the head{'' if one else 's'} {names} compute{'s' if one else ''} probabilities in half precision: they round "
        "to 0 for badly misclassified samples, whose gradient is then 0. Build it with "
        'dtype="float32", or without activation and with from_logits=True in the loss.'
    )


def _last(model: keras.Model) -> set[int] | None:
    """The layers that produce the outputs, as far as the model's structure tells; None where it is code."""
    if not routes(model):
        return None
    if isinstance(model, keras.Sequential):
        ends = list(model.layers[-1:])
    else:
        histories = [getattr(t, "_keras_history", None) for t in keras.tree.flatten(model.outputs)]
        ends = [history.operation for history in histories if history is not None]
    found: set[int] = set()
    for end in ends:
        found.add(id(end))
        if isinstance(end, keras.Model):
            inner = _last(end)
            found |= {id(part) for part in end._flatten_layers()} if inner is None else inner
    return found


def _kind(layer: Layer) -> str:
    activation: Any = getattr(layer, "activation", None)
    if isinstance(layer, keras.layers.Softmax) or activation in (
        keras.activations.softmax,
        keras.activations.log_softmax,
    ):
        return "softmax"
    return "sigmoid" if activation is keras.activations.sigmoid else ""
