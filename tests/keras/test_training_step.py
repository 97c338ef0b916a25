"""The plain training step: equal to Keras' own where both can run, and traceable."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfwise.errors import UsageError
from halfwise.keras.training_step import OwnStep

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 4)).astype("float32")
Y = RANDOM.normal(size=(8, 2)).astype("float32")
WEIGHTS = RANDOM.uniform(size=(8,)).astype("float32")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    keras.utils.set_random_seed(0)


def twins() -> tuple[keras.Model, keras.Model]:
    """Two models with equal weights, moving statistics and activity regularizer included."""

    def model() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(3, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.ActivityRegularization(l2=0.1),
                layers.Dense(2),
            ]
        )

    first, second = model(), model()
    second.set_weights(first.get_weights())
    return first, second


def run(step: OwnStep, data: Any, *, traced: bool = False) -> dict[str, Any]:
    """One step, in place."""
    model, optimizer = step.model, step.optimizer
    step.build(data)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    if BACKEND == "jax":
        import jax

        groups: tuple[list[Any], ...] = (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            [],
        )
        state = tuple([variable.value for variable in group] for group in groups)
        logs, state = (jax.jit(step) if traced else step)(state, data)
        for group, new in zip(groups, state, strict=True):
            for variable, value in zip(group, new, strict=True):
                variable.assign(value)
        return logs
    if BACKEND == "tensorflow" and traced:
        import tensorflow as tf

        return tf.function(step)(data)
    return step(data)


def numbers(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    return [np.array(weight) for weight in model.get_weights()]


def close(first: keras.Model, second: keras.Model) -> None:
    for a, b in zip(numbers(first), numbers(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_it_trains_as_keras_does(traced: bool) -> None:
    if BACKEND == "torch" and traced:
        pytest.skip("torch runs eagerly")
    model, twin = twins()
    twin.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    step = OwnStep(model, "mse", keras.optimizers.SGD(0.1, momentum=0.9))
    for _ in range(2):
        expected = twin.train_on_batch(X, Y, sample_weight=WEIGHTS)
        found = run(step, (X, Y, WEIGHTS), traced=traced)
        assert float(ops.convert_to_numpy(found["loss"])) == pytest.approx(float(expected), rel=1e-5)
        assert found["output"].shape == (8, 2)
    close(model, twin)


def test_without_a_loss_it_takes_the_compiled_one() -> None:
    model, twin = twins()
    for one in (model, twin):
        one.compile(keras.optimizers.SGD(0.1), keras.losses.Huber(delta=0.1), metrics=["mae"])
    twin.train_on_batch(X, Y)
    run(OwnStep(model, optimizer=model.optimizer), (X, Y))
    close(model, twin)


def test_the_output_is_that_of_training() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=1)])
    model.add(layers.Dense(2, kernel_initializer="ones"))
    step = OwnStep(model, "mse", keras.optimizers.SGD(0.0))
    output = ops.convert_to_numpy(run(step, (X, Y))["output"])
    assert not np.allclose(output, ops.convert_to_numpy(model(X, training=False)))


def test_a_model_that_is_not_built_with_several_outputs_and_losses() -> None:
    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = layers.Dense(2), layers.Dense(1)

        def call(self, x: Any) -> Any:
            return {"a": self.a(x), "b": self.b(x)}

    model = Two()
    step = OwnStep(model, {"a": "mse", "b": "mae"}, keras.optimizers.SGD(0.0))
    data = (X, {"a": Y, "b": Y[:, :1]})
    logs = run(step, data, traced=BACKEND != "torch")
    a, b = (ops.convert_to_numpy(logs["output"][name]) for name in "ab")
    expected = np.square(a - Y).mean() + np.abs(b - Y[:, :1]).mean()
    assert float(ops.convert_to_numpy(logs["loss"])) == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_of_the_models_own() -> None:
    class Own(keras.Sequential):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            return 7.0 + 0.0 * ops.sum(y_pred)

    model = Own([keras.Input((4,)), layers.Dense(2)])
    assert float(ops.convert_to_numpy(run(OwnStep(model, optimizer=keras.optimizers.SGD()), (X,))["loss"])) == 7.0


def test_no_loss_is_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(UsageError, match="was given no loss: pass loss="):
        run(OwnStep(model, optimizer=keras.optimizers.SGD()), (X, Y))


def test_nothing_to_train_is_refused() -> None:
    model, _ = twins()
    model.trainable = False
    with pytest.raises(UsageError, match="has no trainable weights"):
        run(OwnStep(model, "mse", keras.optimizers.SGD()), (X, Y))
