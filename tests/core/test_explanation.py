from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from halfwise.core.diagnosis import Incident
from halfwise.core.explanation import explain_module, explain_plan, read_sources
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Default, Plan, Rule
from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord, json_ready
from halfwise.errors import DataError, PlanError, UsageError

PLAN = Plan(
    default=Default(compute="float16", reason="policy", saved_activations="bfloat16"),
    loss_scale=LossScaleSettings(initial=3000.0),
    layers=(
        Rule(path="encoder", compute="float32", reason="healed", detail="why", evidence={"largest": 7.0}),
        Rule(pattern="decoder.*.norm", compute="float32"),
    ),
)
INCIDENT = Incident(
    step=3, kind="healed", verdict="overflow_at_every_scale", module="encoder", suspects=("encoder", "head")
)


def a_run(directory: Path) -> Path:
    modules = {"": "Net", "encoder": "Linear", "encoder.inner": "Tanh", "head": "Linear"}
    record = RunRecord.create(directory, {"modules": modules})
    PLAN.save(record.plan_path)
    tiny = ExponentHistogram.of(np.array([0.0, 1.0, 2e-11, 1e6], np.float32))
    Profile({("head", "activation"): tiny, ("head", "weight_gradient"): tiny}).save(record.profile_path)
    record.append_event(INCIDENT)
    record.close()
    return directory


def test_a_plan_file(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.toml")
    explanation = explain_plan(read_sources(tmp_path / "plan.toml"))
    assert explanation["default"]["compute"] == "float16"
    assert explanation["default"]["saved_activations"] == "bfloat16"
    assert "parameters" not in explanation["default"]
    assert explanation["loss_scale"]["initial"] == 3000.0
    assert [layer["name"] for layer in explanation["layers"]] == ["encoder", "decoder.*.norm"]
    assert explanation["layers"][0]["reason_text"].startswith("it failed in training")
    assert (explanation["incidents"], explanation["run"]) == ([], None)
    json.dumps(json_ready(explanation), allow_nan=False)


def test_a_run(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run")
    explanation = explain_plan(read_sources(directory))
    assert explanation["incidents"] == [INCIDENT.as_dict()]
    assert explanation["run"] is None
    numbers = {"policy": "auto", "test_accuracy": 0.5, "steps": 3, "skipped_steps": 1, "step_time": None, "seed": 4}
    RunRecord.open(directory).write_summary(numbers)
    del numbers["seed"]
    assert explain_plan(read_sources(directory))["run"] == numbers


def test_modules_of_a_run(tmp_path: Path) -> None:
    sources = read_sources(a_run(tmp_path / "run"))
    encoder = explain_module(sources, "encoder")
    assert (encoder["class"], encoder["from"]) == ("Linear", "encoder")
    assert (encoder["reason"], encoder["evidence"]) == ("healed", {"largest": 7.0})
    assert (encoder["ranges"], len(encoder["incidents"])) == ({}, 1)
    assert explain_module(sources, "encoder.inner")["from"] == "encoder"
    assert explain_module(sources, "decoder.0.norm")["from"] == "decoder.*.norm"
    head = explain_module(sources, "head")
    assert (head["from"], head["compute"], len(head["incidents"])) == ("default", "float16", 1)
    assert head["loss_scale"] == 2048.0
    activation, gradient = head["ranges"]["activation"], head["ranges"]["weight_gradient"]
    assert (activation["values"], activation["zeros"], activation["nans"], activation["infinities"]) == (4, 1, 0, 0)
    assert activation["largest"] >= 1e6
    assert activation["overflow_float16"] == activation["underflow_float16"] == pytest.approx(1 / 3)
    assert activation["overflow_bfloat16"] == activation["underflow_bfloat16"] == 0.0
    assert gradient["underflow_float16"] == 0.0  # 2e-11 * 2048 rounds to something


def test_unknown_modules(tmp_path: Path) -> None:
    sources = read_sources(a_run(tmp_path / "run"))
    with pytest.raises(PlanError, match=r"knows no module 'encodr'; did you mean 'encoder'"):
        explain_module(sources, "encodr")
    with pytest.raises(PlanError, match=r"it knows 'encoder', 'encoder\.inner', 'head'"):
        explain_module(sources, "xyz")
    Plan.manual(default="bfloat16").save(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match="bfloat16 everywhere"):
        explain_module(read_sources(tmp_path / "plan.toml"), "encoder")


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; give a plan file"):
        read_sources(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no run"):
        read_sources(tmp_path)
    RunRecord.create(tmp_path / "young", {})
    with pytest.raises(UsageError, match="has no plan yet"):
        read_sources(tmp_path / "young")
    (tmp_path / "plan.toml").write_text("x")
    with pytest.raises(PlanError, match=r"plan\.toml"):
        read_sources(tmp_path / "plan.toml")
    (a_run(tmp_path / "run") / "profile.npz").write_bytes(b"no zip")
    with pytest.raises(DataError, match="profile"):
        read_sources(tmp_path / "run")
