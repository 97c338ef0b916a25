"""`halfwise plan`: the plan that `"auto"` would make for a workload, here or on other hardware."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfwise.errors import HalfwiseError, UsageError

if TYPE_CHECKING:
    from halfwise.core.objective import Objective
    from halfwise.core.plan import Plan
    from halfwise.core.workload import Workload

__all__ = ["check_that_it_may_be_written", "plan"]


def plan(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="A built-in name, such as image or text, or path/to/file.py:function or package.module:function "
            "returning a halfwise.Workload.",
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            help="The hardware to plan for: here (measured), or cuda:volta, cuda:ampere, cuda:hopper, cuda:blackwell, "
            "tpu, cpu:amx, cpu:avx2 (estimated)."
        ),
    ] = "here",
    objective: Annotated[
        str, typer.Option(help="What to save: time, memory (kept for the backward pass), or balanced.")
    ] = "time",
    tolerance: Annotated[
        float, typer.Option(help="Share of training's own noise that rounding may add. Default: a tenth.")
    ] = 0.1,
    framework: Annotated[
        Literal["torch", "keras"] | None, typer.Option(help="Of a built-in workload. Default: torch.")
    ] = None,
    backend: Annotated[
        Literal["tensorflow", "jax", "torch"] | None, typer.Option(help="Keras' backend, for a Keras workload.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of a built-in workload's weights and choice of data. Default: 0.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PLAN.toml",
            help="Write the plan. Where it is there already, a layer changes only if it gains more than the noise.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Choose a precision for each layer of a model from its ranges, its sensitivity to rounding, and measured time.

    Nothing is trained, nothing is changed.
    """
    from rich.console import Console

    from halfwise.core.explanation import Sources, explain_plan
    from halfwise.core.options import check_options
    from halfwise.core.record import json_ready
    from halfwise.core.targets import HERE, get_target
    from halfwise.report.explain import plan_screen
    from halfwise.report.words import command_name

    check_options(guard=True, tolerance=tolerance, objective=objective)
    if target != HERE:
        get_target(target)  # an unknown one is told before a framework is loaded
    earlier = check_that_it_may_be_written(output) if output is not None else None
    from halfwise.workloads.load import load_workload

    with Console(stderr=True).status(f"planning {workload} for {target}"):
        loaded = load_workload(workload, framework=framework, backend=backend, seed=seed)
        made = _plan(loaded, target=target, objective=objective, tolerance=tolerance, earlier=earlier)  # type: ignore[arg-type]
    if output is not None:
        made.save(output)
    explanation = explain_plan(Sources(output or Path(workload), made))
    if as_json:
        typer.echo(json.dumps(json_ready(explanation), indent=2, allow_nan=False))
    else:
        keep = "" if output is not None else shlex.join([command_name(), *sys.argv[1:], "-o", "plan.toml"])
        Console().print(plan_screen(explanation, keep=keep))
    if output is not None:
        typer.echo(f"halfwise: the plan is in {output}", err=True)


def _plan(loaded: Workload, *, target: str, objective: Objective, tolerance: float, earlier: Plan | None) -> Plan:
    """The plan for a workload of either framework.

    Raises:
        HalfwiseError: the workload's own code raises.
    """
    from halfwise.workloads.load import told

    options = {"target": target, "objective": objective, "tolerance": tolerance, "earlier": earlier}
    with told(loaded.name or type(loaded.model).__name__):
        if loaded.framework == "keras":
            from halfwise.keras.plan import plan as plan_keras

            batches = list(loaded.batches)
            return plan_keras(loaded.model, batches, loss=loaded.loss, **options)  # type: ignore[arg-type]
        from halfwise.torch.plan import plan as plan_torch

        closures = [partial(loaded.loss, loaded.model, batch) for batch in loaded.batches]
        return plan_torch(loaded.model, closures, **options)  # type: ignore[arg-type]


def check_that_it_may_be_written(output: Path) -> Plan | None:
    """The plan that is in the file; None where there is no file.

    Raises:
        UsageError: the file holds something else, which is not overwritten.
    """
    from halfwise.core.plan_file import read_plan

    if not output.exists():
        return None
    try:
        return read_plan(output)
    except HalfwiseError as error:
        raise UsageError(
            f"--output {output} exists and is no plan, so it is not overwritten ({error}); give another file"
        ) from error
