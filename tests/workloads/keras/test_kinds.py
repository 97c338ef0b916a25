"""The seven kinds of model in Keras: each trains, every weight learns, the seed decides."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from halfwise.core.workload import Workload
from halfwise.keras.measure import timed_layers
from halfwise.workloads.load import load_workload

LAYERS = {"convnet": 13, "encoder": 24, "decoder": 22, "lstm": 14, "recommender": 14, "unet": 18, "gan": 12}

TRAINED = ("encoder", "gan") if keras.backend.backend() == "jax" else tuple(LAYERS)  # JAX compiles each for long


def losses(found: Workload, steps: int) -> list[float]:
    """Of the same batch, step by step."""
    x, y = found.batches[0]
    return [found.model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(steps)]


def arrays(batch: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in keras.tree.flatten(batch)]


@pytest.mark.parametrize("name", LAYERS)
def test_what_it_consists_of(name: str) -> None:
    found = load_workload(name, framework="keras")
    assert (found.name, found.framework, len(found.batches)) == (name, "keras", 4)
    assert len(timed_layers(found.model)) == LAYERS[name]


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_and_every_weight_learns(name: str) -> None:
    found = load_workload(name, framework="keras", backend=keras.backend.backend())
    before = [keras.ops.convert_to_numpy(v) for v in found.model.trainable_variables]
    found.model.compile(found.optimizer, found.loss)
    told = losses(found, 12)
    assert min(told[-3:]) < told[0]
    after = [keras.ops.convert_to_numpy(v) for v in found.model.trainable_variables]
    still = [
        v.path for v, a, b in zip(found.model.trainable_variables, before, after, strict=True) if np.array_equal(a, b)
    ]
    assert still == []


def test_the_seed_decides_weights_and_data() -> None:
    one, same, other = (load_workload("unet", framework="keras", seed=seed) for seed in (1, 1, 2))
    assert all(map(np.array_equal, arrays(one.batches[0]), arrays(same.batches[0])))
    assert not np.array_equal(arrays(one.batches[0])[0], arrays(other.batches[0])[0])
    assert all(map(np.array_equal, one.model.get_weights(), same.model.get_weights()))
    assert not np.array_equal(one.model.get_weights()[0], other.model.get_weights()[0])


def test_the_discriminator_descends_what_the_generator_ascends() -> None:
    found = load_workload("gan", framework="keras")
    x, y = found.batches[0]
    weights = found.model.get_weights()

    found.model.compile(keras.optimizers.SGD(0.5), found.loss, run_eagerly=True)
    untrained = found.model.test_on_batch(x, y)

    def loss_after_training(part: str) -> float:
        found.model.set_weights(weights)
        for name in ("generator", "discriminator"):
            getattr(found.model, name).trainable = name == part
        found.model.compile(keras.optimizers.SGD(0.5), found.loss, run_eagerly=True)
        found.model.train_on_batch(x, y)
        return float(found.model.test_on_batch(x, y))

    assert loss_after_training("discriminator") < untrained < loss_after_training("generator")
