"""The examples run as they stand, and say what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISES = {
    "keras_custom_loop.py": "embedding in bfloat16",
    "keras_fit.py": "auto chose",
    "train_loop.py": "auto chose",
    "watch_existing_loop.py": "wide aten.addmm",
}


def test_all_examples_are_here() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", sorted(PROMISES))
def test_example(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
