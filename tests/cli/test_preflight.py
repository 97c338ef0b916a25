"""`halfwise preflight`: its screen, its JSON, its exit codes, and the plan that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from halfwise.__main__ import main
from halfwise.core.plan import Plan

Halfwise = Callable[..., tuple[int, str, str]]

WORKLOADS = """
import torch
from torch import nn
from halfwise import Workload


def _made(weight):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    nn.init.normal_(net[0].weight, std=weight)
    loss = lambda net, x: net(x).float().square().mean()
    return Workload(model=net, batches=[torch.full((2, 4), 60.0) + torch.rand(2, 4)] * 2, loss=loss)


def sound():
    return _made(0.1)


def hot():
    return _made(2000.0)


def broken():
    made = _made(0.1)
    return Workload(model=made.model, batches=[torch.ones(2, 5)], loss=made.loss)
"""


@pytest.fixture(autouse=True)
def _in_a_directory_with_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("train.py").write_text(WORKLOADS, encoding="utf-8")


@pytest.fixture
def halfwise(capsys: pytest.CaptureFixture[str]) -> Halfwise:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["preflight", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_sound_model_and_one_with_a_hazard(halfwise: Halfwise) -> None:
    code, out, err = halfwise("train.py:sound", "--check")
    assert (code, err) == (0, "")
    assert "READY for mixed_float16 on cuda:ampere" in out
    assert "NOT" not in out
    code, out, err = halfwise("train.py:hot")
    assert (code, err) == (0, "")
    assert "NOT READY for mixed_float16 on cuda:ampere: 1 hazard" in out
    assert "0 (Linear): values do not fit the format" in out
    assert "-o plan.toml" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 1),
        (["--policy", "mixed_bfloat16"], 0),
        (["--policy", "mixed_bfloat16", "--target", "cuda:volta"], 1),
        (["--policy", "float32", "--target", "here"], 0),
    ],
)
def test_check_ends_with_1_on_a_hazard(halfwise: Halfwise, options: list[str], code: int) -> None:
    assert halfwise("train.py:hot", "--check", *options)[0] == code


def test_json_and_the_plan(halfwise: Halfwise) -> None:
    code, out, err = halfwise("train.py:hot", "--json", "-o", "plan.toml")
    assert code == 0
    assert "the plan is in plan.toml" in err
    found = json.loads(out)
    assert (found["verdict"], found["batches"], found["cured"]) == ("hazards", 2, True)
    assert [(hazard["kind"], hazard["module"]) for hazard in found["hazards"]] == [("overflow", "0")]
    plan = Plan.load("plan.toml")
    assert (plan.target, plan.default.compute, plan.compute("0")) == ("cuda:ampere", "float16", "float32")
    assert found["plan"]["layers"][0]["path"] == "0"
    code, out, _ = halfwise("train.py:hot", "-o", "plan.toml")  # a plan may be written again
    assert code == 0
    assert "-o plan.toml" not in " ".join(out.split())


def test_what_is_no_plan_is_not_overwritten(halfwise: Halfwise) -> None:
    Path("notes.toml").write_text("a = 1", encoding="utf-8")
    code, _, err = halfwise("train.py:hot", "-o", "notes.toml")
    assert code == 2
    assert "is no plan, so it is not overwritten" in err
    assert Path("notes.toml").read_text(encoding="utf-8") == "a = 1"


def test_a_loss_scale_of_the_users(halfwise: Halfwise) -> None:
    code, out, _ = halfwise("train.py:sound", "--loss-scale", "16777216", "--json", "--check")
    assert code == 1
    assert json.loads(out)["hazards"][0]["kind"] == "loss_scale"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train.py:sound", "--policy", "auto"], 2, "give the precision to look at"),
        (["train.py:sound", "--policy", "float16"], 2, "mixed_float16"),
        (["train.py:sound", "--target", "gpu"], 2, "unknown target 'gpu'"),
        (["train.py:sound", "--loss-scale", "1000"], 2, "power of two"),
        (["train.py:cold"], 2, "there is no function 'cold'"),
        (["nothing"], 2, "'nothing'"),
        (["train.py:broken"], 1, "shapes cannot be multiplied"),
    ],
)
def test_bad_usage_and_workloads_that_fail(halfwise: Halfwise, arguments: list[str], code: int, message: str) -> None:
    found, out, err = halfwise(*arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_help_has_an_example(halfwise: Halfwise) -> None:
    code, out, _ = halfwise("--help")
    assert code == 0
    assert "halfwise preflight train.py:workload" in out
