"""`halfwise train --framework keras`, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from halfwise.__main__ import main
from halfwise.core.record import RunRecord

BACKEND = keras.backend.backend()
OTHER = "jax" if BACKEND != "jax" else "torch"
QUICK = ["train", "text", "--framework", "keras", "--limit", "160", "--batch-size", "32", "--policy", "mixed_bfloat16"]


def test_the_backend_is_the_one_that_is_asked_for_and_torch_is_imported_only_for_itself() -> None:
    program = f"""
        import sys
        from halfwise.__main__ import main
        code = main({[*QUICK, "--epochs", "1", "--backend", BACKEND, "--out", "run"]!r})
        print("torch" in sys.modules, code)
    """
    environment = {**os.environ, "KERAS_BACKEND": OTHER}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.stdout.splitlines()[-1] == f"{BACKEND == 'torch'} 0", done.stderr
    assert f"Keras on {BACKEND}, seed 0" in " ".join(done.stdout.split())
    summary = RunRecord.open("run").summary()
    assert summary is not None
    assert (summary["backend"], summary["loop"]) == (BACKEND, "fit")


def test_a_killed_fit_goes_on_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--epochs", "40", "--out", "whole"]) == 0
    run = subprocess.Popen(
        [sys.executable, "-m", "halfwise", *QUICK, "--epochs", "40", "--out", "killed"], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 100
    while not Path("killed/metrics.jsonl").exists() or Path("killed/metrics.jsonl").read_bytes().count(b"\n") < 30:
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert len(RunRecord.open("killed").metrics()) < 200
    assert main(["train", "text", "--out", "killed", "--resume", "--json"]) == 0
    whole, killed = RunRecord.open("whole"), RunRecord.open("killed")
    rows = [[{**row, "seconds": 0.0} for row in record.metrics()] for record in (whole, killed)]
    assert rows[0] == rows[1]
    models = [keras.saving.load_model(record.checkpoint_path / "model.keras") for record in (whole, killed)]
    assert all(np.array_equal(a, b) for a, b in zip(*(model.get_weights() for model in models), strict=True))
    assert [path.name for path in killed.directory.glob("checkpoint*")] == ["checkpoint"]
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("\n{") :])["run"] == "killed"


def test_a_backend_other_than_the_running_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "text", "--framework", "keras", "--backend", OTHER]) == 2
    assert f"Keras runs with {BACKEND!r} in this process already" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_settings_of_a_run_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--epochs", "1", "--loop", "custom", "--out", "run"]) == 0
    for option, value, told in (
        ("--loop", "fit", "with --loop custom, not fit"),
        ("--framework", "torch", "with --framework keras, not torch"),
        ("--backend", OTHER, f"with --backend {BACKEND}, not {OTHER}"),
    ):
        assert main(["train", "text", "--out", "run", "--resume", option, value]) == 2
        assert f"was started {told}" in capsys.readouterr().err
