"""What the guard does in `fit` about trouble that skipping cannot cure."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import batch, classifier, dtypes_that_ran, planted

import halfwise.keras as hw

BACKEND = keras.backend.backend()
LOSS = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}

LOW = hw.LossScaleSettings(initial=64.0)  # no step is skipped while it settles


def quiet(**options: Any) -> hw.PrecisionGuard:
    return hw.PrecisionGuard(log=lambda _: None, **options)


def trained(policy: str, **options: Any) -> tuple[keras.Model, hw.PrecisionGuard, float]:
    """The planted model after some epochs under the policy, and its accuracy."""
    keras.utils.set_random_seed(3)
    hw.set_global_policy(policy)
    model, x, y = planted()
    hw.set_global_policy("float32")
    optimizer = keras.optimizers.Adam(0.02)
    if policy == "mixed_float16":
        optimizer = hw.LossScaleOptimizer(optimizer, 64.0)  # low enough that no step is skipped while it settles
    model.compile(optimizer=optimizer, **LOSS, **options)
    guard = quiet()
    model.fit(x, y, batch_size=32, epochs=6, shuffle=False, callbacks=[guard], verbose=0)
    return model, guard, model.evaluate(x, y, verbose=0)[1]


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"steps_per_execution": 3}], ids=str)
def test_a_planted_overflow_is_named_and_healed_and_nothing_else_is_demoted(options: dict[str, Any]) -> None:
    if options and BACKEND == "torch":
        pytest.skip("Keras has no steps_per_execution there; jit_compile is torch.compile")
    model, guard, accuracy = trained("mixed_float16", **options)
    assert [(i.kind, i.verdict, i.module, i.direction, i.action) for i in guard.incidents] == [
        ("healed", "overflow_at_every_scale", "middle", "forward", "float32")
    ]
    formats = {layer.name: layer.compute_dtype for layer in model.layers}
    assert formats == {"first": "float16", "middle": "float32", "after": "float16", "head": "float16"}
    assert guard.plan is not None
    assert guard.plan.match("middle").reason == "healed"  # type: ignore[union-attr]
    assert guard.skipped_steps == 0
    _, _, in_float32 = trained("float32")
    assert accuracy > in_float32 - 0.03


def test_evaluate_and_predict_are_right_after_a_demotion() -> None:
    model, x, y = planted()
    model.compile(optimizer="sgd", **LOSS)
    hw.apply(model, hw.Plan.manual(default="float16", framework="keras"))
    assert not np.isfinite(model.predict(x, verbose=0)).all()  # compiled in float16, and useless
    guard = quiet()
    history = model.fit(x, y, batch_size=64, validation_data=(x, y), callbacks=[guard], verbose=0)
    assert guard.incidents
    assert np.isfinite(history.history["val_loss"]).all()
    assert np.isfinite(model.predict(x, verbose=0)).all()
    assert np.isfinite(model.evaluate(x, y, verbose=0)[0])
    assert dtypes_that_ran(model, x)["middle"] == "float32"
    assert dtypes_that_ran(model, x)["head"] == "float16"


def test_report_changes_nothing_and_says_what_to_paste() -> None:
    model, x, y = planted()
    model.compile(optimizer="sgd", **LOSS)
    hw.apply(model, hw.Plan.manual(default="float16", framework="keras"))
    said: list[str] = []
    guard = hw.PrecisionGuard(guard="report", log=said.append)
    before = model.get_weights()
    model.fit(x, y, batch_size=64, callbacks=[guard], verbose=0)
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}
    assert guard.skipped_steps == 4
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert {incident.kind for incident in guard.incidents} == {"reported"}
    assert len(said) == 1
    assert 'hw.apply(model, hw.Plan.manual({"middle": "float32"}, default="float16", framework="keras"))' in said[0]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_nan_in_the_data_is_not_a_precision_problem(policy: str) -> None:
    x, y = batch(128)
    x[40:44] = np.nan
    keras.config.set_dtype_policy(policy)
    model, guard = classifier(head=None, optimizer="sgd"), quiet()
    model.fit(x, y, batch_size=32, shuffle=False, callbacks=[guard], verbose=0)
    assert [(i.kind, i.verdict, i.action) for i in guard.incidents] == [("reported", "nonfinite_input", "skipped")]
    assert "not a precision problem" in guard.incidents[0].text
    assert {layer.compute_dtype for layer in model.layers} == {keras.DTypePolicy(policy).compute_dtype}
    assert guard.skipped_steps == 1
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_weights_that_are_nan_stop_the_run() -> None:
    x, y = batch()
    model, guard = classifier(), quiet()
    kernel, bias = model.get_layer("head").get_weights()
    kernel[0, 0] = np.nan
    model.get_layer("head").set_weights([kernel, bias])
    with pytest.raises(hw.TrainingStopped, match="weights"):
        model.fit(x, y, callbacks=[guard], verbose=0)
    assert [incident.verdict for incident in guard.incidents] == ["nonfinite_parameters"]


def test_a_retry_sees_the_same_dropout() -> None:
    """Healed at the first step, the training is the one that had the layer in float32 from the beginning."""
    results = []
    for plan in ({}, {"middle": "float32"}):
        keras.utils.set_random_seed(3)
        model, x, y = planted()
        model = keras.Sequential([*model.layers[:3], keras.layers.Dropout(0.5, name="drop"), model.layers[3]])
        model.compile(optimizer=keras.optimizers.SGD(0.01), **LOSS)
        hw.apply(model, hw.Plan.manual(plan, default="float16", framework="keras", loss_scale=LOW))
        guard = quiet()
        model.fit(x, y, batch_size=64, epochs=2, shuffle=False, callbacks=[guard], verbose=0)
        assert len(guard.incidents) == (0 if plan else 1)
        results.append(model.get_weights())
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_loop_of_the_users_own_heals_too() -> None:
    model, x, y = planted()
    hw.apply(model, hw.Plan.manual(default="float16", framework="keras", loss_scale=LOW))
    guard = quiet()
    optimizer = keras.optimizers.Adam(0.01)
    results = [hw.step(model, x[:64], y[:64], loss=LOSS["loss"], optimizer=optimizer, guard=guard) for _ in range(3)]
    assert [result.retries for result in results] == [1, 0, 0]
    assert all(result.applied for result in results)
    assert results[0].incident is not None
    assert results[0].incident.module == "middle"
    assert np.isfinite(keras.ops.convert_to_numpy(results[2].output)).all()
    assert results[2].loss < results[0].loss
