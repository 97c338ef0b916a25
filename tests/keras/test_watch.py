"""`watch`: results stay as they are, and failures are named."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import batch, classifier, planted

import halfwise.keras as hw
from halfwise.errors import UsageError

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_watched_training_is_the_same_to_the_last_bit(policy: str) -> None:
    x, y = batch(128)
    keras.config.set_dtype_policy(policy)
    results = []
    for watched in (False, True):
        keras.utils.set_random_seed(1)
        model = classifier(head=None)
        optimizer = model.optimizer
        seen = hw.watch(model, log=lambda _: None) if watched else None
        history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        assert model.optimizer is optimizer
        results.append((history.history, model.get_weights()))
        if seen is not None:
            seen.close()
            assert seen.steps == 8
            assert not seen.nonfinite_steps
    assert results[0][0] == results[1][0]
    assert all(np.array_equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_skipped_steps_and_the_scale_are_kept() -> None:
    x, y = batch(128)
    keras.config.set_dtype_policy("mixed_float16")
    model = classifier(head=None)
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 2.0**24), loss=LOSS)
    with hw.watch(model, log=lambda _: None) as seen:
        model.fit(x, y, batch_size=32, epochs=3, verbose=0)
    assert seen.skipped_steps > 0
    scales = [scale for _, scale in seen.loss_scale_history]
    assert scales == sorted(scales, reverse=True)
    assert len(scales) == seen.skipped_steps


def test_a_planted_overflow_is_named() -> None:
    model, x, y = planted()
    for layer in model.layers:
        layer.dtype_policy = "mixed_float16"
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 64.0), loss=LOSS)
    said: list[str] = []
    before = model.get_weights()
    with hw.watch(model, log=said.append) as seen:
        model.fit(x, y, batch_size=64, epochs=2, verbose=0)
    assert [d.module for d in seen.diagnoses] == ["middle"]
    assert seen.diagnoses[0].verdict == "overflow_at_every_scale"
    assert len(said) == 1
    assert 'hw.Plan.manual({"middle": "float32"}' in said[0] or '"middle"' in said[0]
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def test_batch_norm_behind_the_culprit_is_not_blamed() -> None:
    layers = keras.layers
    large = keras.initializers.Constant(2e4)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, name="huge", kernel_initializer=large),
            layers.BatchNormalization(name="norm"),
            layers.Dense(4, name="head", dtype="float32"),
        ]
    )
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 64.0), loss=LOSS)
    x, y = batch(128)
    said: list[str] = []
    with hw.watch(model, log=said.append) as seen:
        model.fit(np.abs(x) + 1.0, y, batch_size=32, shuffle=False, verbose=0)
    assert seen.diagnoses[0].module == "huge"
    assert '{"huge": "float32", "head": "float32"}' in said[0]


def test_nan_in_the_data_is_told_once() -> None:
    x, y = batch(128)
    x[40, 0] = np.inf
    model = classifier()
    said: list[str] = []
    with hw.watch(model, log=said.append) as seen:
        model.fit(x, y, batch_size=32, shuffle=False, epochs=2, verbose=0)
    assert seen.nonfinite_steps[0] == 1
    assert seen.diagnoses[0].verdict == "nonfinite_input"
    assert len(said) <= 2


def test_closing_and_watching_again() -> None:
    model = classifier()
    first = hw.watch(model, log=lambda _: None)
    second = hw.watch(model, log=lambda _: None)
    model.fit(*batch(), verbose=0)
    assert (first.steps, second.steps) == (0, 2)
    second.close()
    second.close()
    assert "make_train_function" not in model.__dict__
    model.fit(*batch(), verbose=0)
    assert second.steps == 2


def test_an_optimizer_in_a_loop_that_forgets_to_scale() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    gradients = [keras.ops.ones(v.shape) for v in model.trainable_variables]
    for optimizer, message in (
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "optimizer.scale_loss(loss)"),
        (keras.optimizers.SGD(), "hw.LossScaleOptimizer(optimizer)"),
    ):
        optimizer.build(model.trainable_variables)
        said: list[str] = []
        with hw.watch(model, optimizer, log=said.append):
            for _ in range(2):
                _apply(optimizer, gradients, model)
        assert len(said) == 1
        assert message in said[0]
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    scaled.build(model.trainable_variables)
    said = []
    with hw.watch(model, scaled, log=said.append):
        scaled.scale_loss(1.0)
        _apply(scaled, gradients, model)
    assert not said


def _apply(optimizer: Any, gradients: list[Any], model: keras.Model) -> None:
    if keras.backend.backend() == "jax":
        values = ([v.value for v in optimizer.variables], gradients, [v.value for v in model.trainable_variables])
        optimizer.stateless_apply(*values)
    else:
        optimizer.apply(gradients, model.trainable_variables)


def test_a_half_softmax_head_is_told() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    said: list[str] = []
    with hw.watch(classifier(), log=said.append):
        pass
    assert len(said) == 1
    assert "the head 'head' computes probabilities in half precision" in said[0]


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match=r"give a keras\.Model"):
        hw.watch(object())
    with pytest.raises(UsageError, match="watch\\(optimizer='adam'\\)"):
        hw.watch(classifier(), "adam")
    with pytest.raises(UsageError, match="watch\\(log=3\\)"):
        hw.watch(classifier(), log=3)  # type: ignore[arg-type]
