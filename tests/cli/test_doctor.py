"""`halfwise doctor`, in this process and as a command: what it prints, and where."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from halfwise.cli import app
from halfwise.core.formats import FORMATS
from halfwise.core.hardware import OPERATIONS, FormatSupport, HardwareReport, advice
from halfwise.errors import UsageError
from halfwise.report.doctor import doctor_screen


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "halfwise", *arguments], capture_output=True, text=True, check=False)


def test_json_is_the_only_thing_on_stdout() -> None:
    done = run("doctor", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["device"] == "cpu"
    assert "torch" in report["frameworks"]
    assert list(report["formats"]) == list(FORMATS)
    for support in report["formats"].values():
        assert support["support"] in ("native", "emulated", "absent")
        assert list(support["relative_time"]) == list(OPERATIONS)
        assert isinstance(support["correct"], bool)
        assert set(support["lower_bounds"]) <= set(OPERATIONS)
    assert report["advice"] == advice(HardwareReport.from_dict(report))
    assert done.stderr == ""  # no progress bar where stderr is no terminal


def test_the_screen_ends_with_the_advice() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    for name in FORMATS:
        assert name in result.stdout
    last_lines = " ".join(result.stdout.split()).partition("Advice ")[2]
    assert last_lines.startswith('"auto" would ')
    assert last_lines.endswith(".")


def test_help_has_an_example() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "Example: halfwise doctor" in result.stdout


def test_an_unknown_device_is_bad_usage() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "abacus"])
    assert isinstance(result.exception, UsageError)
    done = run("doctor", "--device", "abacus", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "device 'abacus' cannot be inspected. Here: 'cpu'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch_the_message_is_the_pip_command() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"  # what Python itself does to forbid an import
        "from halfwise.__main__ import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "halfwise: halfwise doctor needs the package 'torch': pip install \"halfwise[torch]\""


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_fits_and_shows_bounds_gaps_and_faults(width: int) -> None:
    broken = FormatSupport(
        "emulated",
        dict(zip(OPERATIONS, (131.7, 1055.2, None, 0.42), strict=True)),
        lower_bounds=("matmul", "conv"),
        faults=("norm: relative error [0.31], at most 0.063 is sound",),
    )
    formats = {name: FormatSupport("absent") for name in FORMATS}
    formats["float32"] = FormatSupport("native", dict.fromkeys(OPERATIONS, 1.0), correct=True)
    formats["float16"] = FormatSupport("native", dict.fromkeys(OPERATIONS, 0.5), faults=("conv: [red] herring",))
    report = HardwareReport(
        "cuda:0", "A GPU with quite a long name", ("24 GiB",), {"torch": "2.13.0"}, formats | {"float8_e4m3fn": broken}
    )
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(doctor_screen(report))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == ["float8_e4m3fn", "emulated"])
    assert row == ["float8_e4m3fn", "emulated", ">", "132", ">", "1055", "-", "0.42", "wrong"]
    assert "norm: relative error [0.31], at most 0.063 is sound" in text
    assert "float16 gives wrong results (conv: [red] herring)" in " ".join(text.split())  # no markup in data
    assert '">" means at least' in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
