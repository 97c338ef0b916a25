"""The built-in workloads in Keras: each trains, every weight learns, the seed decides, and a plan can be made."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import halfwise.keras as hw
from halfwise.core.workload import Workload
from halfwise.keras.measure import timed_layers
from halfwise.workloads.load import BUILT_IN, load_workload

LAYERS = {"convnet": 13, "encoder": 24, "decoder": 22, "lstm": 14, "recommender": 14, "unet": 18, "gan": 12}


def losses(found: Workload, steps: int) -> list[float]:
    """Of the same batch, step by step."""
    x, y = found.batches[0]
    return [found.model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(steps)]


def arrays(batch: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in keras.tree.flatten(batch)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_trains_and_every_weight_learns(name: str) -> None:
    found = load_workload(name, framework="keras", backend=keras.backend.backend())
    assert (found.name, found.framework, len(found.batches)) == (name, "keras", 4)
    assert len(timed_layers(found.model)) == LAYERS.get(name, len(timed_layers(found.model)))
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

    def loss_after(trained: str) -> float:
        weights = found.model.get_weights()
        for part in ("generator", "discriminator"):
            getattr(found.model, part).trainable = part == trained
        found.model.compile(keras.optimizers.SGD(0.5), found.loss)
        found.model.train_on_batch(x, y)
        found.model.set_weights(weights[: len(weights)] if trained == "" else found.model.get_weights())
        after = found.model.test_on_batch(x, y)
        found.model.set_weights(weights)
        return float(after)

    assert loss_after("discriminator") < loss_after("generator")


@pytest.mark.parametrize("name", ["lstm", "gan"])
def test_a_plan_can_be_made(name: str) -> None:
    found = load_workload(name, framework="keras")
    timing = hw.TimingTable.uniform(timed_layers(found.model), relative={"bfloat16": 0.5})
    made = hw.plan(found.model, found.batches, loss=found.loss, timing=timing)
    assert made.default.compute == "bfloat16"
