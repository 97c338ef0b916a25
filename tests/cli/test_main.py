"""The entry point: exit codes, one message instead of a traceback, a help that starts fast."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from halfwise.__main__ import main
from halfwise.errors import (
    DataError,
    HalfwiseError,
    MissingDependencyError,
    PlanError,
    PolicyError,
    UsageError,
)


def raising(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such thing"), 2),
        (PolicyError("no such policy"), 2),
        (PlanError("no such plan"), 2),
        (DataError("no such data"), 2),
        (HalfwiseError("it failed"), 1),
        (MissingDependencyError("torch", "torch", "training"), 1),
    ],
)
def test_an_error_becomes_one_message_and_a_code(
    error: HalfwiseError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("halfwise.cli.app", raising(error))
    assert main([]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"halfwise: {error}\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfwise.cli.app", raising(KeyboardInterrupt()))
    assert main([]) == 130


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfwise.cli.app", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main([])


def test_a_command_that_sets_its_exit_code_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfwise.cli.app", raising(typer.Exit(7)))
    assert main([]) == 7


def test_help_is_fine_and_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["doctr"], ["doctor", "--devise", "cpu"], ["doctor", "spare"]])
def test_a_mistyped_command_line_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Usage: halfwise" in printed.err


def test_help_imports_neither_numpy_nor_a_framework() -> None:
    script = (
        "import sys\n"
        "from halfwise.__main__ import main\n"
        "assert main(['--help']) == 0 and main(['doctor', '--help']) == 0\n"
        "heavy = {'numpy', 'ml_dtypes', 'torch', 'keras', 'tensorflow', 'jax', 'numba', 'tomlkit', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_python_m_halfwise_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "halfwise", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage: halfwise" in done.stdout


def test_version() -> None:
    import halfwise

    done = subprocess.run([sys.executable, "-m", "halfwise", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == f"halfwise {halfwise.__version__}"
