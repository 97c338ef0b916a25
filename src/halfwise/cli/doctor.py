"""`halfwise doctor`: what this machine can do in each format, and what "auto" would make of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from halfwise.errors import MissingDependencyError

__all__ = ["doctor"]


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda|cuda:N", help="Device to examine. Default: the GPU if there is one, else the CPU."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Measure what this machine does in each format: its units, speed against float32, correctness.

    Takes a few seconds and ends with what the policy "auto" would do here.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError("torch", "torch", "halfwise doctor") from error
    from halfwise.report.doctor import doctor_screen
    from halfwise.torch.hardware import inspect

    stderr = Console(stderr=True)
    columns = (TextColumn("measuring {task.description}"), BarColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        report = inspect(device, progress=lambda what, share: bar.update(task, description=what, completed=share))
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        Console().print(doctor_screen(report))
