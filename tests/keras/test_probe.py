"""The probe: that what it shows is what happens in a training step, and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import keras
import numpy as np
import pytest
from keras import layers, ops

from halfwise.errors import UsageError
from halfwise.keras.probe import Observer, Probed, probe, tap, tapped_layers, to_numpy
from halfwise.keras.training_step import OwnStep

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 4)).astype("float32")
Y = RANDOM.normal(size=(6, 2)).astype("float32")


class Notes(Observer):
    """Writes down everything."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[str, int], list[Any]] = {}
        self.outputs: dict[tuple[str, int], list[Any]] = {}
        self.gradients: dict[tuple[str, int, str, int], Any] = {}
        self.order: list[str] = []

    def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:
        self.inputs[path, call] = [to_numpy(tensor) for tensor in inputs]
        self.outputs[path, call] = [to_numpy(tensor) for tensor in outputs]
        self.order.append(f"{path} forward")

    def backward(self, path: str, call: int, where: Literal["input", "output"], index: int, gradient: Any) -> None:
        assert (path, call, where, index) not in self.gradients
        self.gradients[path, call, where, index] = to_numpy(gradient)
        self.order.append(f"{path} {where}")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


def two_layers() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def with_state() -> keras.Model:
    """A model with everything that a step changes besides weights."""
    inside: list[Any] = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *inside])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def twins() -> tuple[keras.Model, keras.Model]:
    model, twin = with_state(), with_state()
    for variable, same_one in zip(model.variables, twin.variables, strict=True):
        same_one.assign(np.array(ops.convert_to_numpy(variable.value)))
    return model, twin


def values(variables: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [np.array(ops.convert_to_numpy(variable.value)) for variable in variables]


def same(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def by_name(probed: Probed) -> dict[str, np.ndarray[Any, Any]]:
    return {variable.path.split("/", 1)[1]: to_numpy(gradient) for variable, gradient in probed.gradients}


# What it shows


def test_everything_is_as_calculated_by_hand() -> None:
    model, notes = two_layers(), Notes()
    w1, b1, w2, b2 = values(model.weights)
    hidden = X @ w1 + b1
    output = hidden @ w2 + b2
    upstream = 2 * (output - Y) / output.size * 8.0
    probed = probe(model, (X, Y), notes, loss_scale=8.0)
    assert probed.loss == pytest.approx(np.square(output - Y).mean(), rel=1e-5)

    def close(found: Any, expected: Any) -> None:
        np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-4, atol=1e-5)

    close(probed.predictions, output)
    close(notes.inputs["dense", 0][0], X)
    close(notes.outputs["dense", 0][0], hidden)
    close(notes.inputs["dense_1", 0][0], hidden)
    close(notes.outputs["", 0][0], output)
    close(notes.gradients["dense_1", 0, "output", 0], upstream)
    close(notes.gradients["dense_1", 0, "input", 0], upstream @ w2.T)
    close(notes.gradients["dense", 0, "output", 0], upstream @ w2.T)
    assert ("dense", 0, "input", 0) not in notes.gradients  # nothing is trained before it
    for (_, found), expected in zip(
        probed.gradients,
        (X.T @ (upstream @ w2.T), (upstream @ w2.T).sum(0), hidden.T @ upstream, upstream.sum(0)),
        strict=True,
    ):
        close(found, expected)
    assert [variable.path for variable, _ in probed.gradients] == [v.path for v in model.trainable_variables]
    assert same([to_numpy(value) for _, value in probed.weights], [w1, b1, w2, b2])
    assert notes.order == [
        "dense forward",
        "dense_1 forward",
        " forward",
        " output",
        "dense_1 output",
        "dense_1 input",
        "dense output",
    ]


def test_an_inputs_gradient_is_that_of_one_use() -> None:
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, name="hidden")(inputs)
    left, right = layers.Dense(2, name="left"), layers.Dense(2, name="right")
    model = keras.Model(inputs, layers.Add()([left(hidden), right(hidden)]))
    model.compile("sgd", "mse")
    notes = Notes()
    probe(model, (X, Y), notes)
    upstream = notes.gradients["left", 0, "output", 0]
    of_left = upstream @ values([left.kernel])[0].T
    of_right = upstream @ values([right.kernel])[0].T
    np.testing.assert_allclose(notes.gradients["left", 0, "input", 0], of_left, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(notes.gradients["right", 0, "input", 0], of_right, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(notes.gradients["hidden", 0, "output", 0], of_left + of_right, rtol=1e-4, atol=1e-6)


def test_calls_of_a_shared_layer_are_counted() -> None:
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    model = keras.Model(inputs, layers.Dense(2)(shared(shared(inputs))))
    model.compile("sgd", "mse")
    notes = Notes()
    probe(model, (X, Y), notes)
    assert same(notes.outputs["shared", 0], notes.inputs["shared", 1])
    assert ("shared", 2) not in notes.outputs
    probe(model, (X, Y), notes := Notes())
    assert ("shared", 0) in notes.outputs


def test_what_really_ran_is_shown() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2, dtype="float32")])
    model.compile("sgd", "mse")
    notes = Notes()
    probed = probe(model, (X, Y), notes)
    assert notes.inputs["dense", 0][0].dtype == np.float16
    assert notes.outputs["dense", 0][0].dtype == np.float16
    assert notes.gradients["dense", 0, "output", 0].dtype == np.float16
    assert notes.inputs["dense_1", 0][0].dtype == np.float32
    assert notes.gradients["dense_1", 0, "input", 0].dtype == np.float32
    assert all(to_numpy(gradient).dtype == np.float32 for _, gradient in probed.gradients)


def test_the_loss_scale_is_applied_in_float32() -> None:
    model = two_layers()
    plain, scaled = probe(model, (X, Y)), probe(model, (X, Y), loss_scale=2.0**100)
    assert plain.loss == scaled.loss
    for (_, small), (_, large) in zip(plain.gradients, scaled.gradients, strict=True):
        assert np.array_equal(to_numpy(small) * np.float32(2.0**100), to_numpy(large))


def test_whole_layers_are_not_looked_into() -> None:
    inputs = keras.Input((5, 4))
    attended = layers.MultiHeadAttention(2, 2)(query=inputs, value=inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.Bidirectional(layers.SimpleRNN(3))(attended)))
    assert set(tapped_layers(model)) == {"", "multi_head_attention", "bidirectional", "dense"}
    model = keras.Model(inputs, attended)
    model.compile("sgd", "mse")
    notes = Notes()
    x = RANDOM.normal(size=(2, 5, 4)).astype("float32")
    probe(model, (x, x), notes)
    assert {path for path, _ in notes.outputs} == {"", "multi_head_attention"}
    assert len(notes.inputs["multi_head_attention", 0]) == 2  # also arguments given by name


class Pooling(layers.Layer):
    """Its own code reads the mask of its input off the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.inner = layers.GlobalAveragePooling1D()

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Its output has none."""


def test_masks_survive_the_taps() -> None:
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4]])
    model = keras.Sequential([layers.Embedding(5, 3, mask_zero=True), Pooling(), layers.Dense(2)])
    model.compile("sgd", "mse")
    plain, tapped = probe(model, (tokens, Y[:3])), probe(model, (tokens, Y[:3]), Notes())
    assert plain.loss == tapped.loss
    assert same([to_numpy(g) for _, g in plain.gradients], [to_numpy(g) for _, g in tapped.gradients])


def test_masks_given_by_name_are_no_inputs() -> None:
    class Masked(layers.Layer):
        def call(self, x: Any, additive_mask: Any = None) -> Any:
            return ops.softmax(x + additive_mask)

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.masked = Masked(name="masked")
            self.fc = layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.fc(self.masked(x, additive_mask=ops.array([0.0, 0.0, -np.inf, 0.0])))

    model = Net()
    model.compile("sgd", "mse")
    notes = Notes()
    probe(model, (X, Y), notes)
    assert len(notes.inputs["masked", 0]) == 1
    assert np.isfinite(notes.inputs["masked", 0][0]).all()


def test_a_softmax_head_keeps_the_logits_that_keras_computes_the_loss_from() -> None:
    head = layers.Dense(2, activation="softmax", name="head")
    model = keras.Sequential([keras.Input((1,)), head])
    head.set_weights([np.array([[0.0, 200.0]], "float32"), np.zeros(2, "float32")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    data = (np.ones((1, 1), "float32"), np.zeros((1,), "int32"))  # as wrong as can be: a probability of exactly 0
    notes = Notes()
    plain, tapped = probe(model, data), probe(model, data, notes)
    assert plain.loss == tapped.loss
    assert same([to_numpy(g) for _, g in plain.gradients], [to_numpy(g) for _, g in tapped.gradients])
    if BACKEND == "tensorflow":
        assert plain.loss == 200.0
        assert np.array_equal(notes.gradients["head", 0, "output", 0], [[-1.0, 1.0]])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow makes sparse gradients")
def test_sparse_gradients_are_read_by_their_values() -> None:
    tokens = np.array([[1, 2, 1, 1]])
    model = keras.Sequential([layers.Embedding(100, 3), layers.GlobalAveragePooling1D(), layers.Dense(2)])
    model.compile("sgd", "mse")
    probed = probe(model, (tokens, Y[:1]), Notes())
    assert to_numpy(probed.gradients[0][1]).shape == (4, 3)


def test_layers_in_compiled_loops_are_passed_over() -> None:
    class Loop(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.fc = layers.Dense(4)

        def build(self, shape: Any) -> None:
            self.fc.build(shape)

        def call(self, x: Any) -> Any:
            return ops.fori_loop(0, 3, lambda _, carry: self.fc(carry), x) if BACKEND != "jax" else self._scan(x)

        def _scan(self, x: Any) -> Any:
            return ops.scan(lambda carry, _: (self.fc(carry), None), x, length=3)[0]

    model = keras.Sequential([keras.Input((4,)), Loop(), layers.Dense(2)])
    model.compile("sgd", "mse")
    notes = Notes()
    plain, tapped = probe(model, (X, Y)), probe(model, (X, Y), notes)
    assert plain.loss == pytest.approx(tapped.loss, rel=1e-6)
    assert ("loop", 0) in notes.outputs
    assert (("loop.dense", 0) in notes.outputs) == (BACKEND != "jax")


# Whose step it is


def custom_train_step(self: Any, *arguments: Any) -> Any:
    """As Keras' guides write one: no `scale_loss`."""
    if BACKEND == "jax":
        state, (x, y, *_) = arguments
        import jax

        trainable, non_trainable, optimizer, metrics = state

        def loss_of(trainable: Any) -> Any:
            y_pred, updated = self.stateless_call(trainable, non_trainable, x, training=True)
            return 3.0 * self.compute_loss(x, y, y_pred), updated

        (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        return {"mine": loss}, (trainable, updated, optimizer, metrics)
    x, y, *_ = arguments[0]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = 3.0 * self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"mine": loss}
    self.zero_grad()
    loss = 3.0 * self.compute_loss(y=y, y_pred=self(x, training=True))
    loss.backward()
    self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
    return {"mine": loss}


class Custom(keras.Sequential):
    train_step = custom_train_step


def test_a_training_step_of_the_users_own() -> None:
    plain = two_layers()
    model = Custom([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile("sgd", "mse")
    model.set_weights(plain.get_weights())
    before = values(model.weights)
    expected, found = probe(plain, (X, Y)), probe(model, (X, Y), Notes())
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)  # what compute_loss returned
    for (_, one), (_, three) in zip(expected.gradients, found.gradients, strict=True):
        np.testing.assert_allclose(3 * to_numpy(one), to_numpy(three), rtol=1e-5)
    assert float(to_numpy(found.logs["mine"])) == pytest.approx(3 * expected.loss, rel=1e-5)
    assert same(before, values(model.weights))


@pytest.mark.skipif(BACKEND == "jax", reason="JAX's trainer knows one optimizer")
def test_every_optimizer_of_a_step_is_replaced() -> None:
    class Two(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            first, second = self.trainable_variables[:2], self.trainable_variables[2:]
            ones = [ops.ones_like(v) for v in first], [2 * ops.ones_like(v) for v in second]
            self.mine.apply(ones[0], first)
            self.optimizer.apply_gradients(zip(ones[1], second, strict=True))
            return {}

    model = Two([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.compile("sgd", "mse")
    model.mine = keras.optimizers.Adam(0.1)
    before = values(model.weights)
    probed = probe(model, (X, Y))
    assert [float(to_numpy(gradient).max()) for _, gradient in probed.gradients] == [1.0, 1.0, 2.0, 2.0]
    assert np.isnan(probed.loss)
    assert same(before, values(model.weights))
    assert isinstance(model.mine, keras.optimizers.Adam)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere Keras builds a model from (x, y, sample_weight) alone")
def test_data_of_any_structure_and_a_model_built_in_its_first_step() -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step((data["tokens"], data["labels"]))

    model = Own([layers.Dense(3), layers.BatchNormalization(), layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    data = {"tokens": X, "labels": Y}
    notes = Notes()
    probed = probe(model, data, notes)
    assert ("batch_normalization", 0) in notes.outputs
    assert len(probed.gradients) == 6
    assert len(probed.weights) == 8
    assert same(values(model.layers[1].weights), [np.ones(3), np.zeros(3), np.zeros(3), np.ones(3)])
    assert not any(np.any(value) for value in values(model.metrics_variables))


def test_a_model_that_is_not_compiled() -> None:
    model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    with pytest.raises(UsageError, match="is not compiled"):
        probe(model, (X, Y))
    step = OwnStep(model, "mse")
    notes = Notes()
    probed = probe(model, (X, Y), notes, step=step)
    assert probed.loss == pytest.approx(np.square(notes.outputs["", 0][0] - Y).mean(), rel=1e-5)
    assert np.array_equal(to_numpy(probed.predictions), notes.outputs["", 0][0])
    assert len(probed.gradients) == 4
    assert step.optimizer is None


# No trace


def test_the_next_step_is_as_if_there_had_been_no_probe() -> None:
    model, twin = twins()
    keras.utils.set_random_seed(1)  # torch's dropout draws from torch's generator
    expected = [twin.train_on_batch(X, Y), twin.train_on_batch(X, Y)]
    keras.utils.set_random_seed(1)
    found = [model.train_on_batch(X, Y)]
    before = values([*model.variables, *model.metrics_variables, *model.optimizer.variables])
    for loss_scale in (1.0, 4.0):
        probe(model, (X, Y), Notes(), loss_scale=loss_scale)
    assert same(before, values([*model.variables, *model.metrics_variables, *model.optimizer.variables]))
    found.append(model.train_on_batch(X, Y))
    assert found == expected
    assert same(values(model.variables), values(twin.variables))


def test_a_probe_sees_the_dropout_of_the_step_that_follows() -> None:
    model = with_state()
    first = probe(model, (X, Y))
    assert first.loss == probe(model, (X, Y)).loss
    assert first.loss == pytest.approx(model.train_on_batch(X, Y)[0], rel=1e-6)


def test_random_generators_stand_where_they_stood() -> None:
    class Noisy(layers.Layer):
        def call(self, x: Any) -> Any:
            noise = 0.0 if BACKEND == "jax" else keras.random.normal((4,))  # there it would be a constant
            return x + noise + random.random() + np.random.random()

    model = keras.Sequential([keras.Input((4,)), Noisy(), layers.Dense(2)])
    model.compile("sgd", "mse")
    probe(model, (X, Y))  # builds what is to be built

    def drawn() -> list[Any]:
        return [to_numpy(keras.random.normal((3,))), random.random(), np.random.random()]

    keras.utils.set_random_seed(3)
    expected = drawn()
    keras.utils.set_random_seed(3)
    probe(model, (X, Y))  # before Keras' own generator is made
    assert same(expected, drawn())
    keras.utils.set_random_seed(3)
    keras.random.normal((1,))
    expected = drawn()
    keras.utils.set_random_seed(3)
    keras.random.normal((1,))
    probe(model, (X, Y))
    assert same(expected, drawn())


def test_calls_and_optimizers_are_put_back_also_after_errors() -> None:
    model = two_layers()
    mine = model.layers[0].call
    model.layers[0].__dict__["call"] = lambda x, training=None: 2.0 * mine(x)  # as a plan may put one there
    earlier = model.layers[0].__dict__["call"]
    optimizer = model.optimizer

    class Failing(Notes):
        def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:
            super().forward(path, call, inputs, outputs)
            if path == "dense_1":
                raise KeyError

    notes = Failing()
    with pytest.raises(KeyError):
        probe(model, (X, Y), notes)
    kernel, bias = values(model.layers[0].weights)
    np.testing.assert_allclose(notes.outputs["dense", 0][0], 2 * (X @ kernel + bias), rtol=1e-4, atol=1e-6)
    assert model.layers[0].__dict__["call"] is earlier
    assert "call" not in model.layers[1].__dict__
    assert "compute_loss" not in model.__dict__
    assert model.optimizer is optimizer


@pytest.mark.skipif(BACKEND != "torch", reason="only torch's tensors hold gradients")
def test_gradient_fields_are_kept() -> None:
    model = two_layers()
    model.train_on_batch(X, Y)
    before = [variable.value.grad for variable in model.trainable_variables]
    kept = [gradient.clone() for gradient in before]
    probe(model, (X, Y), loss_scale=100.0)
    assert all(v.value.grad is gradient for v, gradient in zip(model.trainable_variables, before, strict=True))
    assert all(bool((a == b).all()) for a, b in zip(kept, before, strict=True))


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX keeps the state outside the variables")
def test_the_state_of_a_running_fit() -> None:
    model = with_state()
    model.train_on_batch(X, Y)
    expected = probe(model, (X, Y))
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    state = model._get_jax_state(**dict.fromkeys(names, True), purge_model_variables=True)
    found = probe(model, (X, Y), Notes(), state=state)
    assert found.loss == expected.loss
    assert same([to_numpy(g) for _, g in found.gradients], [to_numpy(g) for _, g in expected.gradients])
    assert same([to_numpy(v) for _, v in found.weights], [to_numpy(v) for _, v in expected.weights])
    assert all(variable._value is None for variable in model.variables)


@pytest.mark.skipif(BACKEND == "jax", reason="on JAX the state is needed; see above")
def test_a_probe_within_fit_changes_nothing() -> None:
    model, twin = twins()
    look = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda *_, **__: probe(model, (X, Y), Notes()))
    keras.utils.set_random_seed(1)
    looked = model.fit(X, Y, batch_size=3, epochs=2, verbose=0, shuffle=False, callbacks=[look])
    keras.utils.set_random_seed(1)
    plain = twin.fit(X, Y, batch_size=3, epochs=2, verbose=0, shuffle=False)
    assert looked.history == plain.history
    assert same(values(model.variables), values(twin.variables))


# Taps


def gradient(function: Any, x: Any) -> Any:
    if BACKEND == "jax":
        import jax

        return jax.grad(function)(x)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
        return tape.gradient(result, x)
    x = x.clone().requires_grad_()
    function(x).backward()
    return x.grad


def test_each_tap_gives_the_gradient_of_its_own_branch() -> None:
    seen: list[Any] = []

    def function(x: Any) -> Any:
        a = tap(x, lambda v: seen.append(("a", float(v))), lambda g: seen.append(("a gradient", float(g))))
        b = tap(x, lambda v: seen.append(("b", float(v))), lambda g: seen.append(("b gradient", float(g))))
        return 2.0 * a + 5.0 * b

    x = ops.convert_to_tensor(3.0)
    assert float(gradient(function, x)) == 7.0
    assert seen[:2] == [("a", 3.0), ("b", 3.0)]
    assert sorted(seen[2:]) == [("a gradient", 2.0), ("b gradient", 5.0)]


def test_what_cannot_be_tapped_is_returned_as_it_is() -> None:
    def never(_value: Any) -> None:
        raise AssertionError

    for value in (ops.arange(3), None, "text", np.ones(3), keras.Input((2,))):
        assert tap(value, never, never) is value


@pytest.mark.skipif(BACKEND == "torch", reason="torch runs eagerly")
def test_nothing_is_told_of_what_a_compiler_traces() -> None:
    def never(_value: Any) -> None:
        raise AssertionError

    def function(x: Any) -> Any:
        return ops.sum(3.0 * tap(x, never, never))

    x = ops.ones(2)
    if BACKEND == "jax":
        import jax

        assert float(jax.jit(function)(x)) == 6.0
        assert to_numpy(jax.jit(jax.grad(function))(x)).tolist() == [3.0, 3.0]
    else:
        import tensorflow as tf

        assert float(tf.function(function)(x)) == 6.0


def test_half_precision_values_reach_numpy_unchanged() -> None:
    for dtype in ("float16", "bfloat16"):
        found = to_numpy(ops.convert_to_tensor([1.0, 2.0**-14, 300.0], dtype=dtype))
        assert found.dtype.name == dtype
        assert found.astype("float32").tolist() == [1.0, 2.0**-14, 300.0]
