"""Gathering sensitivities over batches."""

from __future__ import annotations

import math

import pytest

from halfwise.core.sensitivity import LayerSensitivity, Sensitivity, SensitivityRecord


def test_scores_of_calls_add_and_those_of_batches_are_averaged() -> None:
    record = SensitivityRecord()
    record.add_score("shared", "float16", 1.0)
    record.add_score("shared", "float16", 2.0)  # a second call in the same batch
    record.end_batch(0.5)
    record.add_score("shared", "float16", 5.0)
    record.end_batch(1.5)
    found = record.sensitivity()
    assert found.get("shared", "float16") == LayerSensitivity(score=4.0)
    assert (found.loss, found.loss_noise, record.batches) == (1.0, 0.5, 2)


def test_a_layer_that_runs_in_some_batches_is_averaged_over_those() -> None:
    record = SensitivityRecord()
    record.add_score("expert", "float16", 4.0)
    record.end_batch(1.0)
    record.end_batch(1.0)
    found = record.sensitivity().get("expert", "float16")
    assert found is not None
    assert found.score == 4.0


def test_a_batch_that_is_dropped_leaves_nothing() -> None:
    record = SensitivityRecord()
    record.add_score("fc", "float16", math.inf)
    record.add_gradient("fc", norm=math.inf)
    record.add_gradient_error("fc", "float16", math.nan)
    record.drop_batch()
    record.add_score("fc", "float16", 1.0)
    record.add_gradient_error("fc", "float16", 0.25)
    record.add_gradient("fc", norm=2.0)
    record.end_batch(1.0)
    found = record.sensitivity({"fc": 2.0})
    assert found.get("fc", "float16") == LayerSensitivity(1.0, 0.25)
    assert found.gradient_noise == {"fc": 0.0}  # one batch tells no noise


@pytest.mark.parametrize(
    ("norms", "mean_norm", "noise"),
    [
        ([1.0, 1.0], 1.0, 0.0),  # the same gradient twice
        ([1.0, 1.0], math.sqrt(0.5), 1.0),  # orthogonal ones
        ([1.0, 1.0], 0.0, 1.0),  # opposite ones
        ([1.0, 1.0, 1.0], math.sqrt(0.9), math.sqrt(0.15)),
    ],
)
def test_gradient_noise(norms: list[float], mean_norm: float, noise: float) -> None:
    record = SensitivityRecord()
    for norm in norms:
        record.add_gradient("fc", norm=norm)
        record.end_batch(1.0)
    assert record.sensitivity({"fc": mean_norm, "unknown": 1.0}).gradient_noise == {"fc": pytest.approx(noise)}


def test_the_loss_change_of_a_plan_is_the_root_of_the_summed_scores() -> None:
    scores = {"a": {"float16": LayerSensitivity(9.0)}, "b": {"float16": LayerSensitivity(16.0)}}
    found = Sensitivity(scores)
    assert found.loss_change({"a": "float16", "b": "float16"}) == 5.0
    assert found.loss_change({"a": "float16", "b": "float32", "c": "float16"}) == 3.0
    assert found.loss_change({}) == 0.0
