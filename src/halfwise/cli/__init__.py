"""The command line. One file per command: it parses, calls and prints; the work is done elsewhere.

A command's file imports nothing heavier than typer at its top: numpy and the frameworks load inside the command, so
that `halfwise --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from halfwise import __version__
from halfwise.cli.doctor import doctor
from halfwise.cli.explain import explain
from halfwise.cli.plan import plan
from halfwise.cli.preflight import preflight
from halfwise.cli.train import train

__all__ = ["app"]

app = typer.Typer(
    name="halfwise",
    help="Mixed-precision training that decides from evidence, survives numerical accidents and explains itself.",
    epilog="Start with: halfwise doctor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"halfwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself; `version` has done its work in its callback."""


# One line per command, in the order in which the help lists them.
app.command(epilog="Example: halfwise doctor --device cpu --json > doctor.json")(doctor)
app.add_typer(train, name="train")
app.command(epilog="Example: halfwise plan train.py:workload --target cuda:ampere -o plan.toml")(plan)
app.command(epilog="Example: halfwise preflight train.py:workload --target cuda:ampere --check")(preflight)
app.command(epilog="Example: halfwise explain runs/image-auto-1 conv")(explain)
