"""Carrying out a plan: what runs in which dtype, and that the model is as before afterwards."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.models import batch, classifier, dtypes_that_ran

from halfwise.core.plan import Plan, Rule
from halfwise.errors import PlanError, UsageError
from halfwise.keras.apply import applied_plan, apply, computes
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.names import named_layers

L = keras.layers
HALF = "bfloat16"


def manual(layers: dict[str, str] | None = None, default: str = HALF) -> Plan:
    return Plan.manual(layers, default=default, framework="keras")


def policies(model: keras.Model) -> list[Any]:
    return [layer._dtype_policy for layer in model._flatten_layers()]


def test_what_the_plan_says_is_what_runs() -> None:
    model = classifier()
    x, _ = batch()
    with apply(model, manual({"head": "float32", "norm": "float32"})):
        assert dtypes_that_ran(model, x) == {
            "first": HALF,
            "norm": "float32",
            "dropout": HALF,
            "head": "float32",
        }
    assert set(dtypes_that_ran(model, x).values()) == {"float32"}


@pytest.mark.parametrize("function", ["predict", "evaluate", "train_on_batch"])
def test_functions_that_were_compiled_before_compute_in_the_new_precision(function: str) -> None:
    model = classifier()
    x, y = batch()
    seen: list[str] = []
    layer = model.get_layer("first")
    inner = layer.call

    def call(inputs: Any, training: Any = None) -> Any:
        result = inner(inputs)
        seen.append(keras.backend.standardize_dtype(result.dtype))
        return result

    layer.__dict__["call"] = call

    def run() -> str:
        seen.clear()
        model.predict(x, verbose=0) if function == "predict" else getattr(model, function)(x, y)
        return seen[-1]

    assert run() == "float32"
    handle = apply(model, manual())
    assert run() == HALF
    handle.remove()
    assert run() == "float32"


def test_the_model_is_restored_exactly() -> None:
    model = classifier()
    before, compiled, optimizer = policies(model), model.__dict__.get("compile"), model.optimizer
    handle = apply(model, manual())
    assert applied_plan(model) == handle.plan
    handle.remove()
    handle.remove()
    assert all(a is b for a, b in zip(policies(model), before, strict=True))
    assert model.__dict__.get("compile") is compiled
    assert "save" not in model.__dict__
    assert model.optimizer is optimizer
    assert applied_plan(model) is None


def test_a_later_plan_replaces_an_earlier_one_and_gives_it_back() -> None:
    model = classifier()
    first = apply(model, manual())
    second = apply(model, manual({"head": HALF}, default="float32"))
    assert [named_layers(model)[p].compute_dtype for p in ("first", "head")] == ["float32", HALF]
    second.remove()
    assert {layer.compute_dtype for layer in model.layers} == {HALF}
    third = apply(model, manual(default="float32"))
    first.remove()
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    third.remove()
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert applied_plan(model) is None


def test_a_model_that_routes_does_not_round_its_inputs_first() -> None:
    model = keras.Sequential([keras.Input((1,)), L.Rescaling(1.0, name="exact"), L.Dense(1, name="head")])
    x = np.array([[65537.0]], "float32")  # bfloat16 would make 65536 of it
    seen: list[float] = []
    with apply(model, manual({"exact": "float32"})):
        inner = model.layers[0].call

        def call(inputs: Any) -> Any:
            seen.append(float(inputs[0, 0]))
            return inner(inputs)

        model.layers[0].__dict__["call"] = call
        model(x)
        del model.layers[0].__dict__["call"]
    assert seen == [65537.0]
    with apply(model, manual({"": HALF})):
        assert model.compute_dtype == HALF  # unless the plan names it


def test_what_is_inside_a_whole_layer_computes_as_the_whole() -> None:
    model = keras.Sequential([keras.Input((3, 4)), L.Bidirectional(L.LSTM(2), name="rnn"), L.Dense(1, name="head")])
    with apply(model, manual({"rnn": "float32", "rnn.forward_lstm": "float32"})):
        parts = model.layers[0]._flatten_layers()
        assert {part.compute_dtype for part in parts} == {"float32"}
        assert model.layers[1].compute_dtype == HALF


class Squares(keras.layers.Layer):
    """A layer with code of its own around another one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = L.Dense(4, name="inner")
        self.seen = ""

    def call(self, x: Any) -> Any:
        y = self.inner(x)
        self.seen = keras.backend.standardize_dtype(y.dtype)
        return keras.ops.square(y)


def test_code_of_its_own_in_float32_gets_float32_from_the_layers_inside() -> None:
    block = Squares(name="block")
    model = keras.Sequential([keras.Input((4,)), block])
    x = np.ones((2, 4), "float32")
    with apply(model, manual({"block": "float32", "block.inner": HALF})):
        ran = dtypes_that_ran(model, x)
        model(x)
        assert block.seen == "float32"
        assert ran == {"block": "float32", "inner": "float32"}  # what the block sees of it
        assert block.inner.compute_dtype == HALF
    with apply(model, manual()):
        model(x)
        assert block.seen == HALF
    model(x)
    assert block.seen == "float32"


def test_float16_anywhere_means_that_the_loss_is_scaled() -> None:
    model = classifier()
    moments = model.optimizer
    with apply(model, manual({"first": "float16"}, default="float32")):
        assert isinstance(model.optimizer, LossScaleOptimizer)
        assert model.optimizer.inner_optimizer is moments
        model.compile(optimizer="sgd", loss="mse")
        assert isinstance(model.optimizer, LossScaleOptimizer)
    model.compile(optimizer="adam", loss="mse")
    before = model.optimizer
    apply(model, manual({"first": "float16"}, default="float32")).remove()
    assert model.optimizer is before
    other = classifier()
    with apply(other, manual()):
        assert not isinstance(other.optimizer, LossScaleOptimizer)


def test_names_typed_as_keras_numbers_them_now() -> None:
    L.Dense(1)
    model = keras.Sequential([keras.Input((4,)), L.Dense(2), L.Dense(2)])
    assert [layer.name for layer in model.layers] == ["dense_1", "dense_2"]
    handle = apply(model, manual({"dense_2": "float32"}))
    assert [layer.compute_dtype for layer in model.layers] == [HALF, "float32"]
    assert [rule.path for rule in handle.plan.layers] == ["dense_1"]


def test_patterns() -> None:
    model = classifier()
    with apply(model, manual({"n*": "float32", "h*": "float32"})):
        assert [layer.compute_dtype for layer in model.layers] == [HALF, "float32", HALF, "float32"]


def test_what_cannot_run_is_refused_by_name_and_nothing_is_changed() -> None:
    model = classifier()
    before = policies(model)
    stored = Plan(framework="keras", layers=(Rule(path="head", compute="float32", saved_activations="bfloat16"),))
    for plan, message in (
        (manual({"heed": "float32"}), "did you mean 'head'"),
        (manual(default="float8_e4m3fn"), "float8_e4m3fn in 'default'"),
        (manual({"head": "tensorfloat32"}), "tensorfloat32 in 'head'"),
        (stored, "saved_activations = 'bfloat16' in 'head'"),
    ):
        with pytest.raises(PlanError, match=message):
            apply(model, plan)
    with pytest.raises(UsageError, match=r"give a keras\.Model"):
        apply(object(), manual())
    with pytest.raises(UsageError, match="give a halfwise Plan"):
        apply(model, "mixed_float16")
    assert all(a is b for a, b in zip(policies(model), before, strict=True))
    assert applied_plan(model) is None


def test_layers_of_another_kind_are_left_alone() -> None:
    model = keras.Sequential([keras.Input((4,)), L.Dense(2, dtype="float16", name="wide"), L.Dense(2, name="head")])
    assert "wide" not in computes(model, manual())
    with apply(model, manual()):
        assert [layer.compute_dtype for layer in model.layers] == ["float16", HALF]
    with pytest.raises(PlanError, match="whose variables are float16"):
        apply(model, manual({"wide": HALF}))


def test_disabled_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFWISE_DISABLE", "1")
    model = classifier()
    with apply(model, manual()):
        assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def test_variables_and_statistics_stay_in_float32() -> None:
    model = classifier()
    x, y = batch()
    with apply(model, manual()):
        model.fit(x, y, verbose=0)
        assert {keras.backend.standardize_dtype(v.dtype) for v in model.weights} == {"float32"}


def test_a_plan_for_pytorch_is_refused() -> None:
    with pytest.raises(PlanError, match="for framework 'torch'"):
        apply(classifier(), Plan.manual(default=HALF))
