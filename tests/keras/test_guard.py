"""`PrecisionGuard` in `fit`: skipped steps leave no trace, and everything else of `fit` goes on working."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import Array, batch, classifier

from halfwise.core.plan import Plan
from halfwise.core.timing import TimingTable
from halfwise.errors import PlanError, PolicyError, TrainingStopped, UsageError
from halfwise.keras.apply import applied_plan, apply
from halfwise.keras.guard import PrecisionGuard
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.policy import set_global_policy, undecided_layers

BACKEND = keras.backend.backend()
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "accumulation": {"gradient_accumulation_steps": 2},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
}


def bad_batch(rows: int = 128, at: slice = slice(32, 40)) -> tuple[Array, Array]:
    """Batches of 32 of which the second holds infinities."""
    x, y = batch(rows)
    x[at, 0] = np.inf
    return x, y


def snapshot(model: keras.Model) -> list[Array]:
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [np.array(v) for v in (*model.get_weights(), *(keras.ops.convert_to_numpy(v) for v in inner.variables))]


def same(first: list[Array], second: list[Array]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def fit(model: keras.Model, x: Any, y: Any = None, *, guard: PrecisionGuard | None = None, **options: Any) -> Any:
    callbacks = [*options.pop("callbacks", []), *([guard] if guard is not None else [])]
    options = {"shuffle": False, **({"batch_size": 32} if isinstance(x, np.ndarray) else {}), **options}
    return model.fit(x, y, callbacks=callbacks, verbose=0, **options)


def quiet(policy: Any = None, **options: Any) -> PrecisionGuard:
    return PrecisionGuard(policy, log=lambda _: None, **options)


# What a guard leaves as it is


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_healthy_training_is_plain_keras_to_the_last_bit(policy: str, jit: bool) -> None:
    if jit and BACKEND == "torch":
        pytest.skip("jit_compile=True is torch.compile there, tested below")
    x, y = batch(128)
    keras.config.set_dtype_policy(policy)
    results = []
    for guarded in (False, True):
        keras.utils.set_random_seed(1)
        model = classifier(jit_compile=jit)
        history = fit(model, x, y, guard=quiet() if guarded else None, epochs=2)
        results.append((history.history, snapshot(model)))
    (plain, weights), (logs, guarded_weights) = results
    assert {name: logs[name] for name in plain} == plain
    assert logs["skipped_steps"] == [0, 0]
    assert logs["loss_scale"] == [1.0, 1.0]
    if jit:  # XLA fuses what the guard adds with the rest, and rounds differently
        for mine, theirs in zip(guarded_weights, weights, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    else:
        assert same(guarded_weights, weights) or _close(guarded_weights, weights)


def _close(first: list[Array], second: list[Array]) -> bool:
    return BACKEND == "jax" and all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(first, second, strict=True))


def test_float16_is_keras_own_mixed_float16_to_the_last_bit() -> None:
    x, y = batch(128)
    keras.config.set_dtype_policy("mixed_float16")
    results = []
    for guarded in (False, True):
        keras.utils.set_random_seed(1)
        model = classifier(head=None, optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), 128.0))
        history = fit(model, x, y, guard=quiet() if guarded else None, epochs=2)
        results.append((history.history["loss"], snapshot(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    for mine, theirs in zip(results[1][1], results[0][1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-4)
    if BACKEND != "jax":
        assert same(results[0][1], results[1][1])


def test_the_model_is_given_back() -> None:
    model = classifier()
    optimizer, x, y = model.optimizer, *batch()
    fit(model, x, y, guard=quiet())
    assert model.optimizer is optimizer
    assert "train_step" not in model.__dict__
    before = model.get_weights()
    fit(model, x, y)  # without a guard
    assert not same(before, model.get_weights())


# Bad steps


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bad_batch_leaves_no_trace_and_good_ones_are_applied(policy: str, jit: bool) -> None:
    """As if the batch had not been there: the training on the other batches alone gives the same model."""
    if jit and BACKEND == "torch":
        pytest.skip("jit_compile=True is torch.compile there, tested below")
    x, y = bad_batch()
    good = np.r_[0:32, 64:128]
    keras.config.set_dtype_policy(policy)
    models, guards = [], []
    for chosen in (slice(None), good):
        keras.utils.set_random_seed(1)
        model, guard = classifier(head=None, jit_compile=jit), quiet(guard=False)
        if policy == "mixed_float16":
            model.compile(optimizer=LossScaleOptimizer(keras.optimizers.Adam(), 64.0), loss=model.loss, jit_compile=jit)
        history = fit(model, x[chosen], y[chosen], guard=guard)
        models.append(model)
        guards.append(guard)
    assert [guard.skipped_steps for guard in guards] == [1, 0]
    assert math.isfinite(history.history["loss"][-1])
    for mine, theirs in zip(snapshot(models[0]), snapshot(models[1]), strict=True):
        if policy == "mixed_float16":  # the scale is half as large afterwards
            np.testing.assert_allclose(mine, theirs, rtol=5e-2, atol=1e-3)
        else:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_plain_keras_does_not_survive_it(policy: str) -> None:
    x, y = bad_batch()
    keras.config.set_dtype_policy(policy)
    model = classifier(head=None)
    fit(model, x, y)
    assert not all(np.isfinite(w).all() for w in model.get_weights())  # batch-norm statistics, under every policy


def test_metrics_of_the_epoch_are_those_of_the_good_batches() -> None:
    x, y = bad_batch()
    history = fit(classifier(), x, y, guard=quiet(guard=False), epochs=2)
    assert np.isfinite(history.history["loss"]).all()
    assert history.history["skipped_steps"] == [1, 2]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_options_of_optimizers(name: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    x, y = bad_batch(256)
    model = classifier(head=None, optimizer=keras.optimizers.SGD(0.05, **OPTIMIZERS[name]))
    before = model.get_weights()
    guard = quiet(guard=False)
    fit(model, x, y, guard=guard, epochs=2)
    assert guard.skipped_steps >= 2
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert not same(before, model.get_weights())
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert all(np.isfinite(keras.ops.convert_to_numpy(v)).all() for v in optimizer.variables)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras refuses steps_per_execution > 1 on torch")
@pytest.mark.parametrize("steps", [2, 3])
def test_steps_per_execution_drops_no_batch(steps: int) -> None:
    x, y = bad_batch(32 * 7)
    results = []
    for k in (1, steps):
        keras.utils.set_random_seed(1)
        model, guard = classifier(steps_per_execution=k), quiet(guard=False)
        fit(model, x, y, guard=guard, epochs=2)
        assert (guard.steps, guard.skipped_steps) == (14, 2)
        results.append(model.get_weights())
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere jit_compile is tested above")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_compile() -> None:
    x, y = bad_batch()
    model, guard = classifier(jit_compile=True), quiet(guard=False)
    fit(model, x, y, guard=guard)
    assert (guard.steps, guard.skipped_steps) == (4, 1)
    assert all(np.isfinite(w).all() for w in model.get_weights())


# What `fit` can be given


def data_set(x: Array, y: Array, kind: str) -> Any:
    if kind == "generator":

        def batches() -> Iterator[tuple[Array, Array]]:
            while True:
                for start in range(0, len(x), 32):
                    yield x[start : start + 32], y[start : start + 32]

        return batches()
    if kind == "sequence":

        class Rows(keras.utils.PyDataset):
            def __len__(self) -> int:
                return len(x) // 32

            def __getitem__(self, index: int) -> tuple[Array, Array]:
                return x[32 * index : 32 * index + 32], y[32 * index : 32 * index + 32]

        return Rows()
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    return rows.filter(lambda *_: True) if kind == "unknown length" else rows


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of every set of unknown length
@pytest.mark.parametrize("kind", ["generator", "sequence", "tf.data", "unknown length"])
def test_data_sets(kind: str) -> None:
    x, y = bad_batch()
    model, guard = classifier(), quiet(guard=False)
    steps = {"steps_per_epoch": 4} if kind == "generator" else {}
    history = fit(model, data_set(x, y, kind), guard=guard, epochs=2, **steps)
    assert (guard.steps, guard.skipped_steps) == (8, 2)
    assert np.isfinite(history.history["loss"]).all()


def test_weights_of_samples_and_classes_and_validation() -> None:
    x, y = bad_batch()
    weights = np.linspace(0.5, 1.5, len(y)).astype("float32")
    for options in (
        {"sample_weight": weights},
        {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}},
        {"validation_data": batch(64, seed=1)},
    ):
        model, guard = classifier(), quiet(guard=False)
        history = fit(model, x, y, guard=guard, **options)
        assert (guard.steps, guard.skipped_steps) == (4, 1)
        assert all(math.isfinite(values[-1]) for values in history.history.values())


def test_callbacks_of_keras(tmp_path: Any) -> None:
    x, y = bad_batch()
    model, guard = classifier(), quiet(guard=False)
    callbacks = [
        keras.callbacks.EarlyStopping(monitor="loss", patience=5, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=10.0),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = fit(model, x, y, guard=guard, epochs=3, callbacks=callbacks, validation_data=batch(64, seed=1))
    assert len(history.history["loss"]) == 3  # nothing saw a NaN
    assert history.history["learning_rate"][-1] < 1e-3
    assert (tmp_path / "3.keras").is_file()
    assert "skipped_steps" in (tmp_path / "log.csv").read_text()


def test_train_on_batch() -> None:
    x, y = bad_batch(64)
    model = classifier()
    with quiet(guard=False).attached(model) as guard:
        model.train_on_batch(x[:32], y[:32])
        before = snapshot(model)
        logs = model.train_on_batch(x[32:], y[32:], return_dict=True)
        assert logs["skipped_steps"] == 1
        assert same(before, snapshot(model))
        model.train_on_batch(x[:32], y[:32])
    assert not same(before, snapshot(model))
    assert (guard.steps, guard.skipped_steps) == (3, 1)


def test_stopping_in_train_on_batch_keeps_the_weights() -> None:
    x, y = batch(32)
    model = classifier()

    def train() -> None:
        for _ in range(4):
            model.train_on_batch(np.full_like(x, np.nan), y)

    with quiet().attached(model), pytest.raises(TrainingStopped):
        train()
    assert all(np.isfinite(w).all() for w in model.get_weights())
    model.train_on_batch(x, y)


class OwnStepModel(keras.Sequential):
    """A model with a `train_step` of its own, as Keras' guides write it."""

    def train_step(self, *arguments: Any) -> Any:
        if BACKEND == "jax":
            logs, state = super().train_step(*arguments)
            return {**logs, "twice": 2.0 * logs["loss"]}, state
        logs = super().train_step(*arguments)
        return {**logs, "twice": 2.0 * logs["loss"]}


def test_a_train_step_of_the_users_own() -> None:
    x, y = bad_batch()
    model, guard = OwnStepModel([keras.Input((8,)), keras.layers.Dense(4)]), quiet(guard=False)
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = fit(model, x, y, guard=guard, epochs=2)
    assert (guard.steps, guard.skipped_steps) == (8, 2)
    assert "twice" in history.history
    assert all(np.isfinite(w).all() for w in model.get_weights())


class OwnTrainFunctionModel(keras.Sequential):
    """Makes its train function itself, and counts what that is asked for."""

    executions = 0
    train_function: Any

    def make_train_function(self, force: bool = False) -> Any:
        super().make_train_function(force=force)
        inner: Any = self.train_function

        def counted(*args: Any) -> Any:
            OwnTrainFunctionModel.executions += 1
            return inner(*args)

        self.train_function = counted
        return counted


def test_a_train_function_of_the_users_own_is_called_for_each_step() -> None:
    model = OwnTrainFunctionModel([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = batch(96)
    OwnTrainFunctionModel.executions = 0
    guard = quiet()
    fit(model, x, y, guard=guard, batch_size=32)
    assert (OwnTrainFunctionModel.executions, guard.steps) == (3, 3)


class TwoOptimizers(keras.Sequential):
    """As a GAN: the step goes through an optimizer of its own."""

    optimizer: Any

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.other = keras.optimizers.SGD(0.1)
        self.other.build(self.trainable_variables)

    def train_step(self, *arguments: Any) -> Any:
        main, self.optimizer = self.optimizer, self.other
        try:
            if BACKEND != "jax":
                return super().train_step(*arguments)
            (weights, kept, slots, metrics), data = arguments
            mine = [variable.value for variable in self.other.variables]
            logs, (weights, kept, _, metrics) = super().train_step((weights, kept, mine, metrics), data)
            return logs, (weights, kept, slots, metrics)
        finally:
            self.optimizer = main


def test_a_step_that_goes_round_the_optimizer_is_refused() -> None:
    model = TwoOptimizers([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(UsageError, match="does not go through its optimizer"):
        fit(model, *batch(), guard=quiet())


def test_frozen_layers_and_transfer() -> None:
    x, y = bad_batch()
    model, guard = classifier(), quiet(guard=False)
    model.get_layer("first").trainable = False
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    frozen = model.get_layer("first").get_weights()
    fit(model, x, y, guard=guard)
    assert guard.skipped_steps == 1
    assert same(frozen, model.get_layer("first").get_weights())


# Policies and plans


@pytest.mark.parametrize("way", ["global", "argument", "apply", "plan", "by layer", "map"])
def test_the_ways_to_say_what_precision(way: str) -> None:
    plan = Plan.manual({"head": "float32"}, default="float16", framework="keras")
    policy: Any = None
    if way == "global":
        set_global_policy(plan)
    elif way == "map":
        keras.config.set_dtype_policy(
            keras.dtype_policies.DTypePolicyMap(
                keras.DTypePolicy("mixed_float16"), {"(.*/)?head": keras.DTypePolicy("float32")}
            )
        )
    model = classifier()
    if way == "apply":
        apply(model, plan)
    elif way == "by layer":
        for name in ("first", "norm", "dropout"):
            model.get_layer(name).dtype_policy = "mixed_float16"
    elif way == "argument" or way == "plan":
        policy = plan
    x, y = batch(128)
    guard = quiet(policy)
    fit(model, x, y, guard=guard)
    assert isinstance(model.optimizer, LossScaleOptimizer)  # where Keras itself scales only under the plain policy
    assert guard.plan is not None
    assert [guard.plan.compute(name) for name in ("first", "norm", "dropout", "head")] == ["float16"] * 3 + ["float32"]
    assert [layer.compute_dtype for layer in model.layers] == ["float16"] * 3 + ["float32"]
    assert guard.loss_scale > 1.0


def test_auto_lowers_what_the_timing_table_speaks_for_and_keeps_the_head() -> None:
    set_global_policy("auto")
    model = classifier()
    table = TimingTable.uniform(["first", "norm", "head"], relative={"bfloat16": 0.5})
    guard = quiet(timing=table)
    x, y = batch(32 * 6)
    fit(model, x, y, guard=guard)
    assert guard.plan is not None
    assert not undecided_layers(model)
    assert guard.profile is not None
    assert guard.timing is table
    assert {rule.path: rule.compute for rule in guard.plan.layers} == {
        "first": "bfloat16",
        "norm": "bfloat16",
        "head": "float32",
    }
    assert guard.plan.match("head").reason == "hazard"  # type: ignore[union-attr]
    assert model.get_layer("first").compute_dtype == "bfloat16"
    assert applied_plan(model) == guard.plan
    second = quiet()
    fit(model, x, y, guard=second)  # goes on under the same plan
    assert second.plan == guard.plan


def test_auto_with_too_few_steps_is_decided_next_time() -> None:
    set_global_policy("auto")
    model = classifier()
    table = TimingTable.uniform(["first", "head"], relative={"bfloat16": 0.5})
    guard = quiet(timing=table)
    x, y = batch(64)
    fit(model, x, y, guard=guard)
    assert _computes(guard, "first") is None
    assert undecided_layers(model)
    fit(model, x, y, guard=guard, epochs=2)
    assert _computes(guard, "first") == "bfloat16"
    assert guard.steps == 6


def _computes(guard: PrecisionGuard, path: str) -> str | None:
    return None if guard.plan is None else guard.plan.compute(path)


def test_auto_respects_a_precision_set_by_hand() -> None:
    set_global_policy("auto")
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, dtype="float32", name="mine"), keras.layers.Dense(4, name="head")]
    )
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    guard = quiet(timing=TimingTable.uniform(["mine", "head"], relative={"bfloat16": 0.5}))
    fit(model, *batch(128), guard=guard)
    assert guard.plan is not None
    assert (guard.plan.compute("mine"), guard.plan.compute("head")) == ("float32", "bfloat16")
    assert guard.plan.match("mine").reason == "manual"  # type: ignore[union-attr]


def test_auto_on_a_model_that_was_cloned_or_built_before() -> None:
    model = classifier(head=None)
    set_global_policy("auto")
    for candidate in (model, keras.models.clone_model(model)):
        candidate.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        guard = quiet(timing=TimingTable.uniform(["first", "head"], relative={"bfloat16": 0.5}))
        fit(candidate, *batch(128), guard=guard)
        assert guard.plan is not None
        assert guard.plan.compute("first") == "bfloat16"


def test_auto_measures_here_and_gives_its_reasons() -> None:
    set_global_policy("auto")
    model = classifier()
    said: list[str] = []
    fit(model, *batch(128), guard=PrecisionGuard(log=said.append))
    assert len(said) == 1
    assert said[0].startswith('"auto" chose ')


def test_disabled_is_plain_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFWISE_DISABLE", "1")
    set_global_policy("auto")
    model, guard = classifier(), quiet()
    optimizer = model.optimizer
    history = fit(model, *batch(), guard=guard)
    assert "skipped_steps" not in history.history
    assert model.optimizer is optimizer
    assert (guard.plan, guard.steps) == (None, 0)
    keras.config.set_dtype_policy("mixed_float16")
    half = classifier()
    fit(half, *batch(), guard=quiet())
    assert isinstance(half.optimizer, keras.optimizers.LossScaleOptimizer)  # Keras' own loss scaling stays


# Errors


def test_a_half_head_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = classifier()
    fit(model, *batch(), guard=PrecisionGuard())
    assert [r.message for r in caplog.records if "head 'head' computes probabilities in half" in r.message]
    caplog.clear()
    fit(classifier(head=None), *batch(), guard=PrecisionGuard())
    assert not caplog.records


def test_bad_arguments_are_told() -> None:
    for options, error, message in (
        ({"guard": "repair"}, UsageError, "guard is 'repair'; allowed: True, \"report\", False"),
        ({"tolerance": 0.0}, UsageError, "tolerance is 0.0"),
        ({"timing": {}}, UsageError, "timing is dict"),
        ({"log": 3}, UsageError, "log is 3"),
        ({"policy": "float16"}, PolicyError, "mixed_float16"),
        ({"policy": 3}, PolicyError, "policy is 3"),
        ({"policy": "none.toml"}, PlanError, "none.toml"),
    ):
        with pytest.raises(error, match=message):
            PrecisionGuard(**options)
    model, (x, y) = classifier(), batch()
    with pytest.raises(PlanError, match="did you mean 'head'"):
        fit(model, x, y, guard=quiet(Plan.manual({"heed": "float32"}, framework="keras")))
    set_global_policy("auto")
    with pytest.raises(UsageError, match="names layers that 'Sequential' does not have: 'fc'"):
        fit(model, x, y, guard=quiet(timing=TimingTable.uniform(["fc"], relative={"bfloat16": 0.5})))
    fit(model, x, y)  # and the model is none the worse


def test_a_model_in_half_is_refused() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, dtype="bfloat16")])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    with pytest.raises(UsageError, match="the variables of 'dense' are bfloat16"):
        fit(model, *batch(), guard=quiet())


def test_an_error_in_the_middle_gives_the_model_back() -> None:
    model, (x, y) = classifier(), batch(128)

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, guard=quiet(), callbacks=[Fails()])
    weights = model.get_weights()
    assert all(np.isfinite(w).all() for w in weights)
    fit(model, x, y, guard=quiet())
    fit(model, x, y)
    assert not same(weights, model.get_weights())


@pytest.mark.parametrize("when", ["on_epoch_end", "on_train_batch_end"])
def test_an_error_in_another_callback_leaves_the_next_fit_plain(when: str) -> None:
    model, (x, y) = classifier(), batch()
    optimizer, guard = model.optimizer, quiet()
    fails = keras.callbacks.Callback()

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    setattr(fails, when, fail)
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, guard=guard, callbacks=[fails])
    steps = guard.steps
    assert "skipped_steps" not in fit(model, x, y).history
    assert guard.steps == steps
    assert model.optimizer is optimizer
    assert "train_step" not in model.__dict__
    assert "make_train_function" not in model.__dict__


def test_a_fit_within_a_fit() -> None:
    model, (x, y) = classifier(), batch()

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                self.model.fit(x, y, callbacks=[quiet()], verbose=0)

    fit(model, x, y, guard=quiet(), callbacks=[Inner()], epochs=2)
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_an_error_at_the_start_changes_nothing() -> None:
    set_global_policy("auto")
    model, (x, y) = classifier(), batch()
    optimizer = model.optimizer
    with pytest.raises(PlanError, match="nope"):
        fit(model, x, y, guard=quiet(Plan.manual({"nope": "float32"}, default="float16", framework="keras")))
    assert model.optimizer is optimizer
    assert undecided_layers(model)
    assert applied_plan(model) is None


def test_an_epoch_without_an_applied_step_has_no_loss() -> None:
    x, y = batch()
    history = fit(classifier(), np.full_like(x, np.inf), y, guard=quiet(guard=False), epochs=2)
    assert np.isnan(history.history["loss"]).all()  # 0.0 would be the best ever to EarlyStopping
    assert np.isnan(history.history["accuracy"]).all()


def test_metrics_are_put_back_in_the_first_fit_too() -> None:
    x, y = bad_batch()
    model = classifier(metrics=["accuracy", "sparse_categorical_crossentropy"])
    history = fit(model, x, y, guard=quiet(guard=False))
    assert all(math.isfinite(values[0]) for values in history.history.values())


def test_the_users_own_loss_scale_optimizer_comes_back() -> None:
    own = LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=128.0)
    model = classifier(optimizer=own)
    fit(model, *batch(), guard=quiet())
    assert model.optimizer is own
    assert own.settings.initial == 128.0


def test_a_frozen_model_and_a_model_with_metrics_of_its_own() -> None:
    x, y = batch()
    model = classifier()
    model.trainable = False
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    with pytest.warns(UserWarning, match="does not have any trainable weights") if BACKEND != "jax" else nullcontext():
        fit(model, x, y, guard=quiet())

    class Own(keras.Sequential):
        metrics = property(lambda self: [])

    other = Own([keras.Input((8,)), keras.layers.Dense(4)])
    other.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    guard = quiet()
    fit(other, x, y, guard=guard)
    assert guard.steps == 2


@pytest.mark.skipif(BACKEND == "torch", reason="Keras' states are no variables there")
def test_states_of_stateful_layers_are_put_back() -> None:
    layers = keras.layers
    model = keras.Sequential([keras.Input(batch_shape=(8, 3, 4)), layers.LSTM(3, stateful=True), layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((16, 3, 4), "float32"), np.ones((16, 1), "float32")
    x[9] = np.nan
    guard = quiet()
    fit(model, x, y, guard=guard, epochs=3, batch_size=8)
    assert (guard.steps, guard.skipped_steps) == (6, 3)


def test_models_are_freed() -> None:
    def train() -> weakref.ref[keras.Model]:
        model = classifier()
        apply(model, Plan.manual(default="bfloat16", framework="keras"))
        fit(model, *batch(), guard=quiet())
        return weakref.ref(model)

    freed = train()
    keras.utils.clear_session()
    gc.collect()
    assert freed() is None


def test_the_state_can_be_saved_in_a_callback_with_validation() -> None:
    model, (x, y) = classifier(), batch()
    guard, saved = quiet(), []
    saver = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: saved.append(guard.state_dict()))
    fit(model, x, y, guard=guard, callbacks=[saver], validation_data=(x, y), epochs=2)
    assert [state["steps"] for state in saved] == [2, 4]


def test_stopping_keeps_the_last_good_weights() -> None:
    """NaN in every batch: no precision heals that."""
    model, (x, y) = classifier(), batch(32 * 8)
    x[32:] = np.nan
    guard = quiet()
    with pytest.raises(TrainingStopped):
        fit(model, x, y, guard=guard, epochs=2)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert [incident.kind for incident in guard.incidents] == ["reported"] * 3 + ["stopped"]
    assert guard.skipped_steps == 4
    assert guard.steps == 5
    assert model.optimizer.__class__.__name__ == "Adam"
    assert np.isfinite(model.predict(x[:8], verbose=0)).all()
