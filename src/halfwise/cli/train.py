"""`halfwise train`: train a built-in workload on real data and see what the policy did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from halfwise.errors import MissingDependencyError, TrainingStopped, UsageError

__all__ = ["train"]

train = typer.Typer(no_args_is_help=True, help="Train a built-in workload on real data.")


@train.command(epilog="Example: halfwise train image --policy auto --out runs/first")
def image(
    framework: Annotated[str, typer.Option(metavar="torch", help="Framework to train with.")] = "torch",
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY_OR_PLAN",
            help="auto, float32, mixed_float16, mixed_bfloat16, or the path of a plan.toml. Default: auto.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_DIR", help="digits, or a directory with MNIST-style IDX files. Default: digits."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="convnet|small", help="convnet: conv, pool, dense, dense. small: conv, dense. Default: convnet."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data. Default: 20 for digits, 5 for a directory.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per step. Default: 64.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's learning rate. Default: 0.001.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides weights and data order. Default: 0.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Use at most so many images for training and for testing, for a quick look."),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="STEPS", help="Steps between checkpoints. Default: one a minute, and after each epoch."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory. Default: a new one, runs/image-POLICY-NUMBER.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, exactly where it stood.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON on stdout; everything else goes to stderr.")
    ] = False,
) -> None:
    """Train a convolutional image classifier, and say what the policy did and what it cost.

    The run directory holds plan, metrics, events, checkpoint and summary.
    Killed at whatever moment, a run goes on with --resume, exact to the last bit.
    """
    given = {
        "policy": policy,
        "data": data,
        "network": network,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "limit": limit,
        "checkpoint_every": checkpoint_every,
    }
    _image(framework, {name: value for name, value in given.items() if value is not None}, out, resume, as_json)


def _image(framework: str, given: dict[str, object], out: Path | None, resume: bool, as_json: bool) -> None:
    if framework != "torch":
        raise UsageError(f"--framework {framework!r} cannot be used; allowed: 'torch' (Keras is to come).")
    if resume and out is None:
        raise UsageError("--resume needs the run to go on with: add --out DIR, the directory that the run printed.")
    rate = given.get("learning_rate", 1.0)
    if not (isinstance(rate, float) and 0.0 < rate < float("inf")):
        raise UsageError(f"--learning-rate {rate} cannot be used; give a positive number, such as 0.001.")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "halfwise train") from error
    from rich.console import Console

    from halfwise.core.diagnosis import VERDICTS
    from halfwise.core.record import json_ready
    from halfwise.report.train import TrainingView, training_screen
    from halfwise.workloads.runs import finish, new_run, resumed_run
    from halfwise.workloads.settings import ImageSettings

    console = Console(stderr=as_json)
    record = None
    try:
        with TrainingView(console) as view:
            if resume and out is not None:
                training, record = resumed_run(out, given, view)
            else:
                settings = ImageSettings.of(**given)
                training, record = new_run(settings, out, view)
            results = training.run(record)
            summary = finish(training, record, results)
    except KeyboardInterrupt:
        kept = f"; the run is kept. Go on with:\n  {_resume_command(record.directory)}" if record is not None else ""
        typer.echo(f"halfwise: interrupted{kept}", err=True)
        raise typer.Exit(130) from None
    except TrainingStopped as stopped:
        where = f" The run up to here is kept: halfwise explain {record.directory}" if record is not None else ""
        typer.echo(f"halfwise: training stopped: {VERDICTS[stopped.diagnosis.verdict]}.{where}", err=True)
        raise typer.Exit(1) from None  # the guard has printed its diagnosis
    if as_json:
        typer.echo(json.dumps(json_ready({"run": str(record.directory), **summary}), indent=2, allow_nan=False))
    else:
        console.print(training_screen(summary, str(record.directory)))


def _resume_command(directory: Path) -> str:
    return f"halfwise train image --out {directory} --resume"
