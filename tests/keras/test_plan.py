"""`plan`: what "auto" would choose, before training and without changing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import batch, classifier

import halfwise.keras as hw
from halfwise.errors import UsageError

TABLE = hw.TimingTable.uniform(["first", "norm", "head"], relative={"bfloat16": 0.5})


def everything(model: keras.Model) -> list[Any]:
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def test_it_changes_nothing() -> None:
    model = classifier()
    x, y = batch()
    model.fit(x, y, verbose=0)
    before, policies = everything(model), [layer._dtype_policy for layer in model._flatten_layers()]
    plan = hw.plan(model, x, y, timing=TABLE)
    assert plan.compute("first") == "bfloat16"
    assert all(np.array_equal(a, b) for a, b in zip(before, everything(model), strict=True))
    assert all(a is b for a, b in zip(policies, (p._dtype_policy for p in model._flatten_layers()), strict=True))


def test_it_is_what_the_guard_would_choose_and_trains() -> None:
    hw.set_global_policy("auto")
    model = classifier()
    x, y = batch(96)
    plan = hw.plan(model, x, y, timing=TABLE)
    hw.apply(model, plan)
    guard = hw.PrecisionGuard(log=lambda _: None)
    model.fit(x, y, callbacks=[guard], verbose=0)
    assert guard.plan == plan
    other = classifier()
    second = hw.PrecisionGuard(timing=TABLE, log=lambda _: None)
    other.fit(x, y, batch_size=32, callbacks=[second], verbose=0, shuffle=False)
    assert second.plan is not None
    assert {r.path: r.compute for r in second.plan.layers} == {r.path: r.compute for r in plan.layers}


def test_a_layer_that_overflows_stays_in_float32() -> None:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="large", kernel_initializer=keras.initializers.Constant(2e4)),
            keras.layers.Rescaling(1e-5, name="down"),
            keras.layers.Dense(4, name="head"),
        ]
    )
    x, y = batch()
    table = hw.TimingTable.uniform(["large", "head"], relative={"float16": 0.5})
    plan = hw.plan(model, x, y, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), timing=table)
    assert {path: plan.compute(path) for path in ("large", "down", "head")} == {
        "large": "float32",
        "down": "float32",
        "head": "float16",
    }
    assert plan.match("large").reason == "range"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["dataset", "batches"])
def test_data_sets(kind: str) -> None:
    x, y = batch(96)
    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 96, 32)]
    data: Any = batches
    if kind == "dataset":
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).repeat()
    assert hw.plan(classifier(), data, timing=TABLE).compute("first") == "bfloat16"


def test_bad_arguments() -> None:
    x, y = batch()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: hw.plan(model, x, y), "needs a loss"),
        (lambda: hw.plan(model, x, y, loss="mse", batch_size=0), "batch_size=0"),
        (lambda: hw.plan(model, x[:0], y[:0], loss="mse"), "is empty"),
        (lambda: hw.plan(model, x, y, loss="mse", timing=TABLE), "does not have"),
        (lambda: hw.plan(model, x, y, loss="mse", objective="speed"), "objective is 'speed'"),  # type: ignore[arg-type]
        (lambda: hw.plan(object(), x, y), r"give a keras\.Model"),
    ]
    for call, message in cases:
        with pytest.raises(UsageError, match=message):
            call()
