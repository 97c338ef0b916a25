from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import halfwise.keras as hw
from halfwise.core.plan import Plan
from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord
from halfwise.errors import PlanError, TrainingStopped
from halfwise.workloads.compare import compare_with_float32
from halfwise.workloads.keras.networks import build_network
from halfwise.workloads.keras.training import KerasTraining
from halfwise.workloads.runs import finish, new_run, resumed_run
from halfwise.workloads.settings import Settings


class Quiet:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.messages: list[str] = []
        self.began_at = -1

    def start(self, *, epochs: int, steps_per_epoch: int, step: int) -> None:
        self.began_at = step

    def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
        self.rows.append(row)

    def measuring(self) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)


def start(workload: str, directory: str, **given: Any) -> tuple[KerasTraining, RunRecord]:
    quick = {"limit": 96, "batch_size": 32, "epochs": 2, "policy": "float32"}
    settings = Settings.of(workload, framework="keras", **{**quick, **given})
    training, record = new_run(settings, Path(directory), Quiet())
    assert isinstance(training, KerasTraining)
    return training, record


def resume(workload: str, directory: str, **given: Any) -> tuple[KerasTraining, RunRecord]:
    training, record = resumed_run(workload, Path(directory), given, Quiet())
    assert isinstance(training, KerasTraining)
    return training, record


def without_seconds(record: RunRecord) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in record.metrics()]


def same_weights(one: keras.Model, other: keras.Model) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights(), strict=True))


@pytest.mark.parametrize(("workload", "promised"), [("image", 0.96), ("text", 0.92)])
def test_default_settings_reach_the_accuracy_that_is_promised(workload: str, promised: float) -> None:
    settings = Settings.of(workload, framework="keras", policy="float32")
    training, record = new_run(settings, Path("run"), Quiet())
    assert training.run(record)["test_accuracy"] >= promised


@pytest.mark.parametrize(("workload", "loop"), [("image", "fit"), ("text", "fit"), ("text", "custom")])
def test_float32_is_keras_without_halfwise_bit_for_bit(workload: str, loop: str) -> None:
    training, record = start(workload, "run", loop=loop, seed=3, limit=100)
    results = training.run(record)

    keras.utils.set_random_seed(3)
    model = build_network(training.settings.network, training.data)
    optimizer = keras.optimizers.Adam(1e-3 if workload == "image" else 3e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    (inputs, labels), (test_inputs, test_labels) = training.data.train, training.data.test
    if workload == "image":
        inputs, test_inputs = inputs.transpose(0, 2, 3, 1), test_inputs.transpose(0, 2, 3, 1)
    losses = []
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(100)
        for begin in range(0, 100, 32):
            rows = order[begin : begin + 32]
            model.reset_metrics()
            losses.append(model.train_on_batch(inputs[rows], labels[rows], return_dict=True)["loss"])
    assert same_weights(training.model, model)
    assert [row["loss"] for row in record.metrics()] == pytest.approx(losses, rel=1e-3 if loop == "fit" else 1e-6)
    found = model.evaluate(test_inputs, test_labels, batch_size=500, verbose=0, return_dict=True)
    assert results["test_accuracy"] == pytest.approx(found["accuracy"])
    assert results["test_loss"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_run_leaves_a_whole_record(loop: str) -> None:
    training, record = start("text", "run", loop=loop, policy="mixed_float16")
    summary = finish(training, record, training.run(record))
    names = {path.name for path in Path("run").iterdir()}
    assert names >= {"environment.json", "metrics.jsonl", "plan.toml", "checkpoint", "summary.json"}
    rows = record.metrics()
    assert [(row["step"], row["epoch"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert all(row["applied"] and row["loss_scale"] > 1.0 and row["seconds"] > 0.0 for row in rows)
    ends = [row for row in rows if "test_accuracy" in row]
    assert [row["step"] for row in ends] == [2, 5]
    assert all(row.keys() >= {"train_loss", "train_accuracy", "test_loss"} for row in ends)
    mean = np.mean([row["loss"] for row in rows[3:]])
    assert ends[1]["train_loss"] == pytest.approx(mean, rel=1e-3)  # three batches of 32
    view = training.view
    assert isinstance(view, Quiet)
    assert view.rows == rows
    assert summary["test_accuracy"] == ends[1]["test_accuracy"]
    assert (summary["framework"], summary["backend"], summary["loop"]) == ("keras", keras.backend.backend(), loop)
    assert summary["step_time"]["ratio"] > 0.0
    assert summary["loss_scale"] == training.guard.loss_scale
    environment = record.environment()
    layers = {"": "EmbeddingBag", "embedding": "Embedding", "mean": "GlobalAveragePooling1D", "head": "Dense"}
    assert environment["modules"] == layers
    assert environment["versions"].keys() == {"python", "halfwise", "numpy", "keras", keras.backend.backend()}
    assert Plan.load(record.plan_path).compute("embedding") == "float16"


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_more_epochs_are_the_same_as_having_asked_for_them_at_once(loop: str) -> None:
    whole, whole_record = start("text", "whole", loop=loop, policy="mixed_float16", epochs=3, seed=5)
    results = whole.run(whole_record)
    parts, record = start("text", "parts", loop=loop, policy="mixed_float16", epochs=1, seed=5)
    parts.run(record)
    parts, record = resume("text", "parts", epochs=3, loop=loop)
    assert parts.run(record)["test_loss"] == results["test_loss"]
    assert without_seconds(record) == without_seconds(whole_record)
    assert same_weights(parts.model, whole.model)


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_finished_run_gives_the_same_summary_again(loop: str) -> None:
    training, record = start("text", "run", loop=loop, policy="mixed_float16", epochs=1)
    first = finish(training, record, training.run(record))
    training, record = resume("text", "run")
    second = finish(training, record, training.run(record))
    assert len(record.metrics()) == 3
    for name in ("plan", "loss_scale", "skipped_steps", "test_accuracy", "steps"):
        assert second[name] == first[name]


def test_a_custom_loop_goes_on_within_an_epoch() -> None:
    class StopError(Exception):
        pass

    class Stopping(Quiet):
        def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
            if row["step"] == 4:
                raise StopError

    options = {"loop": "custom", "policy": "mixed_bfloat16", "checkpoint_every": 1}
    whole, whole_record = start("text", "whole", **options)
    whole.run(whole_record)
    killed, record = start("text", "killed", **options)
    killed.view = Stopping()
    with pytest.raises(StopError):
        killed.run(record)
    killed, record = resume("text", "killed")
    killed.run(record)
    assert isinstance(killed.view, Quiet)
    assert killed.view.began_at == 5
    assert without_seconds(record) == without_seconds(whole_record)
    assert same_weights(killed.model, whole.model)


def test_auto_keeps_its_evidence_over_a_resume() -> None:
    training, record = start("text", "run", loop="custom", policy="auto", limit=64, batch_size=16)
    first = finish(training, record, training.run(record))
    evidence = Profile.load(record.profile_path)
    training, record = resume("text", "run", epochs=3)
    second = finish(training, record, training.run(record))
    assert first["format_times"].keys() == {"bfloat16", "float16"}
    assert second["format_times"] == first["format_times"]
    assert second["plan"] == first["plan"]
    assert [layer["name"] for layer in second["plan"]["layers"]] == ["embedding", "head"]
    later = Profile.load(record.profile_path)
    assert later.get("embedding", "activation") == evidence.get("embedding", "activation")


def test_auto_that_had_too_few_steps_gathers_anew() -> None:
    training, record = start("text", "run", loop="fit", policy="auto", limit=32, epochs=2)
    assert finish(training, record, training.run(record))["plan"] is None
    training, record = resume("text", "run", epochs=6)
    plan = finish(training, record, training.run(record))["plan"]
    assert len(plan["layers"]) == 2
    assert [row["step"] for row in record.metrics()] == list(range(6))


def test_a_plan_is_followed_and_one_for_another_model_refused() -> None:
    Plan.manual({"head": "float32"}, default="bfloat16", framework="keras").save("mine.toml")
    training, record = start("text", "run", policy="mine.toml")
    training.run(record)
    Path("mine.toml").unlink()
    training, record = resume("text", "run", epochs=3)
    training.run(record)
    computed = {path: layer.compute_dtype for path, layer in hw.named_layers(training.model).items()}
    assert (computed["embedding"], computed["head"]) == ("bfloat16", "float32")
    Plan.manual({"encoder": "float32"}, default="bfloat16", framework="keras").save("other.toml")
    with pytest.raises(PlanError, match="names modules that 'EmbeddingBag' does not have: 'encoder'"):
        start("text", "other", policy="other.toml")
    assert not Path("other").exists()


def test_comparison_leaves_the_training_alone() -> None:
    training, record = start("text", "run", policy="mixed_float16", epochs=1)
    training.run(record)
    weights, state = training.model.get_weights(), training.guard.state_dict()
    pair = compare_with_float32(training, pairs=4)
    assert pair.pairs == 4
    assert 0.0 < pair.low <= pair.ratio <= pair.high
    assert min(pair.seconds, pair.seconds_float32) > 0.0
    assert all(np.array_equal(a, b) for a, b in zip(weights, training.model.get_weights(), strict=True))
    assert training.guard.state_dict() == state


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_run_that_the_guard_stops_keeps_its_record(loop: str) -> None:
    training, record = start("image", "run", loop=loop, learning_rate=1e30, limit=320, network="small")
    with pytest.raises(TrainingStopped, match="not a precision problem"):
        training.run(record)
    assert record.events()[-1].kind == "stopped"
    assert record.summary() is None
