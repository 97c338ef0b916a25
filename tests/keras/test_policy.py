"""The global policy, and what undecided layers do."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import keras
import pytest
from tests.keras.models import batch, classifier

from halfwise.core.plan import Plan
from halfwise.errors import PolicyError
from halfwise.keras.policy import UndecidedPolicy, global_policy, set_global_policy, undecided_layers, wanted_by


@pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_keras_own_policies_are_keras_own(name: str) -> None:
    set_global_policy(name)
    assert global_policy().name == name
    assert keras.layers.Dense(1).dtype_policy == keras.DTypePolicy(name)


@pytest.mark.parametrize(("spelling", "name"), [("16-mixed", "mixed_float16"), ("bf16-mixed", "mixed_bfloat16")])
def test_lightning_spellings(spelling: str, name: str) -> None:
    set_global_policy(spelling)
    assert global_policy().name == name


def test_policies_of_keras_pass_through() -> None:
    for policy in (keras.DTypePolicy("mixed_float16"), "int8_from_float32", "float64"):
        set_global_policy(policy)
        assert global_policy().name == getattr(policy, "name", policy)


@pytest.mark.parametrize("bad", ["mixed", "AUTO", "float16", "bfloat16", object(), None, 3])
def test_unknown_policies_are_value_errors_and_change_nothing(bad: Any) -> None:
    set_global_policy("mixed_bfloat16")
    with pytest.raises(PolicyError, match="policy") as raised:
        set_global_policy(bad)
    assert isinstance(raised.value, ValueError)
    assert global_policy().name == "mixed_bfloat16"


def test_auto_builds_in_float32_and_is_remembered() -> None:
    set_global_policy("auto")
    model = classifier()
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}
    assert global_policy() == "auto"
    assert "auto" in repr(global_policy())
    assert list(undecided_layers(model)) == ["", "first", "norm", "dropout", "head"]
    assert wanted_by(model) == "auto"


def test_a_plan_or_a_plan_file_can_be_the_policy(tmp_path: Path) -> None:
    plan = Plan.manual({"head": "float32"}, default="bfloat16", framework="keras")
    plan.save(tmp_path / "plan.toml")
    for policy in (plan, tmp_path / "plan.toml", str(tmp_path / "plan.toml")):
        set_global_policy(policy)
        assert global_policy() == plan
        assert wanted_by(classifier()) == plan


def test_a_precision_set_by_hand_is_not_undecided() -> None:
    set_global_policy("auto")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
    assert list(undecided_layers(model)) == ["", "dense"]


def test_disabled_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFWISE_DISABLE", "1")
    set_global_policy("auto")
    assert type(global_policy()) is keras.DTypePolicy
    assert global_policy().name == "float32"


def test_undecided_models_are_cloned_copied_pickled_and_saved(tmp_path: Path) -> None:
    set_global_policy("auto")
    model = classifier()
    assert wanted_by(keras.models.clone_model(model)) == "auto"
    for copied in (copy.deepcopy(global_policy()), pickle.loads(pickle.dumps(global_policy()))):
        assert type(copied) is UndecidedPolicy
        assert copied == "auto"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.save(tmp_path / "model.keras")
    assert wanted_by(keras.saving.load_model(tmp_path / "model.keras")) == "auto"
    keras.config.set_dtype_policy("float32")
    assert (
        wanted_by(keras.saving.load_model(tmp_path / "model.keras")) is None
    )  # the file says float32, as it can be read without halfwise
    assert b"halfwise" not in (tmp_path / "model.keras").read_bytes()


def test_undecided_training_is_told_once_for_each_model(caplog: pytest.LogCaptureFixture) -> None:
    set_global_policy("auto")
    x, y = batch()
    model, other = classifier(), classifier()
    model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert not ours(caplog)
    with caplog.at_level(logging.WARNING, "halfwise"):
        model.fit(x, y, epochs=2, verbose=0)
        model.fit(x, y, verbose=0)
        assert [record.message for record in ours(caplog)] == [
            "the policy \"auto\" is not in force yet: the model 'sequential' trains in float32. Add "
            "callbacks=[hw.PrecisionGuard()] to model.fit(...); in a loop of your own use hw.step(model, x, y), or "
            "call hw.apply(model, hw.plan(model, x, y)) before training."
        ]
        other.train_on_batch(x, y)
        assert "'sequential_1'" in ours(caplog)[1].message
    assert len(ours(caplog)) == 2


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "halfwise"]
