"""A model and its plan beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import batch, classifier

from halfwise.core.plan import Plan
from halfwise.core.timing import TimingTable
from halfwise.errors import PlanError, UsageError
from halfwise.keras.apply import applied_plan, apply
from halfwise.keras.guard import PrecisionGuard
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.names import named_layers
from halfwise.keras.save import load_model, plan_path, save_model

L = keras.layers


def attention() -> keras.Model:
    """A functional model with attention, whose inner layers Keras forgets the policies of."""
    inputs = keras.Input((3, 8))
    x = L.MultiHeadAttention(2, 4, name="attention", dropout=0.1)(inputs, inputs)
    x = L.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, L.Dense(2, name="head", dtype="float32")(x))


def test_policies_survive_saving_loading_and_cloning(tmp_path: Path) -> None:
    model = attention()
    plan = Plan.manual({"attention": "bfloat16"}, default="float32", framework="keras")
    apply(model, plan)
    save_model(model, tmp_path / "model.keras")
    assert Plan.load(tmp_path / "model.plan.toml") == plan
    loaded = load_model(tmp_path / "model.keras")
    wanted = {path: layer.compute_dtype for path, layer in named_layers(model).items()}
    assert {path: layer.compute_dtype for path, layer in named_layers(loaded).items()} == wanted
    assert wanted["attention.query"] == "bfloat16"
    assert applied_plan(loaded) == plan
    x = np.ones((2, 3, 8), "float32")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    cloned = keras.models.clone_model(model)
    assert cloned.get_layer("attention").compute_dtype == "bfloat16"
    apply(cloned, plan)
    assert {path: layer.compute_dtype for path, layer in named_layers(cloned).items()} == wanted


def test_keras_own_save_and_checkpoints_write_the_plan_too(tmp_path: Path) -> None:
    model = classifier(optimizer="sgd")
    x, y = batch()
    apply(model, Plan.manual({"head": "float32"}, default="bfloat16", framework="keras"))
    model.save(tmp_path / "by_hand.keras")
    assert load_model(tmp_path / "by_hand.keras").get_layer("first").compute_dtype == "bfloat16"
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="loss", save_best_only=True)
    model.fit(x, y, callbacks=[saver], verbose=0)
    assert Plan.load(tmp_path / "best.plan.toml").compute("head") == "float32"


def test_a_plan_of_an_earlier_model_does_not_stay(tmp_path: Path) -> None:
    model = classifier()
    with apply(model, Plan.manual(default="bfloat16", framework="keras")):
        save_model(model, tmp_path / "model.keras")
    assert plan_path(tmp_path / "model.keras").is_file()
    save_model(classifier(), tmp_path / "model.keras")
    assert not plan_path(tmp_path / "model.keras").exists()


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_optimizer_loss_scale_and_guard_are_saved_and_resumed(tmp_path: Path, policy: str) -> None:
    """Two epochs in one go are the same as one, a new process, and one more."""
    x, y = batch(128)

    def trained(model: keras.Model, guard: PrecisionGuard, epochs: range) -> list[Any]:
        model.fit(
            x,
            y,
            epochs=epochs.stop,
            initial_epoch=epochs.start,
            shuffle=False,
            batch_size=32,
            callbacks=[guard],
            verbose=0,
        )
        return model.get_weights()

    whole_guard = PrecisionGuard(policy)
    whole_model = classifier()
    weights = trained(whole_model, whole_guard, range(2))

    keras.utils.set_random_seed(0)
    model, first = classifier(), PrecisionGuard(policy)
    trained(model, first, range(1))
    save_model(model, tmp_path / "model.keras")
    saved = first.state_dict()
    assert saved["steps"] == 4

    resumed, second = load_model(tmp_path / "model.keras"), PrecisionGuard(policy)
    second.load_state_dict(saved)
    again = trained(resumed, second, range(1, 2))
    assert second.steps == whole_guard.steps == 8
    assert second.plan is not None
    assert second.plan.compute("first") == whole_guard.plan.compute("first")  # type: ignore[union-attr]
    assert second.loss_scale == whole_guard.loss_scale
    if policy == "mixed_float16":
        assert isinstance(resumed.optimizer, LossScaleOptimizer)
        assert int(resumed.optimizer.step_counter) == int(whole_model.optimizer.step_counter)
    for mine, theirs in zip(again, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_file_saved_in_a_guarded_float32_training_is_plain_keras(tmp_path: Path) -> None:
    model = classifier()
    x, y = batch()
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    model.fit(x, y, callbacks=[PrecisionGuard(), saver], verbose=0)
    assert b"halfwise" not in (tmp_path / "model.keras").read_bytes()
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 2
    for mine, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_bad_names_and_plans_are_told(tmp_path: Path) -> None:
    model = classifier(optimizer="sgd")
    with pytest.raises(UsageError, match=r"must end in \.keras"):
        save_model(model, tmp_path / "model.h5")
    with pytest.raises(UsageError, match="there is no model"):
        load_model(tmp_path / "none.keras")
    save_model(model, tmp_path / "model.keras")
    Plan.manual({"nowhere": "float32"}, framework="keras").save(tmp_path / "model.plan.toml")
    with pytest.raises(PlanError, match="nowhere"):
        load_model(tmp_path / "model.keras")


@pytest.mark.filterwarnings("error:Skipping variable loading")
def test_a_training_that_chose_float16_on_its_way_is_saved_with_its_moments(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="first"), keras.layers.Dense(2)])
    model.compile(optimizer="adam", loss="mse")
    table = TimingTable.uniform(["first"], relative={"float16": 0.5})
    guard = PrecisionGuard("auto", timing=table, log=lambda _: None)
    x, y = np.random.default_rng(0).normal(size=(64, 4)), np.zeros((64, 2))
    model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[guard, Saving(model, tmp_path / "model.keras")])
    assert guard.plan is not None
    assert guard.plan.compute("first") == "float16"
    loaded = load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    assert int(loaded.optimizer.inner_optimizer.iterations) == 32
    assert max(float(np.abs(slot).max()) for slot in loaded.optimizer.inner_optimizer.variables[2:]) > 0


class Saving(keras.callbacks.Callback):
    """Saves the model in the middle of its training, as `ModelCheckpoint` does."""

    def __init__(self, model: keras.Model, file: Path) -> None:
        super().__init__()
        self.file, self.trained = file, model

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        save_model(self.trained, self.file)
