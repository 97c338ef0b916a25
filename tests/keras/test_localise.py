"""Localising by replay: the right verdict, layer and line for each kind of fault, and nothing left behind.

Over 500 lines because each fault needs a small model of its own, whose lines the test then names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from numpy.typing import NDArray

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.plan import Plan
from halfwise.keras.apply import AppliedPlan, apply
from halfwise.keras.localise import localise
from halfwise.keras.training_step import OwnStep

Array = NDArray[Any]
BACKEND = keras.backend.backend()


def find(
    model: keras.Model, x: Any, y: Any = 0.0, *, format_name: str = "float16", loss_scale: float = 1.0, loss: Any = None
) -> Diagnosis:
    """`localise` as the guard calls it, with the whole model in one format."""
    first = keras.tree.flatten(x)[0]
    y = np.full((len(first), 1), y, "float32") if np.ndim(y) == 0 else y
    return localise(
        model,
        (x, y),
        plan=Plan.manual(default=format_name, framework="keras"),
        apply_plan=lambda plan: AppliedPlan(model, plan, settle=False),
        loss_scale=loss_scale,
        half_format=format_name,
        step=OwnStep(model, loss or mean_of_output),
    )


def mean_of_output(y: Any, output: Any) -> Any:
    """A loss in float32 whose gradient is 1 / size everywhere."""
    return ops.mean(ops.cast(output, "float32"), axis=tuple(range(1, len(output.shape))))


def mean_square(y: Any, output: Any) -> Any:
    return ops.mean(ops.square(ops.cast(output, "float32")), axis=-1)


def line_of(function: Callable[..., Any], offset: int = 1) -> str:
    """`"file.py:line"` of the line that is `offset` after the `def` of `function`."""
    return f"test_localise.py:{function.__code__.co_firstlineno + offset}"


class Layer(keras.layers.Layer):
    """A dense layer followed by any function; the line to name is the function's own."""

    def __init__(self, function: Callable[[Any], Any], width: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(width)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(self.dense(x))


def in_the_middle(function: Callable[[Any], Any]) -> keras.Model:
    """A model whose layer `middle` runs `function`."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), Layer(function, name="middle"), layers.Dense(4, name="last")]
    )
    model.build((None, 4))
    return model


ONES = np.ones((2, 4), "float32")


def six_blocks() -> tuple[keras.Model, Array]:
    """Six blocks of two layers; in the fourth, 64 inputs of 60 meet weights of 20 to 40."""
    layers = keras.layers
    blocks = [
        keras.Sequential([layers.Dense(64, name="fc"), layers.LayerNormalization(name="norm")], name=f"block_{number}")
        for number in range(6)
    ]
    model = keras.Sequential([keras.Input((64,)), *blocks, layers.Dense(4)])
    norm = blocks[2].get_layer("norm")
    norm.gamma.assign(ops.zeros((64,)))
    norm.beta.assign(ops.full((64,), 60.0))
    kernel = np.random.default_rng(0).uniform(20.0, 40.0, (64, 64))
    blocks[3].get_layer("fc").kernel.assign(kernel)
    return model, np.random.default_rng(1).normal(size=(8, 64)).astype("float32")


def test_dense_overflow_names_the_layer_and_the_fix() -> None:
    model, x = six_blocks()
    found = find(model, x, loss=mean_square)
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.direction) == ("block_3.fc", "matmul", "forward")
    assert (found.dtype, found.suspects[0].module_class) == ("float16", "Dense")
    assert found.suspects[0].largest_input == 60.0
    assert found.suspects[0].found == "inf"
    assert any('Plan.manual({"block_3.fc": "float32"}, default="float16", framework="keras")' in f for f in found.fix)
    assert 'keras.layers.Dense(..., dtype="float32")' in found.fix
    assert len(found.suspects) == 1  # those who only pass it on are not suspects


def test_the_fix_that_is_offered_cures_it() -> None:
    model, x = six_blocks()
    found = find(model, x, loss=mean_square)
    line = next(line for line in found.fix if line.startswith("hw.apply"))
    handle = eval(line, {"hw": SimpleNamespace(apply=apply, Plan=Plan), "model": model})
    again = localise(
        model,
        (x, np.zeros((8, 1))),
        plan=handle.plan,
        apply_plan=lambda plan: AppliedPlan(model, plan, settle=False),
        loss_scale=1.0,
        half_format="float16",
        step=OwnStep(model, mean_square),
    )
    assert again.verdict == "not_reproducible"
    handle.remove()


def test_bfloat16_holds_what_float16_cannot() -> None:
    model, x = six_blocks()
    assert find(model, x, loss=mean_square, format_name="bfloat16").verdict == "not_reproducible"


def test_what_overflows_when_a_layer_casts_its_input_is_the_layers() -> None:
    model = in_the_middle(lambda h: h)
    found = localise(
        model,
        (1e5 * ONES, np.zeros((2, 1))),
        plan=Plan.manual({"middle": "float16", "middle.dense": "float16"}, framework="keras"),
        apply_plan=lambda plan: AppliedPlan(model, plan, settle=False),
        loss_scale=1.0,
        half_format="float16",
        step=OwnStep(model, mean_of_output),
    )
    assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "middle", "cast")
    assert found.suspects[0].largest_input > 65504


def _sum_of_ones(h: Any) -> Any:
    return h + ops.sum(ops.ones((70_000,), dtype=h.dtype))


def _exponential(h: Any) -> Any:
    return ops.exp(h * 0 + 12)


@pytest.mark.parametrize(("function", "operation"), [(_sum_of_ones, "sum"), (_exponential, "exp")], ids=["sum", "exp"])
def test_reductions_and_exponentials_in_half(function: Callable[[Any], Any], operation: str) -> None:
    found = find(in_the_middle(function), ONES)
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.source) == ("middle", operation, line_of(function))


def _exponential_of_the_backend(h: Any) -> Any:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.math.exp(h * 0 + 12)
    if BACKEND == "jax":
        import jax

        return jax.numpy.exp(h * 0 + 12)
    return (h * 0 + 12).exp()


def test_operations_of_the_backend_itself_are_seen_too() -> None:
    found = find(in_the_middle(_exponential_of_the_backend), ONES)
    offset = {"tensorflow": 4, "jax": 8, "torch": 9}[BACKEND]
    assert (found.module, found.operation) == ("middle", "exp")
    assert found.source == line_of(_exponential_of_the_backend, offset)


def _compiled(h: Any) -> Any:
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda a: tf.exp(a * 0 + 12))(h)
    if BACKEND == "jax":
        import jax

        return jax.jit(lambda a: jax.numpy.exp(a * 0 + 12))(h)
    return h * 0 + 12


@pytest.mark.skipif(BACKEND == "torch", reason="compiled torch code runs as it is written")
def test_code_that_nobody_can_look_into_is_the_layers() -> None:
    found = find(in_the_middle(_compiled), ONES)
    assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "middle", "Layer.call")
    assert [s.module for s in found.suspects] == ["middle"]


def test_an_epsilon_that_rounds_to_zero_is_named_with_the_smallest_that_works() -> None:
    def logarithm(h: Any) -> Any:
        return ops.log(ops.softmax(h * 0 + ops.cast(np.array([0, 0, 0, 90.0]), h.dtype)) + 1e-8)

    found = find(in_the_middle(logarithm), ONES)
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.source) == ("middle", "log", line_of(logarithm))
    smallest = float(found.fix[0].split("eps = ")[1].split()[0])
    assert "1e-08 rounds to 0 in float16" in found.fix[0]
    assert np.isfinite(1 / np.float16(smallest))
    with np.errstate(over="ignore"):
        assert not np.isfinite(1 / np.float16(smallest * 0.9))


def test_the_loss_belongs_to_no_layer() -> None:
    def loss(y: Any, output: Any) -> Any:
        return -ops.mean(ops.log(ops.cast(output * 0, "float16") + 1e-8), axis=-1)

    found = find(in_the_middle(lambda h: h), ONES, loss=loss)
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.source) == ("", "log", line_of(loss))
    assert found.suspects[0].module_class == ""
    assert "1e-08 rounds to 0 in float16" in found.fix[0]


def test_a_division_by_an_epsilon_lost_in_half() -> None:
    def divide(h: Any) -> Any:
        return h / (h * 0 + 1e-8)

    found = find(in_the_middle(divide), ONES)
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.source) == ("middle", "divide", line_of(divide))
    assert "1e-08 rounds to 0 in float16" in found.fix[0]


def test_half_written_into_the_code_is_told_from_the_policy() -> None:
    def total(h: Any) -> Any:
        return h + ops.cast(ops.sum(ops.ones((70_000,), dtype="float16")), h.dtype)

    found = find(in_the_middle(total), ONES)
    assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "middle", "sum")
    assert "the code itself computes in half" in found.detail
    assert "float32" in found.fix[0]


def test_the_gradient_of_a_root_at_zero_is_no_precision_problem() -> None:
    def root(h: Any) -> Any:
        return ops.sqrt(h * 0)

    for format_name in ("float16", "float32"):
        found = find(in_the_middle(root), ONES, format_name=format_name)
        assert found.verdict == "not_a_precision_problem"
        assert (found.module, found.operation, found.direction) == ("middle", "sqrt", "backward")
        assert found.source == line_of(root)
        assert "root's input above 0" in found.fix[0]


def test_a_gradient_that_overflows_at_every_scale() -> None:
    def steep(h: Any) -> Any:
        h = h * 0 * 3e4
        return h * 3e4

    found = find(in_the_middle(steep), ONES, loss=lambda y, output: ops.sum(ops.cast(output, "float32"), axis=-1))
    assert (found.verdict, found.module, found.direction) == ("overflow_at_every_scale", "middle", "backward")
    assert (found.operation, found.source, found.dtype) == ("multiply", line_of(steep, 1), "float16")
    assert found.suspects[0].largest_input > 1e4


def test_a_gradient_too_large_for_the_head_blames_the_head_and_not_the_loss() -> None:
    def steep_loss(y: Any, output: Any) -> Any:
        return ops.sum(ops.cast(output, "float32") * 1e6, axis=-1)

    found = find(in_the_middle(lambda h: h), ONES, loss=steep_loss)
    assert (found.verdict, found.module, found.direction) == ("overflow_at_every_scale", "last", "backward")
    assert (found.operation, found.dtype, found.suspects[0].module_class) == ("cast", "float16", "Dense")
    assert math.isclose(found.suspects[0].largest_input, 5e5, rel_tol=1e-3)


def test_a_sum_of_gradients_that_overflows_is_the_shared_tensors() -> None:
    def fan(h: Any) -> Any:
        shared = h * 0.5
        return shared * 1.0 + shared * 1.0

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), Layer(fan, name="fan")])
    found = find(model, ONES, loss=lambda y, output: ops.sum(ops.cast(output, "float32") * 98304.0, axis=-1))
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.direction) == ("fan", "multiply", "backward")
    assert (found.source, found.suspects[0].found) == (line_of(fan), "inf")
    assert found.suspects[0].largest_input == 49152.0


class Attention(keras.layers.Layer):
    """Scores of 8 features at 5 positions, masked by `mask`."""

    def __init__(self, mask: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.query, self.key = keras.layers.Dense(8), keras.layers.Dense(8)
        self.mask = mask

    def call(self, x: Any) -> Any:
        scores = self.mask(ops.matmul(self.query(x), ops.transpose(self.key(x), (0, 2, 1))))
        weights = ops.softmax(scores, axis=-1)
        return ops.matmul(weights, ops.cast(x, weights.dtype))


def _attending(mask: Callable[[Any], Any], *more: keras.layers.Layer) -> keras.Model:
    norm = keras.layers.LayerNormalization()
    return keras.Sequential([keras.Input((5, 8)), Attention(mask, name="attention"), norm, *more])


def _hidden(*, row: bool) -> Array:
    mask = np.triu(np.ones((5, 5), bool), 1)
    mask[2] |= row
    return mask


POSITIONS = np.random.default_rng(2).normal(size=(2, 5, 8)).astype("float32")


@pytest.mark.parametrize(
    "mask",
    [
        lambda s: ops.where(_hidden(row=False), -math.inf, s),
        lambda s: s + ops.cast(ops.where(_hidden(row=False), -math.inf, 0.0), s.dtype),
        lambda s: ops.where(_hidden(row=False), ops.full_like(s, -math.inf), s),
    ],
    ids=["where", "added", "filled"],
)
def test_a_causal_mask_is_no_fault(mask: Callable[[Any], Any]) -> None:
    assert find(_attending(mask), POSITIONS, loss=mean_of_output).verdict == "not_reproducible"
    # with a fault elsewhere the mask is not blamed either
    found = find(_attending(mask, Layer(_exponential, 8, name="faulty")), POSITIONS)
    assert [s.module for s in found.suspects] == ["faulty"]


def test_a_row_that_hides_everything_is_named_at_the_softmax() -> None:
    found = find(_attending(lambda s: ops.where(_hidden(row=True), -math.inf, s)), POSITIONS)
    assert found.verdict == "not_a_precision_problem"
    assert (found.module, found.operation, found.suspects[0].found) == ("attention", "softmax", "nan")
    assert found.source == line_of(Attention.call, 2)
    assert "mask" in found.fix[0]


def test_a_mask_constant_at_the_edge_of_the_format() -> None:
    def lowest(scores: Any) -> Any:
        return scores * 0 - 32 + ops.cast(_hidden(row=True), scores.dtype) * -65504.0

    found = find(_attending(lowest), POSITIONS)
    assert found.verdict == "overflow_at_every_scale"
    assert (found.module, found.operation, found.suspects[0].found) == ("attention", "add", "-inf")
    assert found.source == line_of(lowest)
    assert "no room in float16" in found.fix[0]


def test_infinities_that_never_reach_the_loss_are_not_reported() -> None:
    def buckets(h: Any) -> Any:  # T5 takes the logarithm of all distances and uses those above 0
        logarithm = ops.log(ops.cast(ops.arange(4), h.dtype))
        gate = 1 / (1 + ops.exp(h * 0 + 12))  # overflows in half, and is right nevertheless
        bias = ops.where(ops.arange(4) > 0, logarithm, 0.0)
        return ops.exp(h * 0 + 12) + bias + ops.stop_gradient(gate) * 0

    found = find(in_the_middle(buckets), ONES)
    assert [(s.module, s.operation, s.source) for s in found.suspects] == [("middle", "exp", line_of(buckets, 4))]


def test_nan_in_a_weight() -> None:
    model, x = six_blocks()
    kernel = model.get_layer("block_2").get_layer("fc").kernel
    value = ops.convert_to_numpy(kernel.value).copy()
    value[0, 0] = math.nan
    kernel.assign(value)
    found = find(model, x)
    assert (found.verdict, found.module, found.operation) == ("nonfinite_parameters", "block_2.fc", "")
    assert "weight block_2.fc.kernel holds nan" in found.detail
    assert found.evidence == {"tensors": 1.0}


def test_infinite_state_is_blamed_only_where_it_reaches_the_loss() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    norm = model.layers[0]
    norm.moving_mean.assign([math.inf, 0.0, 0.0, 0.0])
    assert find(model, ONES).verdict == "not_reproducible"  # in training the batch's own statistics are used
    found = find(model, ONES * np.array([1.0, math.nan, 1.0, 1.0], "float32"))
    assert found.verdict == "nonfinite_input"
    norm.trainable = False
    found = find(model, ONES)
    assert (found.verdict, found.module) == ("nonfinite_parameters", "batch_normalization")
    assert "state batch_normalization.moving_mean holds inf" in found.detail


def test_data_that_are_not_finite_are_named_with_the_first_sample() -> None:
    model = in_the_middle(lambda h: h)
    x = np.ones((6, 4), "float32")
    x[3, 1:3] = math.nan
    found = find(model, x)
    assert (found.verdict, found.evidence) == ("nonfinite_input", {"nonfinite_values": 2.0, "first_sample": 3.0})
    assert "'x' of the batch holds nan: 2 of 24 values, first in sample 3" in found.detail
    y = np.zeros((6, 4), "float32")
    y[5] = math.inf
    found = find(model, np.ones((6, 4), "float32"), y, loss="mse")
    assert found.verdict == "nonfinite_input"
    assert found.detail.startswith("'y' of the batch")


def test_a_mask_among_the_inputs_is_no_bad_data() -> None:
    x, bias = keras.Input((5, 5), name="x"), keras.Input((5, 5), name="bias")
    weights = keras.layers.Softmax()(keras.layers.Add()([x, bias]))
    masked = np.where(_hidden(row=False), -math.inf, 0.0)[None].astype("float32")
    data = {"x": np.ones((1, 5, 5), "float32"), "bias": masked}
    faulty = keras.Model([x, bias], Layer(_exponential, name="faulty")(weights))
    assert find(faulty, data).module == "faulty"
    both = keras.Model([x, bias], Layer(lambda h: h, name="sound")(keras.layers.Subtract()([x, bias])))
    found = find(both, data)
    assert found.verdict == "nonfinite_input"
    assert found.detail.startswith("\"x['bias']\" of the batch holds -inf: 10 of 25 values")


def test_the_loss_scale_alone_is_to_blame() -> None:
    model = in_the_middle(lambda h: h)
    found = find(model, ONES, loss=mean_square, loss_scale=2.0**24)
    assert found.verdict == "loss_scale_too_high"
    largest = found.evidence["largest_working_scale"]
    assert find(model, ONES, loss=mean_square, loss_scale=largest).verdict == "not_reproducible"
    assert find(model, ONES, loss=mean_square, loss_scale=8 * largest).verdict == "loss_scale_too_high"
    assert f"initial_scale={largest!r}" in found.fix[0]
    assert found.suspects[0].direction == "backward"


def test_a_sound_step_is_not_reproducible() -> None:
    found = find(in_the_middle(lambda h: h), ONES, loss_scale=4.0)
    assert (found.verdict, found.suspects) == ("not_reproducible", ())


def test_gradients_that_are_finite_and_too_large_to_square() -> None:
    def steep_loss(y: Any, output: Any) -> Any:
        return ops.sum(ops.cast(output, "float32") * 1e25, axis=-1)

    found = find(in_the_middle(lambda h: h), ONES, loss=steep_loss, format_name="float32")
    assert found.verdict == "not_a_precision_problem"
    assert "squared norm" in found.detail
    assert found.suspects[0].direction == "backward"
    assert find(in_the_middle(lambda h: h), ONES, loss=steep_loss, format_name="bfloat16").verdict == (
        "not_a_precision_problem"
    )


class Encoder(keras.Model):
    """A model in code, with a layer that it calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = keras.layers.Dense(4, name="embed")
        self.block = Layer(lambda h: h, name="block")
        self.faulty = Layer(_exponential, name="faulty")

    def call(self, x: Any) -> Any:
        h = self.block(self.block(self.embed(x)))
        return self.faulty(h) + ops.relu(h)


def test_a_model_in_code_with_a_layer_that_is_called_twice() -> None:
    model = Encoder()
    found = find(model, ONES)
    assert (found.module, found.operation, found.source) == ("faulty", "exp", line_of(_exponential))
    model.block.dense.kernel.assign(np.full((4, 4), 300.0))
    model.embed.kernel.assign(np.full((4, 4), 0.25))
    found = find(model, ONES)
    assert (found.module, found.operation) == ("block.dense", "matmul")  # 300 * 4 * 300 * 4: the second call
    assert found.source == line_of(Layer.call)
    assert found.suspects[0].largest_input == 1200.0


def test_an_operation_of_the_model_itself() -> None:
    inputs = keras.Input((4,))
    h = keras.layers.Dense(4, kernel_initializer="identity")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(ops.exp(h * 12)))
    found = find(model, ONES)
    assert (found.verdict, found.operation) == ("overflow_at_every_scale", "exp")
    assert (found.module, found.suspects[0].module_class) == ("", "Functional")


def test_attention_is_one_whole() -> None:
    inputs = keras.Input((5, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, keras.layers.Dense(1)(attention(inputs, inputs)))
    attention._value_dense.kernel.assign(np.full((8, 2, 4), 2e4))
    found = find(model, np.ones((2, 5, 8), "float32"))
    assert (found.verdict, found.module, found.suspects[0].module_class) == (
        "overflow_at_every_scale",
        "attention",
        "MultiHeadAttention",
    )
    assert found.operation == "einsum"


def test_a_recurrent_layer_is_one_whole() -> None:
    layer = keras.layers.SimpleRNN(4, activation="linear", name="memory", recurrent_initializer="identity")
    model = keras.Sequential([keras.Input((40, 4)), layer, keras.layers.Dense(1)])
    layer.cell.recurrent_kernel.assign(1.5 * np.eye(4))
    found = find(model, np.ones((2, 40, 4), "float32"))
    assert (found.verdict, found.module) == ("overflow_at_every_scale", "memory")
    assert found.suspects[0].module_class == "SimpleRNN"
    assert all(s.module == "memory" for s in found.suspects)


class Trainer(keras.Model):
    """Trains itself with a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.second(self.first(x))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return ops.mean(ops.exp(y_pred * 0 + 12))


def test_a_compiled_model_with_a_loss_of_its_own() -> None:
    model = Trainer()
    model.compile("adam")
    data = (ONES, np.zeros((2, 1), "float32"))
    found = localise(
        model,
        data,
        plan=Plan.manual(default="float16", framework="keras"),
        apply_plan=lambda plan: AppliedPlan(model, plan, settle=False),
        loss_scale=1.0,
        half_format="float16",
    )
    assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "", "exp")
    assert found.source == line_of(Trainer.compute_loss)


@pytest.mark.skipif(BACKEND != "jax", reason="only there the weights are handed from step to step")
def test_the_state_within_fit_on_jax() -> None:
    model, x = six_blocks()
    model.compile("adam", loss="mse")
    model._symbolic_build(data_batch=(x, np.zeros((8, 1))))
    model.optimizer.build(model.trainable_variables)
    model._initial_epoch = 0
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
        purge_model_variables=True,
    )
    found = localise(
        model,
        (x, np.zeros((8, 4), "float32")),
        plan=Plan.manual(default="float16", framework="keras"),
        apply_plan=lambda plan: AppliedPlan(model, plan, settle=False),
        loss_scale=1.0,
        half_format="float16",
        state=state,
    )
    assert found.module == "block_3.fc"
    broken = ([*state[0][:-1], state[0][-1] * math.nan], *state[1:])
    found = localise(
        model,
        (x, np.zeros((8, 4), "float32")),
        plan=Plan.manual(default="float16", framework="keras"),
        apply_plan=lambda plan: AppliedPlan(model, plan, settle=False),
        loss_scale=1.0,
        half_format="float16",
        state=broken,
    )
    assert found.verdict == "nonfinite_parameters"


class Everything(keras.Model):
    """Batch norm, dropout and a fault, so that replays have something to disturb and to follow."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.a, self.norm, self.drop = layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5, seed=3)
        self.b = Layer(_exponential, name="b")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.b(self.drop(self.norm(self.a(x), training=training), training=training))


def _values(model: keras.Model) -> list[Array]:
    return [ops.convert_to_numpy(v.value).copy() for v in (*model.variables, *model.metrics_variables)]


def test_nothing_is_left_behind() -> None:
    model = Everything()
    model.compile("adam", loss="mse", metrics=["mae"])
    x, y = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), np.zeros((8, 4), "float32")
    model.train_on_batch(x, y)
    before, functions = _values(model), (ops.exp, keras.src.backend.numpy.exp, keras.Layer.__call__)
    policies = [layer.dtype_policy.name for layer in model._flatten_layers()]
    assert find(model, x, y, loss="mse", loss_scale=4.0).module == "b"
    for value, now in zip(before, _values(model), strict=True):
        np.testing.assert_array_equal(value, now)
    assert functions == (ops.exp, keras.src.backend.numpy.exp, keras.Layer.__call__)
    assert policies == [layer.dtype_policy.name for layer in model._flatten_layers()]
    assert not any("call" in vars(layer) for layer in model._flatten_layers())


def test_an_exception_in_the_step_leaves_nothing_behind_either() -> None:
    def interrupted(y: Any, output: Any) -> Any:
        if ops.is_tensor(output) and not isinstance(output, keras.KerasTensor):
            raise KeyboardInterrupt
        return ops.mean(output, axis=-1)

    model = Everything()
    model(ONES)
    before, functions = _values(model), (ops.exp, keras.src.backend.numpy.exp, keras.Layer.__call__)
    with pytest.raises(KeyboardInterrupt):
        find(model, ONES, loss=interrupted)
    for value, now in zip(before, _values(model), strict=True):
        np.testing.assert_array_equal(value, now)
    assert functions == (ops.exp, keras.src.backend.numpy.exp, keras.Layer.__call__)
