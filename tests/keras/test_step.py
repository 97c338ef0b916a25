"""`step`: the same training as a loop written by hand, and as `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import batch, classifier

import halfwise.keras as hw
from halfwise.errors import UsageError

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu", name="first"), keras.layers.Dense(4, name="head")]
    )


def test_it_trains_as_fit_does() -> None:
    x, y = batch(96)
    fitted = network()
    fitted.compile(optimizer=keras.optimizers.Adam(0.01), loss=LOSS)
    stepped = keras.models.clone_model(fitted)
    stepped.set_weights(fitted.get_weights())
    fitted.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    optimizer = keras.optimizers.Adam(0.01)
    losses = [
        hw.step(stepped, x[i : i + 32], y[i : i + 32], loss=LOSS, optimizer=optimizer).loss for i in range(0, 96, 32)
    ]
    for mine, theirs in zip(stepped.get_weights(), fitted.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_skipped_steps_leave_no_trace(policy: str) -> None:
    x, y = batch(64)
    hw.set_global_policy(policy)
    model = classifier(head=None, optimizer="adam")
    guard = hw.PrecisionGuard(guard=False, log=lambda _: None)
    hw.step(model, x, y, guard=guard)
    before = model.get_weights()
    bad = x.copy()
    bad[3, 0] = np.inf
    scale = guard.loss_scale
    result = hw.step(model, bad, y, guard=guard)
    assert not result.applied
    assert not np.isfinite(result.grad_norm)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    if policy == "mixed_float16":
        assert guard.loss_scale == scale / 2
        assert result.loss_scale == scale
    for _ in range(8):  # until the scale has settled
        result = hw.step(model, x, y, guard=guard)
    assert result.applied
    assert not np.array_equal(before[0], model.get_weights()[0])


def test_auto_in_a_loop() -> None:
    x, y = batch(64)
    hw.set_global_policy("auto")
    model, optimizer = network(), keras.optimizers.SGD(0.1)
    timing = hw.TimingTable.uniform(["first", "head"], relative={"bfloat16": 0.5})
    guard = hw.PrecisionGuard(timing=timing, log=lambda _: None)
    for _ in range(3):
        assert guard.plan is None
        hw.step(model, x, y, loss=LOSS, optimizer=optimizer, guard=guard)
    assert guard.plan is not None
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
    result = hw.step(model, x, y, loss=LOSS, optimizer=optimizer, guard=guard)
    assert keras.backend.standardize_dtype(result.output.dtype) == "bfloat16"


def test_sample_weights_and_several_outputs() -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, {"a": keras.layers.Dense(4)(inputs), "b": keras.layers.Dense(1)(inputs)})
    x, y = batch(32)
    targets = {"a": y, "b": x[:, :1]}
    result = hw.step(model, x, targets, loss={"a": LOSS, "b": "mse"}, optimizer=keras.optimizers.SGD())
    assert set(result.output) == {"a", "b"}
    single, weights = network(), np.zeros(32, "float32")
    before = single.get_weights()
    zero = hw.step(single, x, y, weights, loss=LOSS, optimizer=keras.optimizers.SGD(1.0))
    assert zero.loss == 0.0
    assert all(np.array_equal(a, b) for a, b in zip(before, single.get_weights(), strict=True))


def test_losses_that_layers_add() -> None:
    regular = keras.regularizers.L2(0.5)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, kernel_regularizer=regular)])
    x, y = batch(32)
    plain = float(keras.ops.convert_to_numpy(LOSS(y, model(x))))
    penalty = float(keras.ops.convert_to_numpy(keras.ops.sum(model.losses)))
    result = hw.step(model, x, y, loss=LOSS, optimizer=keras.optimizers.SGD())
    assert result.loss == pytest.approx(plain + penalty, rel=1e-5)


def test_another_loss_or_optimizer_begins_anew_and_counts_on() -> None:
    x, y = batch(32)
    model, guard = network(), hw.PrecisionGuard("mixed_bfloat16", log=lambda _: None)
    hw.step(model, x, y, loss=LOSS, optimizer=keras.optimizers.SGD(), guard=guard)
    hw.step(model, x, y, loss=LOSS, optimizer=keras.optimizers.SGD(), guard=guard)
    assert guard.steps == 2
    assert model.get_layer("head").compute_dtype == "bfloat16"


def test_a_new_loss_object_at_each_call_goes_on_with_scale_and_evidence() -> None:
    x, y = batch(32)
    hw.set_global_policy("auto")
    model, optimizer = network(), keras.optimizers.SGD()
    timing = hw.TimingTable.uniform(["first", "head"], relative={"bfloat16": 0.5})
    guard = hw.PrecisionGuard(timing=timing, log=lambda _: None)
    for _ in range(4):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        hw.step(model, x, y, loss=loss, optimizer=optimizer, guard=guard)
    assert guard.steps == 4
    assert guard.plan is not None


def test_after_a_failed_first_call_it_works() -> None:
    x, y = batch(32)
    model, optimizer = network(), keras.optimizers.SGD()
    with pytest.raises(ValueError, match="shape"):
        hw.step(model, x[:, :3], y, loss=LOSS, optimizer=optimizer)
    assert hw.step(model, x, y, loss=LOSS, optimizer=optimizer).applied


def test_bad_arguments() -> None:
    x, y = batch(32)
    with pytest.raises(UsageError, match="no optimizer"):
        hw.step(network(), x, y, loss=LOSS)
    with pytest.raises(UsageError, match="no loss"):
        hw.step(network(), x, y, optimizer=keras.optimizers.SGD())
    with pytest.raises(UsageError, match="give a PrecisionGuard"):
        hw.step(network(), x, y, loss=LOSS, optimizer=keras.optimizers.SGD(), guard=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"give a keras\.Model"):
        hw.step(keras.layers.Dense(1), x, y)


def test_float64_arrays_are_taken_as_fit_takes_them() -> None:
    x, y = batch(32)
    result: Any = hw.step(network(), x.astype("float64"), y, loss=LOSS, optimizer=keras.optimizers.SGD())
    assert result.applied
