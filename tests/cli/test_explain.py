from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from halfwise.__main__ import main
from halfwise.core.plan import Default, Plan, Rule

Halfwise = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    rule = Rule(path="head", compute="float32", reason="range", detail="largest 1e5", evidence={"largest": 1e5})
    Plan(model="Net", default=Default(compute="bfloat16", reason="faster"), layers=(rule,)).save("plan.toml")


@pytest.fixture
def halfwise(capsys: pytest.CaptureFixture[str]) -> Halfwise:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        printed = capsys.readouterr()
        return code, " ".join(printed.out.split()), " ".join(printed.err.split())

    return call


def test_a_plan_and_a_module(halfwise: Halfwise) -> None:
    code, out, err = halfwise("explain", "plan.toml")
    assert (code, err) == (0, "")
    assert "Default bfloat16, because the format is faster here" in out
    assert "head float32 its values would not fit the format: largest 1e5" in out
    code, out, err = halfwise("explain", "plan.toml", "head")
    assert (code, err) == (0, "")
    assert "largest value 1e+05" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "plan.toml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["default"]["compute"], plan["layers"][0]["name"]) == ("Net", "bfloat16", "head")
    assert main(["explain", "plan.toml", "head", "--json"]) == 0
    module = json.loads(capsys.readouterr().out)
    assert (module["compute"], module["reason"], module["evidence"]) == ("float32", "range", {"largest": 1e5})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "'none' does not exist; give a plan file (plan.toml) or a run directory"),
        (["plan.toml", "haed"], "knows no module 'haed'; did you mean 'head'?"),
        (["."], "'.' holds no run"),
        (["broken.toml"], "broken.toml: not valid TOML"),
    ],
)
def test_bad_usage_is_one_clear_error(halfwise: Halfwise, arguments: list[str], message: str) -> None:
    Path("broken.toml").write_text("[")
    code, out, err = halfwise("explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("halfwise: ")
    assert message in err


def test_a_run_of_the_image_workload(halfwise: Halfwise, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--limit", "96", "--batch-size", "32", "--epochs", "2", "--policy", "auto", "--out", "run"]
    assert halfwise("train", "image", *settings)[0] == 0
    code, out, err = halfwise("explain", "run")
    assert (code, err) == (0, "")
    assert "torch for ConvNet" in out
    assert "after 6 steps, 0 skipped" in out
    code, out, err = halfwise("explain", "run", "conv")
    assert (code, err) == (0, "")
    assert "Module conv (Conv2d)" in out
    assert main(["explain", "run", "conv", "--json"]) == 0
    ranges = json.loads(capsys.readouterr().out)["ranges"]
    assert set(ranges) == {"activation", "weight", "activation_gradient", "weight_gradient"}
    assert ranges["weight"]["values"] % (32 * 9 + 32) == 0
    assert 0.0 < ranges["activation"]["largest"] < 100.0
    code, _, err = halfwise("explain", "run", "convv")
    assert code == 2
    assert "did you mean 'conv'" in err
