"""Sensitivities against what really happens when one layer is rounded, and that looking changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from scipy.stats import spearmanr

from halfwise.core.sensitivity import Sensitivity
from halfwise.keras.measure import timed_layers
from halfwise.keras.probe import built, probe, to_numpy
from halfwise.keras.rounding import rounded
from halfwise.keras.sensitivity import SensitivityProbe

FORMATS = ("bfloat16", "float16", "tensorfloat32", "float8_e4m3fn")
Batch = tuple[Any, Any]


def batch(rows: int = 16, shape: tuple[int, ...] = (6, 6, 1)) -> Batch:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, *shape)).astype("float32"), random.integers(0, 10, rows)


def compiled(*stack: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([*stack])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def mixed() -> keras.Model:
    """A bit of everything: statistics, a recurrence, dropout."""
    return compiled(
        keras.Input((6, 6, 1)),
        layers.Conv2D(4, 3, name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.Reshape((16, 4)),
        layers.SimpleRNN(8, dropout=0.1, name="rnn"),
        layers.Dense(16, activation="relu", name="hidden"),
        layers.Dense(10, name="head"),
    )


def looked_at(model: keras.Model, data: Batch, formats: tuple[str, ...] = FORMATS) -> Sensitivity:
    built(model, data)
    sensitivities = SensitivityProbe(model)
    probed = probe(model, data)
    sensitivities.add_gradients(probed)
    sensitivities.look(data, formats)
    sensitivities.keep(probed.loss)
    return sensitivities.sensitivity


def test_every_kind_of_layer_is_looked_at_and_nothing_changes() -> None:
    model, data = mixed(), batch()
    built(model, data)
    before = [to_numpy(variable.value).copy() for variable in model.variables]
    found = looked_at(model, data)
    assert set(found.layers) == {"conv", "norm", "rnn", "hidden", "head"}
    for by_format in found.layers.values():
        assert set(by_format) == set(FORMATS)
        assert all(one.score > 0.0 and 0.0 < one.gradient_error < 0.4 for one in by_format.values())
        assert by_format["float16"].score < by_format["bfloat16"].score < by_format["float8_e4m3fn"].score
    after = [to_numpy(variable.value) for variable in model.variables]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def deep() -> keras.Model:
    """Twelve layers of unlike scales."""
    stack = [layers.Dense(24, activation="tanh", name=f"layer{index}") for index in range(11)]
    model = compiled(keras.Input((24,)), *stack, layers.Dense(10, name="head"))
    for index, layer in enumerate(stack):
        layer.kernel.assign(layer.kernel.value * (0.7 + 0.15 * (index % 5)))
    return model


@contextmanager
def rounding(layer: Any, name: str) -> Iterator[None]:
    """Within the block the layer computes as the format would."""
    scaled, output = (
        name.startswith("float8"),
        {"tensorfloat32": "float32", "float8_e4m3fn": "bfloat16"}.get(name, name),
    )
    kept, call = [(v, to_numpy(v.value).copy()) for v in layer.weights], layer.call
    for variable, value in kept:
        variable.assign(rounded(keras.ops.convert_to_tensor(value), name, scaled=scaled))
    layer.call = lambda x: rounded(call(rounded(x, name, scaled=scaled)), output)
    try:
        yield
    finally:
        del layer.call
        for variable, value in kept:
            variable.assign(value)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_scores_rank_and_predict_what_rounding_one_layer_does(name: str) -> None:
    model, (x, y) = deep(), batch(64, (24,))
    found = looked_at(model, (x, y), (name,))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def losses() -> Any:
        tensor = keras.ops.convert_to_tensor(x)
        for layer in model.layers:
            tensor = layer(tensor)  # eagerly
        return to_numpy(loss(keras.ops.convert_to_tensor(y), tensor)).astype(np.float64) / len(x)

    exact, true = losses(), {}
    for path, layer in timed_layers(model).items():
        with rounding(layer, name):
            true[path] = float(np.square(losses() - exact).sum())
    assert np.array_equal(losses(), exact)
    scores = [found.layers[path][name].score for path in true]
    assert len(scores) == 12
    assert spearmanr(scores, list(true.values())).statistic > 0.9
    predicted, measured = sum(scores) ** 0.5, sum(true.values()) ** 0.5
    assert 1 / 1.5 < predicted / measured < 1.5


def test_softmax_heads_are_no_question() -> None:
    model = compiled(keras.Input((24,)), layers.Dense(8, name="hidden"), layers.Dense(10, "softmax", name="head"))
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert set(looked_at(model, batch(8, (24,)), ("bfloat16",)).layers) == {"hidden"}


def test_noise_tells_batches_that_agree_from_batches_that_do_not() -> None:
    model, (x, y) = deep(), batch(64, (24,))
    built(model, (x, y))
    for batches, low, high in (
        ([(x, y)] * 4, 0.0, 0.01),
        ([(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)], 0.3, 1.0),
    ):
        sensitivities = SensitivityProbe(model)
        for one in batches:
            probed = probe(model, one)
            sensitivities.add_gradients(probed)
            sensitivities.keep(probed.loss)
        assert low <= sensitivities.sensitivity.gradient_noise["head"] <= high


def test_a_batch_that_is_dropped_leaves_nothing() -> None:
    model, data = deep(), batch(16, (24,))
    built(model, data)
    sensitivities = SensitivityProbe(model)
    sensitivities.add_gradients(probe(model, data))
    sensitivities.look(data, ("bfloat16",))
    sensitivities.drop()
    assert sensitivities.sensitivity.layers == {}
