"""Putting back what a training step, or an observer of one, changes besides the weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

__all__ = ["attribute", "hidden_state", "put_back"]

_backend = import_module(f"halfwise.keras.backends.{keras.backend.backend()}")

_ABSENT = object()


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block the object itself has the attribute, past what its class does when attributes are set."""
    before = vars(owner).get(name, _ABSENT)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)


def hidden_state(model: keras.Model) -> list[keras.Variable]:
    """Variables that a forward pass changes and that the model does not count among its state.

    The states of stateful recurrent layers, and the weights that spectral normalisation normalises in place.
    """
    found = []
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            found += [v for v in keras.tree.flatten(getattr(layer, "states", None)) if isinstance(v, keras.Variable)]
        if isinstance(layer, keras.layers.SpectralNormalization) and layer.built:
            found += layer._flatten_layers()[1].trainable_variables
    return found


@contextmanager
def put_back(model: keras.Model) -> Iterator[None]:
    """After the block moving statistics, metrics, seeds and random generators are as before it, also after errors."""
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    variables = [*model.non_trainable_variables, *model.metrics_variables, *([] if seeds is None else [seeds.state])]
    known = set(map(id, variables))
    variables += [variable for variable in hidden_state(model) if id(variable) not in known]
    restore = _backend.keep(variables)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        restore()
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if seeds is None:  # made meanwhile from Python's generator: the next one will be the same
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
