"""What the summary of a real run says of other hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfwise.__main__ import main


def test_a_trial_on_a_cpu_tells_what_a_gpu_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", "image", "--epochs", "1", "--limit", "256", "--out", str(run)]) == 0
    told = json.loads((run / "summary.json").read_text(encoding="utf-8"))["elsewhere"]
    assert (told["target"], told["compute"]) == ("cuda:hopper", "bfloat16")
    assert told["relative_time"] < 0.5
    assert {policy: found["verdict"] for policy, found in told["preflight"].items()} == {
        "mixed_float16": "ready",
        "mixed_bfloat16": "ready",
    }
    assert "On a GPU" in capsys.readouterr().out
