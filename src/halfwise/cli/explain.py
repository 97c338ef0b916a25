"""`halfwise explain`: what a plan says about each module, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["explain"]


def explain(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_PLAN", help="A run directory, or a plan.toml.")],
    module: Annotated[
        str | None, typer.Argument(metavar="MODULE", help="A module's path, such as conv or encoder.3.fc2.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the explanation as JSON on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Print what each module computes in and why; with MODULE, everything that is known about that one."""
    from rich.console import Console

    from halfwise.core.explanation import explain_module, explain_plan, read_sources
    from halfwise.core.record import json_ready
    from halfwise.report.explain import module_screen, plan_screen

    sources = read_sources(source)
    explanation = explain_plan(sources) if module is None else explain_module(sources, module)
    if as_json:
        typer.echo(json.dumps(json_ready(explanation), indent=2, allow_nan=False))
    else:
        Console().print(plan_screen(explanation) if module is None else module_screen(explanation))
