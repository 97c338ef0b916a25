"""`halfwise plan` for workloads in Keras."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest

from halfwise.__main__ import main
from halfwise.core.plan import Plan

BACKEND = keras.backend.backend()
OTHER = "jax" if BACKEND != "jax" else "torch"
MINE = """
import keras, numpy as np, halfwise

def workload():
    hidden, head = keras.layers.Dense(8, name="hidden"), keras.layers.Dense(1, name="head")
    model = keras.Sequential([keras.Input((4,)), hidden, head])
    batches = [(np.ones((16, 4), "float32"), np.zeros((16, 1), "float32"))] * 3
    return halfwise.Workload(model=model, batches=batches, loss="mse")
"""


def test_a_built_in_workload(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "text", "--framework", "keras", "--backend", BACKEND, "--target", "cuda:volta", "--seed", "1"]
    code = main([*command, "--json"])
    out, _ = capsys.readouterr()
    assert code == 0
    found = json.loads(out)
    assert {layer["name"]: layer["reason"] for layer in found["layers"]}["head"] == "hazard"  # it is a softmax


def test_a_workload_of_ones_own_is_known_by_its_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    code = main(["plan", f"{tmp_path / 'mine.py'}:workload", "--target", "cuda:ampere", "-o", str(tmp_path / "p.toml")])
    out, _ = capsys.readouterr()
    assert code == 0
    assert "an estimate for cuda:ampere" in " ".join(out.split())
    plan = Plan.load(tmp_path / "p.toml")
    assert (plan.framework, plan.compute("hidden")) == ("keras", "bfloat16")


def test_another_backend_than_the_one_that_runs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gan", "--framework", "keras", "--backend", OTHER]) == 2
    _, err = capsys.readouterr()
    assert f"Keras runs with {BACKEND!r} in this process already" in " ".join(err.split())
