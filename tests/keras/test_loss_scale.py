"""The loss-scale optimizer: Keras' behaviour, the core's scale, and nothing of the inner optimizer lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from halfwise.core.loss_scale import LOWEST_FLOOR, LossScaleSettings, initial_state, update
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.loss_scale import LossScaleOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

BACKEND = keras.config.backend()
STATELESS = [False] if BACKEND == "tensorflow" else [False, True]
INF, NAN = float("inf"), float("nan")
FIXED = LossScaleSettings(initial=1.0, floor=1.0, ceiling=1.0)
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


class Loop:
    """A training that is given its gradients, with the state in variables or passed from call to call."""

    def __init__(self, optimizer: Any, stateless: bool = False, start: Any = (1.0, 2.0, 3.0, 4.0)) -> None:
        self.optimizer, self.weight = optimizer, keras.Variable(np.array(start, "float32"))
        optimizer.scale_loss(1.0)
        optimizer.build([self.weight])
        self.stateless: Callable[..., Any] | None = optimizer.stateless_apply if stateless else None
        if stateless and BACKEND == "jax":
            import jax

            self.stateless = jax.jit(optimizer.stateless_apply)

    def step(self, gradient: Any) -> None:
        grads = [None if gradient is None else ops.array(np.broadcast_to(np.float32(gradient), self.weight.shape))]
        if self.stateless is None:
            self.optimizer.apply(grads, [self.weight])
            return
        state = [ops.copy(variable.value) for variable in self.optimizer.variables]
        trained, state = self.stateless(state, grads, [ops.copy(self.weight.value)])
        for variable, value in zip([self.weight, *self.optimizer.variables], trained + state, strict=True):
            variable.assign(value)

    @property
    def values(self) -> list[float]:
        return array(self.weight).tolist()


def array(tensor: Any) -> np.ndarray[Any, Any]:
    return np.asarray(ops.convert_to_numpy(tensor))


def state_of(optimizer: LossScaleOptimizer) -> tuple[float, int, int]:
    variables = (optimizer.dynamic_scale, optimizer.step_counter, optimizer.hysteresis_left)
    scale, tracker, left = (array(variable).item() for variable in variables)
    return scale, tracker, left


def everything(optimizer: Any) -> list[list[float]]:
    return [array(variable).ravel().tolist() for variable in optimizer.variables]


# ---- What Keras' own tests ask of the class ----


@pytest.mark.parametrize("stateless", STATELESS)
def test_a_finite_step(stateless: bool) -> None:
    loop = Loop(LossScaleOptimizer(SGD(0.5, loss_scale_factor=100.0)), stateless)
    assert loop.optimizer.inner_optimizer.loss_scale_factor is None
    loop.step(np.array([1.0, 6.0, 7.0, 2.0]) * loop.optimizer.initial_scale)
    assert loop.values == [0.5, -1.0, -0.5, 3.0]


@pytest.mark.parametrize("stateless", STATELESS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN, [1.0, 2.0, NAN, 3.0]])
def test_an_infinite_step(bad: Any, stateless: bool) -> None:
    loop = Loop(LossScaleOptimizer(SGD(0.5)), stateless)
    loop.step(bad)
    assert loop.values == [1.0, 2.0, 3.0, 4.0]
    assert int(array(loop.optimizer.skipped_steps)) == 1


@pytest.mark.parametrize("stateless", STATELESS)
def test_downscaling_and_upscaling(stateless: bool) -> None:
    falling = Loop(LossScaleOptimizer(SGD(0.5), initial_scale=400.0), stateless)
    for _ in range(4):
        falling.step(INF)
    assert falling.optimizer.scale_loss(1.0) == 25.0
    rising = Loop(LossScaleOptimizer(SGD(0.5), initial_scale=2.0, dynamic_growth_steps=2), stateless)
    for _ in range(8):
        rising.step(1.0)
    assert rising.optimizer.scale_loss(1.0) == 32.0


@pytest.mark.parametrize("stateless", STATELESS)
def test_iterations_count_applied_steps(stateless: bool) -> None:
    loop = Loop(LossScaleOptimizer(SGD(0.5)), stateless)
    for gradient, expected in [(1.0, 1), (INF, 1), (1.0, 2), (1e38, 2), (1.0, 3)]:
        loop.step(gradient)
        assert int(array(loop.optimizer.iterations)) == expected


@pytest.mark.parametrize("stateless", STATELESS)
@pytest.mark.parametrize("value", [3.0, 1e25, INF])
def test_a_variable_that_its_gradient_overwrites(value: float, stateless: bool) -> None:
    optimizer = LossScaleOptimizer(SGD(0.5))
    loop = Loop(optimizer, stateless)
    loop.weight.overwrite_with_gradient = True
    loop.step(value)
    applied = value != INF
    assert loop.values == ([np.float32(value)] * 4 if applied else [1.0, 2.0, 3.0, 4.0])
    norm = float(array(optimizer.gradient_norm))
    assert norm == 0.0 if applied else not np.isfinite(norm)


def test_apply_without_variables() -> None:
    optimizer, weight = LossScaleOptimizer(SGD(0.5)), keras.Variable([1.0, 2.0])
    with pytest.raises(UsageError, match=r"optimizer\.build"):
        optimizer.apply([ops.array([1.0, 1.0])])
    optimizer.scale_loss(1.0)
    optimizer.build([weight])
    optimizer.apply([ops.array([1.0, 2.0]) * optimizer.initial_scale])
    assert array(weight).tolist() == [0.5, 1.0]
    optimizer.apply_gradients(zip([ops.array([1.0, 2.0]) * optimizer.initial_scale], [weight], strict=True))
    assert array(weight).tolist() == [0.0, 0.0]


def test_stateless_apply_before_build() -> None:
    with pytest.raises(ValueError, match="must be built"):
        LossScaleOptimizer(SGD(0.5)).stateless_apply([], [], [])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"foo": True, "bar": 3}, "arguments: `foo`, `bar`"),
        ({"dynamic": False}, "set `loss_scale_factor`"),
        ({"weight_decay": 0.5}, "on the `inner_optimizer`"),
        ({"global_clipnorm": 0.5}, "on the `inner_optimizer`"),
        ({"use_ema": True}, "on the `inner_optimizer`"),
        ({"gradient_accumulation_steps": 2}, "on the `inner_optimizer`"),
    ],
)
def test_arguments_that_keras_refuses(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaleOptimizer(SGD(0.5), **argument)


def test_defaults_that_keras_accepts() -> None:
    defaults: dict[str, Any] = {
        "dynamic": True,
        "weight_decay": None,
        "use_ema": False,
        "ema_momentum": 0.99,
        "clipvalue": None,
    }
    assert LossScaleOptimizer(SGD(0.5), **defaults).settings == LossScaleSettings(initial=32768.0)


def test_the_learning_rate_is_the_inner_optimizers() -> None:
    optimizer = LossScaleOptimizer(SGD(0.5))
    optimizer.learning_rate = 0.25
    assert float(array(optimizer.learning_rate)) == float(array(optimizer.inner_optimizer.learning_rate)) == 0.25


# ---- Settings ----


def test_settings_are_the_cores() -> None:
    given_settings: dict[str, Any] = {"floor": 0.5, "ceiling": 4096.0, "growth_factor": 4.0, "backoff_factor": 0.25}
    optimizer = LossScaleOptimizer(SGD(), 512, 7, hysteresis=3, growth_delay=2, **given_settings)
    expected = LossScaleSettings(initial=512, growth_interval=7, hysteresis=3, growth_delay=2, **given_settings)
    assert optimizer.settings == expected
    assert LossScaleOptimizer.of(SGD(), expected).settings == expected
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (512, 7)


@pytest.mark.parametrize("initial", [0.5, LOWEST_FLOOR, 3, np.float32(0.25), 2.0**24])
def test_any_scale_that_keras_accepts(initial: Any) -> None:
    optimizer = LossScaleOptimizer(SGD(), initial)
    assert (optimizer.settings.initial, optimizer.settings.floor) == (initial, min(initial, 1.0))


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_scale": 0.0},
        {"initial_scale": INF},
        {"initial_scale": NAN},
        {"initial_scale": 2.0**25},
        {"initial_scale": 2.0**-15},
        {"initial_scale": "high"},
        {"initial_scale": 2.0, "floor": 4.0},
        {"floor": 0.0},
        {"hysteresis": 0},
        {"dynamic_growth_steps": 0},
        {"dynamic_growth_steps": 2.5},
    ],
)
def test_settings_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="allowed"):
        LossScaleOptimizer(SGD(), **arguments)


@pytest.mark.parametrize("cls", [keras.optimizers.LossScaleOptimizer, LossScaleOptimizer])
def test_one_scale_in_another_is_refused_and_unwrapped_by_of(cls: Any) -> None:
    inner = SGD()
    with pytest.raises(UsageError, match="inner_optimizer"):
        LossScaleOptimizer(cls(inner))
    assert LossScaleOptimizer.of(cls(inner), FIXED).inner_optimizer is inner


def test_other_settings_are_in_force_from_the_next_step_on() -> None:
    loop = Loop(LossScaleOptimizer(SGD(), initial_scale=64.0))
    loop.step(1.0)
    loop.optimizer.use(LossScaleSettings(initial=16.0, backoff_factor=0.25))
    assert state_of(loop.optimizer)[0] == 64.0
    loop.step(INF)
    assert state_of(loop.optimizer)[0] == 16.0


def test_the_config_of_the_defaults_is_keras() -> None:
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=3.0, dynamic_growth_steps=2, name="test_opt")
    config = optimizer.get_config()
    assert {name: config[name] for name in config if name != "inner_optimizer"} == {
        "name": "test_opt",
        "initial_scale": 3.0,
        "dynamic_growth_steps": 2,
    }
    assert keras.optimizers.LossScaleOptimizer.from_config(dict(config)).initial_scale == 3.0


@pytest.mark.parametrize(
    "chosen",
    [
        FIXED,
        LossScaleSettings(initial=0.25, floor=0.25),
        LossScaleSettings(floor=2.0, hysteresis=2),
        LossScaleSettings(ceiling=2.0**20, growth_factor=1.5, backoff_factor=0.25, growth_interval=9, growth_delay=1),
    ],
)
def test_settings_survive_serialization(chosen: LossScaleSettings) -> None:
    optimizer = LossScaleOptimizer.of(Adam(0.5, global_clipnorm=2.0), chosen)
    config = keras.saving.serialize_keras_object(optimizer)
    twin = keras.saving.deserialize_keras_object(config)
    assert type(twin) is LossScaleOptimizer
    assert twin.settings == chosen
    assert twin.inner_optimizer.global_clipnorm == 2.0
    own = optimizer.get_config()
    LossScaleOptimizer.from_config(own)
    assert "inner_optimizer" in own


# ---- The scale ----

FLAGS = [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("stateless", STATELESS)
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (
            LossScaleSettings.torch(initial=1024.0, growth_interval=4),
            "512 512 256 256 128 128 128 128 256 256 128 64 64 64 64 128 128 128",
        ),
        (
            LossScaleSettings.deepspeed(initial=1024.0, growth_interval=4),
            "512 512 256 256 128 128 128 128 128 256 128 64 64 64 64 64 128 128",
        ),
        (
            LossScaleSettings.deepspeed(initial=1024.0, growth_interval=4, hysteresis=2),
            "1024 1024 512 512 256 256 256 256 256 512 512 256 256 256 256 256 512 512",
        ),
    ],
    ids=["torch", "deepspeed", "hysteresis 2"],
)
def test_known_traces(chosen: LossScaleSettings, expected: str, stateless: bool) -> None:
    loop, scales = Loop(LossScaleOptimizer.of(SGD(), chosen), stateless), []
    for flag in FLAGS:
        loop.step(INF if flag else 1.0)
        scales.append(int(state_of(loop.optimizer)[0]))
    assert scales == [int(word) for word in expected.split()]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.booleans(), max_size=25),
    st.builds(
        LossScaleSettings,
        initial=st.sampled_from([16.0, 64.0]),
        floor=st.sampled_from([LOWEST_FLOOR, 1.0, 8.0]),
        ceiling=st.sampled_from([64.0, 2.0**24]),
        growth_factor=st.sampled_from([1.5, 2.0, 4.0]),  # exact in float32 for as many steps as here
        backoff_factor=st.sampled_from([0.25, 0.5]),
        growth_interval=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
        growth_delay=st.integers(0, 2),
    ),
)
def test_the_same_state_as_the_cores_after_every_step(flags: list[bool], chosen: LossScaleSettings) -> None:
    loop, state, skips, row = Loop(LossScaleOptimizer.of(SGD(), chosen)), initial_state(chosen), 0, 0
    for flag in flags:
        loop.step(NAN if flag else 1.0)
        state = update(chosen, state, flag)
        skips, row = skips + flag, (row + 1) * flag
        scale = float(np.float32(state.scale))
        assert state_of(loop.optimizer) == (scale, state.growth_tracker, state.hysteresis_left)
        assert (int(array(loop.optimizer.skipped_steps)), int(array(loop.optimizer.skips_in_a_row))) == (skips, row)


def test_a_fixed_scale_of_one_never_moves() -> None:
    loop = Loop(LossScaleOptimizer.of(SGD(0.5), FIXED))
    for gradient in [1.0, INF, INF, 1.0]:
        loop.step(gradient)
    assert loop.optimizer.transparent
    assert state_of(loop.optimizer) == (1.0, 0, 1)
    assert int(array(loop.optimizer.skipped_steps)) == 2
    assert loop.values == [0.0, 1.0, 2.0, 3.0]


# ---- scale_loss ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("built", [False, True])
def test_a_loss_in_half_is_scaled_in_float32(dtype: str, built: bool) -> None:
    optimizer = LossScaleOptimizer(SGD(), initial_scale=2.0**20)
    if built:
        optimizer.build([keras.Variable([1.0])])
    scaled = optimizer.scale_loss(ops.ones((), dtype))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(array(scaled)) == 2.0**20


def gradient_of(loss: Callable[[Any], Any], at: list[float]) -> list[float]:
    point = np.array(at, "float32")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        weight = tf.Variable(point)
        with tf.GradientTape() as tape:
            value = loss(weight)
        return array(tape.gradient(value, weight)).tolist()
    if BACKEND == "jax":
        import jax

        return array(jax.jit(jax.grad(loss))(point)).tolist()
    import torch

    leaf = torch.tensor(point, requires_grad=True)
    loss(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


@pytest.mark.parametrize("chosen", [FIXED, LossScaleSettings(initial=8.0)])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(chosen: LossScaleSettings) -> None:
    optimizer = LossScaleOptimizer.of(SGD(), chosen)
    optimizer.build([keras.Variable([1.0])])
    for constant in (INF, -INF, NAN):
        assert np.isnan(gradient_of(lambda w, c=constant: optimizer.scale_loss(ops.sum(w) + c), [1.0, 2.0])).all()  # type: ignore[misc]
    assert gradient_of(lambda w: optimizer.scale_loss(ops.sum(w * w)), [1.0, 2.0]) == [
        2.0 * chosen.initial,
        4.0 * chosen.initial,
    ]


def test_the_scale_is_read_from_the_state_that_is_passed() -> None:
    optimizer = LossScaleOptimizer(SGD(), initial_scale=8.0)
    optimizer.build([keras.Variable([1.0])])
    values = [ops.array(4.0) if variable is optimizer.dynamic_scale else None for variable in optimizer.variables]
    mapping = [(v, x) for v, x in zip(optimizer.variables, values, strict=True) if x is not None]
    with keras.StatelessScope(state_mapping=mapping):
        assert optimizer.scale_loss(3.0) == 12.0


def test_a_loss_that_was_never_scaled_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    weight = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(SGD(), initial_scale=1024.0)
    with caplog.at_level(logging.WARNING, "halfwise"):
        for _ in range(3):
            optimizer.apply([ops.array([1.0])], [weight])
    (record,) = caplog.records
    assert "optimizer.scale_loss(loss)" in record.getMessage()
    assert "1024" in record.getMessage()


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras has no stateless_apply on TensorFlow")
def test_the_lines_for_a_stateless_loop(caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer = keras.Variable([1.0]), LossScaleOptimizer(SGD())
    optimizer.build([weight])
    with caplog.at_level(logging.WARNING, "halfwise"):
        optimizer.stateless_apply([v.value for v in optimizer.variables], [ops.array([1.0])], [weight.value])
    (record,) = caplog.records
    assert "keras.StatelessScope" in record.getMessage()


@pytest.mark.parametrize("scaled", [True, False])
def test_no_report_where_the_loss_is_scaled_or_need_not_be(scaled: bool, caplog: pytest.LogCaptureFixture) -> None:
    optimizer, weight = LossScaleOptimizer.of(SGD(), LossScaleSettings() if scaled else FIXED), keras.Variable([1.0])
    with caplog.at_level(logging.WARNING, "halfwise"):
        if scaled:
            optimizer.scale_loss(1.0)  # once, as compiled code does that is traced once; the steps are not compiled
        for _ in range(3):
            optimizer.apply([ops.array([1.0])], [weight])
    assert not caplog.records


# ---- Gradients ----


def test_the_norm_is_over_all_gradients_unscaled_in_float32() -> None:
    optimizer = LossScaleOptimizer(SGD(0.0), initial_scale=512.0)
    values = [np.linspace(-3.0, 5.0, 12).reshape(3, 4), np.array([0.125, 0.5]), np.array(7.0)]
    weights = [keras.Variable(np.zeros(np.shape(v), "float32")) for v in values]
    half = keras.Variable(np.zeros(100, "float32"), dtype="float16")
    grads = [ops.array((v * 512.0).astype("float32")) for v in values]
    grads.append(ops.cast(ops.ones(100) * 60000.0, "float16"))  # its square does not fit into float16
    optimizer.scale_loss(1.0)
    optimizer.apply(grads, [*weights, half])
    expected = np.sqrt(sum(float((v.astype("float32") ** 2).sum()) for v in values) + 100 * (60000.0 / 512.0) ** 2)
    assert float(array(optimizer.gradient_norm)) == pytest.approx(expected, rel=1e-3)  # 60000 is 59999 in float16
    assert int(array(optimizer.skipped_steps)) == 0


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_that_is_missing() -> None:
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0)
    weights = [keras.Variable([1.0]), keras.Variable([5.0])]
    optimizer.scale_loss(1.0)
    optimizer.apply([ops.array([2.0]), None], weights)
    assert [array(w).item() for w in weights] == [0.0, 5.0]
    assert float(array(optimizer.gradient_norm)) == 1.0


@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no sparse tensors on torch")
@pytest.mark.parametrize("chosen", [FIXED, LossScaleSettings(initial=8.0)])
def test_sparse_gradients(chosen: LossScaleSettings) -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0]], "float32") * np.float32(chosen.initial)

    def sparse(rows: Any) -> Any:
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return tf.IndexedSlices(tf.constant(rows), tf.constant([0, 2]), tf.constant([3, 2]))
        from jax.experimental.sparse import BCOO

        return BCOO((ops.array(rows), ops.array([[0], [2]])), shape=(3, 2))

    optimizer, weight = LossScaleOptimizer.of(SGD(1.0), chosen), keras.Variable(np.zeros((3, 2), "float32"))
    optimizer.scale_loss(1.0)
    optimizer.apply([sparse(rows)], [weight])
    assert array(weight).tolist() == [[-1.0, -2.0], [0.0, 0.0], [-3.0, -4.0]]
    assert float(array(optimizer.gradient_norm)) == pytest.approx(30.0**0.5)
    optimizer.apply([sparse(rows * np.float32(INF))], [weight])
    assert array(weight).tolist() == [[-1.0, -2.0], [0.0, 0.0], [-3.0, -4.0]]


INNER = {
    "sgd momentum": lambda: SGD(0.1, momentum=0.9, weight_decay=0.01),
    "adam global_clipnorm": lambda: Adam(0.1, global_clipnorm=0.5),
    "adam clipnorm": lambda: Adam(0.1, clipnorm=0.5),
    "adamw ema": lambda: keras.optimizers.AdamW(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: Adam(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
@pytest.mark.parametrize("stateless", STATELESS)
@pytest.mark.parametrize("chosen", [FIXED, LossScaleSettings(initial=2.0**10)], ids=["fixed", "scaled"])
def test_the_inner_optimizer_sees_what_it_would_see_alone(
    inner: Callable[[], Any], chosen: LossScaleSettings, stateless: bool
) -> None:
    alone, ours = Loop(inner(), stateless), Loop(LossScaleOptimizer.of(inner(), chosen), stateless)
    generator = np.random.default_rng(0)
    for _ in range(5):
        gradient = generator.normal(size=4).astype("float32")
        alone.step(gradient)
        ours.step(gradient * np.float32(chosen.initial))
        before = ours.values, everything(ours.optimizer.inner_optimizer)
        ours.step(INF)
        assert (ours.values, everything(ours.optimizer.inner_optimizer)) == before
        ours.optimizer.dynamic_scale.assign(chosen.initial)
    assert ours.values == alone.values
    assert everything(ours.optimizer.inner_optimizer) == everything(alone.optimizer)
    assert ours.values != [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("stateless", STATELESS if BACKEND != "jax" else [True])
def test_bit_for_bit_what_keras_own_does(stateless: bool) -> None:
    loops = [
        Loop(cls(Adam(0.1), dynamic_growth_steps=3), stateless)
        for cls in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer)
    ]
    generator = np.random.default_rng(1)
    for number in range(12):
        gradient = generator.normal(size=4).astype("float32") * 2.0**15
        for loop in loops:
            loop.step(gradient * (INF if number in (4, 5, 9) else 1.0))
    assert loops[0].values == loops[1].values
    assert everything(loops[0].optimizer.inner_optimizer) == everything(loops[1].optimizer.inner_optimizer)
    assert array(loops[0].optimizer.dynamic_scale) == array(loops[1].optimizer.dynamic_scale)


def test_a_bad_part_of_an_accumulated_step_is_left_out() -> None:
    def inner() -> Any:
        return SGD(1.0, gradient_accumulation_steps=2)

    with_bad, without = Loop(LossScaleOptimizer(inner(), 8.0)), Loop(LossScaleOptimizer(inner(), 8.0))
    for gradient in [8.0, INF, 24.0]:
        with_bad.step(gradient if gradient == 8.0 else gradient / 2)  # the scale is 4 after the bad one
    for gradient in [8.0, 24.0]:
        without.step(gradient)
    assert without.values == [-1.0, 0.0, 1.0, 2.0]
    assert with_bad.values == without.values


class Naive(keras.optimizers.Optimizer):
    """An optimizer like users write them: `build` always starts anew; `step_counter` is a name that we use too."""

    def __init__(self) -> None:
        super().__init__(learning_rate=1.0)
        self.step_counter = "mine"

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign_sub(variable, total)


@pytest.mark.parametrize("inner", [lambda: Adam(0.1), Naive])
def test_a_built_optimizer_keeps_its_iterations_and_moments(inner: Callable[[], Any]) -> None:
    loop, alone = Loop(inner()), Loop(inner())
    for _ in range(3):
        loop.step(1.0)
        alone.step(1.0)
    loop.optimizer = LossScaleOptimizer(loop.optimizer, initial_scale=4.0)
    loop.optimizer.scale_loss(1.0)
    loop.step(4.0)
    alone.step(1.0)
    assert int(array(loop.optimizer.iterations)) == 4
    assert loop.values == alone.values
    assert everything(loop.optimizer.inner_optimizer) == everything(alone.optimizer)


def test_names_of_the_inner_optimizer() -> None:
    inner = Adam(0.1, beta_1=0.25)
    optimizer = LossScaleOptimizer(inner)
    assert optimizer.beta_1 == 0.25
    optimizer.beta_1 = 0.75
    assert inner.beta_1 == 0.75
    assert "beta_1" not in optimizer.__dict__
    with pytest.raises(AttributeError, match="beta_3"):
        _ = optimizer.beta_3
    naive = LossScaleOptimizer(Naive())
    naive.build([keras.Variable([1.0])])
    assert naive.inner_optimizer.step_counter == "mine"
    assert int(array(naive.step_counter)) == 0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.function")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_custom_loop_in_a_tf_function(jit_compile: bool, caplog: pytest.LogCaptureFixture) -> None:
    import tensorflow as tf

    optimizer, weight = LossScaleOptimizer(SGD(0.25), initial_scale=8.0), keras.Variable([1.0, 2.0])
    optimizer.build([weight])

    @tf.function(jit_compile=jit_compile)  # AutoGraph rewrites what it calls
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * weight.value) * factor)
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])

    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    try:
        for factor in (1.0, INF, 1.0):
            step(tf.constant(factor))
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
    assert array(weight).tolist() == [0.25, 0.5]
    assert state_of(optimizer) == (4.0, 1, 1)


# ---- fit, save and load ----


def model_with(optimizer: Any, jit_compile: bool = BACKEND == "jax", policy: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, activation="tanh", dtype=policy), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    return model


DATA = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
X, Y = DATA, DATA.sum(axis=1, keepdims=True)


def trained(model: keras.Model, bad: bool = False, epochs: int = 3) -> list[float]:
    x = X.copy()
    if bad:
        x[0, 0] = INF
    return model.fit(x, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]


COMPILES = BACKEND != "torch"  # half a minute there


@pytest.mark.parametrize(
    ("policy", "jit_compile"),
    [("mixed_float16", False), ("mixed_float16", COMPILES), ("mixed_bfloat16", COMPILES)],
)
def test_fit(policy: str, jit_compile: bool) -> None:
    model = model_with(LossScaleOptimizer(SGD(0.1), initial_scale=1024.0), jit_compile, policy)
    losses = trained(model)
    assert losses[-1] < losses[0] / 2
    assert int(array(model.optimizer.iterations)) == 6
    trained(model, bad=True, epochs=1)  # the first of two batches
    assert (int(array(model.optimizer.iterations)), int(array(model.optimizer.skipped_steps))) == (7, 1)
    assert state_of(model.optimizer)[0] == 512.0
    assert all(np.isfinite(array(weight)).all() for weight in model.weights)


@pytest.mark.parametrize(
    ("chosen", "jit_compile"), [(FIXED, COMPILES), (FIXED, False), (LossScaleSettings(), COMPILES)]
)
def test_fit_ends_in_the_weights_of_the_inner_optimizer_alone(chosen: LossScaleSettings, jit_compile: bool) -> None:
    alone, ours = model_with(Adam(0.1), jit_compile), model_with(LossScaleOptimizer.of(Adam(0.1), chosen), jit_compile)
    assert trained(ours) == pytest.approx(trained(alone), rel=1e-6)
    for weight, expected in zip(ours.weights, alone.weights, strict=True):
        np.testing.assert_allclose(array(weight), array(expected), rtol=1e-5)  # compilers fuse differently


def test_a_trained_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model = model_with(LossScaleOptimizer(Adam(0.1), 1024.0, 4, hysteresis=2, growth_delay=1))
    for bad in (False, True, True):
        trained(model, bad)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.settings == model.optimizer.settings
    assert everything(loaded.optimizer) == everything(model.optimizer)
    assert int(array(loaded.optimizer.skipped_steps)) == 6
    assert state_of(loaded.optimizer) != (1024.0, -1, 2)
    trained(loaded)
    trained(model)
    assert [array(w).tolist() for w in loaded.weights] == [array(w).tolist() for w in model.weights]


def test_under_a_fixed_scale_the_file_is_that_of_the_inner_optimizer(tmp_path: Path) -> None:
    model = model_with(LossScaleOptimizer.of(Adam(0.1), FIXED))
    trained(model)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = model_with(Adam(0.1))
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "model.weights.h5")
    assert everything(plain.optimizer) == everything(model.optimizer.inner_optimizer)
    assert int(array(plain.optimizer.iterations)) == 6


@pytest.mark.parametrize("chosen", [FIXED, LossScaleSettings()], ids=["fixed", "scaled"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "keras"])
def test_states_of_keras_own_optimizers_are_loaded(wrapped: bool, chosen: LossScaleSettings, tmp_path: Path) -> None:
    saved = model_with(keras.optimizers.LossScaleOptimizer(Adam(0.1), 2.0**30) if wrapped else Adam(0.1))
    trained(saved)
    saved.save_weights(tmp_path / "model.weights.h5")
    model = model_with(LossScaleOptimizer.of(Adam(0.1), chosen))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "model.weights.h5")
    inner = saved.optimizer.inner_optimizer if wrapped else saved.optimizer
    assert everything(model.optimizer.inner_optimizer) == everything(inner)
    assert state_of(model.optimizer) == (chosen.ceiling if wrapped else chosen.initial, 6 if wrapped else 0, 1)
