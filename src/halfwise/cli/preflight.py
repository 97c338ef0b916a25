"""`halfwise preflight`: what a model would do under a policy on hardware that is not at hand."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfwise.cli.plan import check_that_it_may_be_written

if TYPE_CHECKING:
    from halfwise.core.preflight import Preflight
    from halfwise.core.workload import Workload

__all__ = ["preflight"]


def preflight(
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
            help="The hardware to train on: cuda:volta, cuda:ampere, cuda:hopper, cuda:blackwell, tpu, cpu:amx, "
            "cpu:avx2, or here."
        ),
    ] = "cuda:ampere",
    policy: Annotated[
        str,
        typer.Option(help="mixed_float16, mixed_bfloat16, float8, tensorfloat32 or float32."),
    ] = "mixed_float16",
    framework: Annotated[
        Literal["torch", "keras"] | None, typer.Option(help="Of a built-in workload. Default: torch.")
    ] = None,
    backend: Annotated[
        Literal["tensorflow", "jax", "torch"] | None, typer.Option(help="Keras' backend, for a Keras workload.")
    ] = None,
    loss_scale: Annotated[
        float | None, typer.Option(help="For float16, the scale that training uses. Default: one that suits.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PLAN.toml", help="Write the plan that cures what was found."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="End with exit code 1 where there is a hazard, for CI.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as JSON on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Find out on a CPU what a model would do in half precision on a GPU: what overflows, vanishes or does not run.

    Ends with the smallest change that cures it, tried out. Nothing is trained, nothing is changed.
    """
    from rich.console import Console

    from halfwise.core.preflight import not_native, preflight_policy
    from halfwise.core.record import json_ready
    from halfwise.report.preflight import preflight_screen
    from halfwise.report.words import command_name

    policy = preflight_policy(policy)
    not_native(policy, target)  # an unknown target is told before a framework is loaded
    from halfwise.workloads.load import load_workload

    if output is not None:
        check_that_it_may_be_written(output)
    with Console(stderr=True).status(f"running {workload} in float32 and under {policy}, by the rules of {target}"):
        loaded = load_workload(workload, framework=framework, backend=backend)
        found = _look(loaded, policy=policy, target=target, loss_scale=loss_scale)
    if output is not None and found.plan is not None:
        found.plan.save(output)
    if as_json:
        typer.echo(json.dumps(json_ready(found.as_dict()), indent=2, allow_nan=False))
    else:
        again = shlex.join([command_name(), *sys.argv[1:]]) if output is None else ""
        Console().print(preflight_screen(found, command=again))
    if output is not None:
        said = f"the plan is in {output}" if found.plan is not None else f"no plan cures it: {output} was not written"
        typer.echo(f"halfwise: {said}", err=True)
    if check and not found.ready:
        raise typer.Exit(1)


def _look(loaded: Workload, *, policy: str, target: str, loss_scale: float | None) -> Preflight:
    """The preflight of a workload of either framework.

    Raises:
        HalfwiseError: the workload's own code raises in float32.
    """
    from halfwise.workloads.load import told

    with told(loaded.name or type(loaded.model).__name__):
        if loaded.framework == "keras":
            from halfwise.keras.preflight import preflight as look_at_keras

            return look_at_keras(loaded.model, loaded.batches, loss=loaded.loss, policy=policy, target=target)
        from halfwise.torch.preflight import preflight as look_at_torch

        closures = [partial(loaded.loss, loaded.model, batch) for batch in loaded.batches]
        return look_at_torch(
            loaded.model, closures, policy=policy, target=target, optimizer=loaded.optimizer, loss_scale=loss_scale
        )
