"""A trace sees what a step computes, says where, and changes nothing of it."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from numpy.typing import NDArray

from halfwise.core.plan import Plan
from halfwise.keras.apply import AppliedPlan
from halfwise.keras.probe import Probed, probe, to_numpy
from halfwise.keras.tracing.records import UNKNOWN, WEIGHT, Record
from halfwise.keras.tracing.trace import Trace
from halfwise.keras.training_step import OwnStep

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
Array = NDArray[Any]


def traced(model: keras.Model, x: Any, y: Any, loss: Any = "mse") -> tuple[list[Record], Probed]:
    """The records of one step, and what it showed."""
    with Trace(model) as trace:
        probed = probe(model, (x, y), step=OwnStep(model, loss))
    return trace.settle(), probed


def of(records: list[Record], module: str) -> list[str]:
    """The operations of a layer, casts left out."""
    return [r.operation for r in records if r.place.module == module and not r.layer and r.operation != "cast"]


def test_operations_in_order_with_their_producers_and_gradients() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "relu", name="a"), layers.Dense(1, name="b")])
    records, probed = traced(model, np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))
    assert of(records, "a") == ["matmul", "add", "relu"]
    assert of(records, "b") == ["matmul", "add"]
    (first,) = (r for r in records if r.operation == "matmul" and r.place.module == "a")
    (second,) = (r for r in records if r.operation == "matmul" and r.place.module == "b")
    relu = next(r for r in records if r.operation == "relu")
    assert second.inputs[0].producer == relu.index
    assert second.inputs[1].producer == WEIGHT
    assert relu.output == second.inputs[0].extent
    assert 0 < second.turn < relu.turn < first.turn  # gradients flow backward
    gradients = {variable.path.rpartition("/")[2]: to_numpy(g) for variable, g in probed.gradients[2:]}
    assert second.inputs[1].gradient is not None
    assert second.inputs[1].gradient.low == gradients["kernel"].min()
    assert second.inputs[1].gradient.high == gradients["kernel"].max()


class Residual(keras.layers.Layer):
    """Operators, a method, an unseen one (`T`-like indexing by numpy), and an operation that is used twice."""

    def call(self, x: Any) -> Any:
        y = 2.0 * x - x / 4.0
        y = y**2 + (-x)
        return ops.matmul(y, ops.transpose(y)) @ x[:, :1]


def test_operators_have_the_names_of_keras() -> None:
    model = keras.Sequential([keras.Input((3,)), Residual(name="residual")])
    with Trace(model) as trace:
        model(ops.ones((4, 3)))
    names = of(trace.settle(), "residual")
    assert names == [
        *("multiply", "divide", "subtract", "power", "negative", "add"),
        *("transpose", "matmul", "getitem", "matmul"),
    ]
    line = Residual.call.__code__.co_firstlineno
    sources = [r.place.source for r in trace.records if r.place.module == "residual" and not r.layer]
    assert [int(source.rpartition(":")[2]) - line for source in sources] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]


def test_the_gradient_of_each_use_is_its_own() -> None:
    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 3.0 + x * 5.0

    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="a"), Twice(name="twice")])
    records, _ = traced(model, np.ones((1, 2), "float32"), np.ones((1, 2)), lambda y, p: ops.sum(p, axis=-1))
    sent = [r.inputs[0].gradient for r in records if r.place.module == "twice" and r.operation == "multiply"]
    assert [g.high if g is not None else None for g in sent] == [3.0, 5.0]
    arrived = next(r.arrived for r in records if r.place.module == "a" and r.operation == "add")
    assert arrived is not None
    assert arrived.high == 8.0


def _text() -> tuple[keras.Model, Array, Array]:
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(11, 8, mask_zero=True)(tokens)
    h = layers.SimpleRNN(6, return_sequences=True)(h)
    h = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h))
    x = RANDOM.integers(0, 11, (3, 6)).astype("int32")
    return keras.Model(tokens, layers.Dense(2)(h)), x, RANDOM.normal(size=(3, 2)).astype("float32")


def _image() -> tuple[keras.Model, Array, Array]:
    inputs = keras.Input((8, 8, 2))
    h = layers.BatchNormalization()(layers.Conv2D(4, 3, activation="gelu")(inputs))
    h = layers.Dropout(0.5, seed=1)(layers.MaxPooling2D()(h))
    shortcut = layers.Conv2D(4, 1)(h)
    h = layers.Conv2D(4, 3, padding="same")(h) + shortcut * 0.5
    h = layers.Dense(3, activation="softmax", kernel_regularizer="l2")(layers.Flatten()(h))
    x = RANDOM.normal(size=(4, 8, 8, 2)).astype("float32")
    return keras.Model(inputs, h), x, np.eye(3, dtype="float32")[[0, 1, 2, 0]]


@pytest.mark.parametrize(("kind", "format_name"), [("text", "bfloat16"), ("image", "float32")])
def test_a_trace_changes_nothing(kind: str, format_name: str) -> None:
    model, x, y = _text() if kind == "text" else _image()
    loss = "mse" if kind == "text" else "categorical_crossentropy"
    with AppliedPlan(model, Plan.manual(default=format_name, framework="keras"), settle=False):
        plain = probe(model, (x, y), step=OwnStep(model, loss))
        records, probed = traced(model, x, y, loss)
    assert probed.loss == plain.loss
    assert len(records) > 20
    for (variable, gradient), (other, expected) in zip(probed.gradients, plain.gradients, strict=True):
        assert variable is other
        # where gradients meet, they are added in another order
        tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[format_name]
        scale = np.abs(_dense(expected)).max()
        np.testing.assert_allclose(_dense(gradient), _dense(expected), atol=tolerance * scale, err_msg=variable.path)


def _dense(gradient: Any) -> Array:
    array = ops.convert_to_numpy(gradient) if BACKEND == "tensorflow" else to_numpy(gradient)
    return array.astype("float32")


def test_a_softmax_head_in_float32_keeps_its_gradient_where_it_is_badly_wrong() -> None:
    bias = keras.initializers.Constant(np.array([0.0, 30.0]))
    head = layers.Dense(2, "softmax", kernel_initializer="zeros", bias_initializer=bias)
    model = keras.Sequential([keras.Input((2,)), head])
    x, y = np.ones((1, 2), "float32"), np.zeros((1,), "int32")
    plain = probe(model, (x, y), step=OwnStep(model, "sparse_categorical_crossentropy"))
    _, probed = traced(model, x, y, "sparse_categorical_crossentropy")
    expected = [1.0 if BACKEND == "tensorflow" else 0.0] * 2  # only there Keras goes back to the logits
    for found in (plain, probed):
        np.testing.assert_allclose(np.abs(to_numpy(found.gradients[1][1])), expected)


class Stepping(keras.Model):
    """Trains itself with a step of its own, its loss written there."""

    def __init__(self) -> None:
        super().__init__()
        self.a = layers.Dense(1, name="a")

    def call(self, x: Any) -> Any:
        return self.a(x)

    def _loss(self, x: Any, y: Any) -> Any:
        return ops.mean(ops.square(self(x) - y))

    def train_step(self, *arguments: Any) -> Any:
        x, y = arguments[-1]
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self._loss(x, y)
                scaled_loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}
        if BACKEND == "torch":
            self.zero_grad()
            loss = self._loss(x, y)
            self.optimizer.scale_loss(loss).backward()
            self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss}
        import jax

        weights, others, slots, metrics = arguments[0]

        def scaled(values: Any) -> tuple[Any, Any]:
            with keras.StatelessScope(list(zip(self.trainable_variables, values, strict=True))):
                loss = self._loss(x, y)
                return self.optimizer.scale_loss(loss), loss

        (_, loss), gradients = jax.value_and_grad(scaled, has_aux=True)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss}, (weights, others, slots, metrics)


def test_a_training_step_of_the_users_own() -> None:
    model = Stepping()
    model.compile("sgd")
    model(np.ones((2, 3), "float32"))
    with Trace(model) as trace:
        probed = probe(model, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32")))
    square = next(r for r in trace.settle() if r.operation == "square")
    assert square.place == ("", "", f"test_trace.py:{Stepping._loss.__code__.co_firstlineno + 1}")
    assert square.turn > 0
    assert len(probed.gradients) == 2


def test_other_threads_are_left_alone() -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with Trace(model) as trace:
        thread = threading.Thread(target=lambda: ops.exp(ops.ones((2,))))
        thread.start()
        thread.join()
        ops.sin(ops.ones((2,)))
    assert [r.operation for r in trace.records] == ["ones", "sin"]


def test_what_comes_from_code_unseen_has_no_producer_but_its_layer() -> None:
    class Unseen(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if BACKEND == "jax":
                import jax

                return jax.jit(lambda a: a + 1.0)(x)
            if BACKEND == "tensorflow":
                import tensorflow as tf

                return tf.raw_ops.Add(x=x, y=1.0)
            import torch

            with torch._C.DisableTorchFunction():
                return x + 1.0

    model = keras.Sequential([keras.Input((2,)), Unseen(name="unseen"), layers.ReLU(name="relu")])
    with Trace(model) as trace:
        model(ops.ones((1, 2)))
    records = trace.settle()
    layer = next(r for r in records if r.layer and r.place.module == "unseen")
    relu = next(r for r in records if r.operation == "relu")
    assert relu.inputs[0].producer == layer.index
    assert all(given.producer != UNKNOWN for r in records if r.place.module == "relu" for given in r.inputs)
