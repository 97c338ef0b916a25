"""Module paths of Keras models, as plans, profiles and diagnoses spell them: `encoder.dense_1`, `""` for the model.

A path is made of layer names, those that `model.summary()` shows, with dots between them. Keras numbers the layers that
nobody named by a counter of the whole process (`dense_5` in the second model of a session). A plan must outlive the
session, so such names are numbered anew within their parent, as in a fresh process: the first `Dense` is `dense`, the
second `dense_1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, count

import keras
from keras import Layer

__all__ = ["children", "named_layers", "own_code", "own_names", "routes", "whole"]

_WHOLE = (
    keras.layers.RNN,
    keras.layers.Bidirectional,
    keras.layers.Wrapper,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
)


def named_layers(model: Layer) -> dict[str, Layer]:
    """`path -> layer` of the model (`""`) and all layers in it, parents before children, each layer once.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1, name="head")])
        >>> list(named_layers(model))
        ['', 'dense', 'head']
    """
    found: dict[str, Layer] = {}
    seen: set[int] = set()

    def visit(path: str, layer: Layer) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        found[path] = layer
        for name, child in zip(_names(children(layer)), children(layer), strict=True):
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def own_names(model: Layer) -> dict[str, str]:
    """`path as Keras numbers it now -> path`: for plans in which somebody typed the names of this session."""
    spelled: dict[str, str] = {}
    by_layer = {id(layer): path for path, layer in named_layers(model).items()}

    def visit(spelling: str, layer: Layer) -> None:
        path = by_layer[id(layer)]
        if path in spelled.values():
            return
        spelled.setdefault(spelling, path)
        for child in children(layer):
            visit(f"{spelling}.{child.name}" if spelling else child.name, child)

    visit("", model)
    return spelled


def children(layer: Layer) -> list[Layer]:
    """The layers directly inside `layer`, in the order in which the model shows them; inputs are none."""
    inside = layer.layers if isinstance(layer, keras.Model) else layer._layers
    return [child for child in inside if not isinstance(child, keras.layers.InputLayer)]


def routes(layer: Layer) -> bool:
    """True where the layer only hands tensors from layer to layer: Sequential and functional models."""
    cls = type(layer)
    return isinstance(layer, keras.Sequential | keras.src.models.functional.Functional) and cls.call in (
        keras.Sequential.call,
        keras.src.models.functional.Functional.call,
    )


def whole(layer: Layer) -> bool:
    """True where what is inside the layer computes in the layer's own precision.

    Recurrent layers and wrappers run their cells in a loop; attention multiplies what its projections return.
    """
    return isinstance(layer, _WHOLE)


def own_code(layer: Layer) -> bool:
    """True where the layer has layers inside it and computes something itself too."""
    return bool(children(layer)) and not routes(layer) and not whole(layer)


def _names(siblings: list[Layer]) -> list[str]:
    """The siblings' names, numbered anew where Keras made them up."""
    names: dict[int, str] = {}
    for given in (True, False):  # given names are kept, so they come first
        for position, layer in enumerate(siblings):
            base = _made_up(layer)
            if (base is None) == given:
                names[position] = _free(base or layer.name, names.values())
    return [names[position] for position in range(len(siblings))]


def _free(name: str, taken: Iterable[str]) -> str:
    numbered = (f"{name}_{number}" for number in count(1))
    return next(candidate for candidate in chain([name], numbered) if candidate not in set(taken))


def _made_up(layer: Layer) -> str | None:
    """The name without its number where Keras made it up from the class, else None."""
    base = keras.src.utils.naming.to_snake_case(type(layer).__name__)
    return base if re.fullmatch(rf"{re.escape(base)}(_\d+)?", layer.name) else None
