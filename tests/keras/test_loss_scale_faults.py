"""What goes wrong with Keras' own loss-scale optimizer, and not with ours: each fault is shown with both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from halfwise.core.loss_scale import CEILING, LossScaleSettings
from halfwise.keras.loss_scale import LossScaleOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

BACKEND = keras.config.backend()
KERAS_OWN = keras.optimizers.LossScaleOptimizer
INF = float("inf")
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


class Training:
    """Steps with given gradients, compiled as Keras' trainers do it; on jax stateless, as Keras' own must be there."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.weight = optimizer, keras.Variable(np.array([1.0, 2.0], "float32"))
        optimizer.scale_loss(1.0)
        optimizer.build([self.weight])
        self._apply = self._compiled()

    def step(self, gradient: Any, times: int = 1) -> Training:
        for _ in range(times):
            self._apply(ops.array(np.broadcast_to(np.float32(gradient), (2,))))
        return self

    def _compiled(self) -> Callable[[Any], None]:
        if BACKEND == "jax":
            import jax

            function = jax.jit(self.optimizer.stateless_apply)

            def apply(gradient: Any) -> None:
                variables = [self.weight, *self.optimizer.variables]
                trained, state = function([v.value for v in variables[1:]], [gradient], [self.weight.value])
                for variable, value in zip(variables, trained + state, strict=True):
                    variable.assign(value)

            return apply

        def eager(gradient: Any) -> None:
            self.optimizer.apply([gradient], [self.weight])

        if BACKEND == "tensorflow":
            import tensorflow as tf

            return tf.function(eager)
        return eager

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.values).all())

    @property
    def values(self) -> list[float]:
        return np.asarray(ops.convert_to_numpy(self.weight)).tolist()

    @property
    def scale(self) -> float:
        return float(ops.convert_to_numpy(self.optimizer.dynamic_scale))

    def moves(self, gradient: float) -> bool:
        """True where good gradients, of this size before they are scaled, still change the weights."""
        before = self.values
        for _ in range(3):
            self.step(gradient * self.scale)
        return self.finite and self.values != before


@pytest.mark.parametrize("inner", [lambda: SGD(0.1), lambda: Adam(0.1)], ids=["sgd", "adam"])
def test_two_hundred_bad_steps_in_a_row(inner: Callable[[], Any]) -> None:
    theirs = Training(KERAS_OWN(inner())).step(INF, times=200)
    assert theirs.scale == 0.0
    assert not theirs.step(1.0).finite
    ours = Training(LossScaleOptimizer(inner())).step(INF, times=200)
    assert (ours.scale, ours.values) == (1.0, [1.0, 2.0])
    assert ours.moves(1.0)
    assert int(ops.convert_to_numpy(ours.optimizer.skipped_steps)) == 200


def test_a_scale_that_grows_for_ever() -> None:
    theirs = Training(KERAS_OWN(SGD(0.1), dynamic_growth_steps=1)).step(1.0, times=130)
    assert theirs.scale == INF
    assert theirs.step(INF).scale == INF  # half of infinity
    stuck = theirs.values
    assert theirs.step(1.0, times=5).values == stuck
    ours = Training(LossScaleOptimizer(SGD(0.1), dynamic_growth_steps=1)).step(1.0, times=130)
    assert ours.scale == CEILING
    assert ours.step(INF).scale == CEILING / 2
    assert ours.moves(1.0)


@pytest.mark.parametrize(
    "chosen",
    [LossScaleSettings(initial=1.0, ceiling=1.0), LossScaleSettings(initial=1.0), LossScaleSettings(initial=32768.0)],
    ids=["fixed", "1", "32768"],
)
def test_a_gradient_too_large_to_be_squared(chosen: LossScaleSettings) -> None:
    theirs = Training(KERAS_OWN(Adam(0.1), chosen.initial)).step(1e30 * chosen.initial)
    assert not theirs.moves(1.0)  # the second moment is infinite for good
    ours = Training(LossScaleOptimizer.of(Adam(0.1), chosen)).step(1e30 * chosen.initial)
    assert ours.values == [1.0, 2.0]
    assert ours.moves(1.0)


def test_only_the_unscaled_gradient_must_have_a_square() -> None:
    ours = Training(LossScaleOptimizer(SGD(1e-16), 2.0**24)).step(1e16 * 2.0**24)
    assert ours.values == pytest.approx([0.0, 1.0], abs=1e-6)


def test_a_norm_that_overflows_where_gradients_are_clipped() -> None:
    theirs = Training(KERAS_OWN(SGD(0.1, global_clipnorm=1.0), 1.0)).step(1e25)
    assert not theirs.finite
    ours = Training(LossScaleOptimizer(SGD(0.1, global_clipnorm=1.0), 1.0)).step(1e25)
    assert ours.values == [1.0, 2.0]
    assert ours.moves(1.0)


@pytest.mark.parametrize("cls", [KERAS_OWN, LossScaleOptimizer])
def test_an_infinite_loss_with_finite_gradients(cls: Any) -> None:
    class Offset(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return ops.mean(y_pred, axis=-1) + INF

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=cls(SGD(0.1)), loss=Offset())
    before = [np.asarray(ops.convert_to_numpy(weight)).tolist() for weight in model.weights]
    model.fit(np.ones((2, 2)), np.ones((2, 1)), batch_size=2, verbose=0)
    after = [np.asarray(ops.convert_to_numpy(weight)).tolist() for weight in model.weights]
    assert (after == before) is (cls is LossScaleOptimizer)


@pytest.mark.parametrize("cls", [KERAS_OWN, LossScaleOptimizer])
def test_a_custom_optimizer_that_is_wrapped_while_it_trains(cls: Any) -> None:
    class Sums(keras.optimizers.Optimizer):
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.sums = self.add_optimizer_variables(variables, "sum")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign_add(self.sums[self._get_variable_index(variable)], gradient)

    inner = Sums(learning_rate=1.0)
    training = Training(inner).step(1.0)
    sums, training.optimizer = inner.sums[0], cls(inner, 1.0)
    training.optimizer.build([training.weight])
    assert (inner.sums[0] is sums) is (cls is LossScaleOptimizer)


@pytest.mark.skipif(BACKEND != "torch", reason="only torch divides a half tensor by a float32 scalar in half")
@pytest.mark.parametrize("cls", [KERAS_OWN, LossScaleOptimizer])
def test_a_gradient_in_half_is_divided_in_float32(cls: Any) -> None:
    class Kept(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            self.kept = [float(g[0]) for g in grads]

    optimizer, weight = cls(Kept(), 2.0**15), keras.Variable([1.0], dtype="float16")
    optimizer.scale_loss(1.0)
    optimizer.apply([ops.cast(ops.array([2.0**-10]), "float16")], [weight])
    assert optimizer.inner_optimizer.kept == [2.0**-25 if cls is LossScaleOptimizer else 0.0]


MIRRORED = """
import sys
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
from halfwise.keras.loss_scale import LossScaleOptimizer

cls = keras.optimizers.LossScaleOptimizer if sys.argv[1] == "keras" else LossScaleOptimizer
words = sys.argv[2] == "words"
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    keras.utils.set_random_seed(0)
    first = [keras.layers.Embedding(5, 3), keras.layers.Flatten()] if words else [keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *first, keras.layers.Dense(1)])
    model.compile(optimizer=cls(keras.optimizers.Adam(0.1), 1024.0), loss="mse", jit_compile=False)
x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
bad = y.copy()
bad[7] = np.inf  # the second replica has the second half
before = [w.numpy() for w in model.weights]
model.fit(x, bad, batch_size=8, verbose=0, shuffle=False)
if cls is LossScaleOptimizer:
    optimizer = model.optimizer
    assert all(np.array_equal(a, w.numpy()) for a, w in zip(before, model.weights))
    assert (int(optimizer.iterations.numpy()), float(optimizer.dynamic_scale.numpy())) == (0, 512.0)
    assert [int(v.numpy()) for v in (optimizer.skipped_steps, optimizer.skips_in_a_row)] == [1, 1]
    alone = keras.Sequential.from_config(model.get_config())
    alone.compile(optimizer=cls(keras.optimizers.Adam(0.1), 512.0), loss="mse", jit_compile=False)
    alone.set_weights(model.get_weights())
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    alone.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    norm, bound = (float(m.optimizer.gradient_norm.numpy()) for m in (alone, model))
    assert norm <= bound * (1 + 1e-6) <= 2 * norm, (norm, bound)
    assert int(optimizer.skips_in_a_row.numpy()) == 0
print("finite" if all(np.isfinite(w.numpy()).all() for w in model.weights) else "not finite")
"""


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.distribute")
@pytest.mark.parametrize(
    ("whose", "kind", "expected"),
    [("keras", "numbers", "not finite"), ("ours", "numbers", "finite"), ("ours", "words", "finite")],
)
def test_a_bad_row_in_the_second_replica(whose: str, kind: str, expected: str) -> None:
    command = [sys.executable, "-c", MIRRORED, whose, kind]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == expected
