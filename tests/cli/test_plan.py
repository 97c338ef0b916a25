"""The command `halfwise plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfwise.__main__ import main
from halfwise.core.plan import Plan

SLOW = """
import torch, halfwise

def workload():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    batches = list(torch.randn(3, 16, 4))
    return halfwise.Workload(model=model, batches=batches, loss=lambda m, x: m(x).square().mean())
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SLOW, encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:workload"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_plan_for_this_machine(capsys: pytest.CaptureFixture[str], workload: str) -> None:
    code, out, _ = run(capsys, workload)
    assert code == 0
    assert "target: here" in out
    assert "Default" in out
    assert "Keep it" in out


def test_a_plan_for_another_target_is_written_and_read(
    capsys: pytest.CaptureFixture[str], workload: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.toml"
    code, out, err = run(capsys, workload, "--target", "cuda:ampere", "-o", str(file))
    assert code == 0
    assert "an estimate for cuda:ampere" in " ".join(out.split())
    assert f"the plan is in {file}" in err
    plan = Plan.load(file)
    assert (plan.target, plan.compute("0")) == ("cuda:ampere", "bfloat16")
    assert run(capsys, workload, "--target", "cuda:ampere", "-o", str(file))[0] == 0  # over an earlier plan
    assert main(["explain", str(file), "0"]) == 0


def test_json_is_all_that_is_on_stdout(capsys: pytest.CaptureFixture[str], workload: str) -> None:
    code, out, _ = run(capsys, workload, "--target", "cuda:volta", "--objective", "memory", "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0
    assert found["default"]["compute"] == "float16"
    assert found["loss_scale"]["initial"] >= 1.0
    assert {layer["name"] for layer in found["layers"]} == {"0", "2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cuda:fermi"], "unknown target 'cuda:fermi': use one of here, cuda:volta"),
        (["--objective", "speed"], "objective is 'speed'"),
        (["--tolerance", "0"], "tolerance is 0.0"),
        (["-o", "{folder}/mine.py"], "is no plan, so it is not overwritten"),
    ],
)
def test_bad_usage(
    capsys: pytest.CaptureFixture[str], workload: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, workload, *(argument.format(folder=tmp_path) for argument in arguments))
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_workload_that_raises_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(SLOW.replace("m(x).square()", "m(x[:, :3]).square()"), encoding="utf-8")
    code, _, err = run(capsys, f"{tmp_path / 'bad.py'}:workload")
    assert code == 1
    assert "raised RuntimeError" in err
