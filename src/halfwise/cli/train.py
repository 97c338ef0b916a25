"""`halfwise train`: train a built-in workload on real data and see what the policy did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from halfwise.errors import TrainingStopped, UsageError

__all__ = ["train"]

train = typer.Typer(no_args_is_help=True, help="Train a built-in workload on real data.")

Framework = Annotated[str | None, typer.Option(metavar="torch|keras", help="Framework to train with. Default: torch.")]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="tensorflow|jax|torch",
        help="Keras' backend. Default: that of KERAS_BACKEND, else the first one that is installed.",
    ),
]
Loop = Annotated[
    str | None,
    typer.Option(metavar="fit|custom", help="With Keras: model.fit, or a loop over batches. Default: fit."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY_OR_PLAN",
        help="auto, float32, mixed_float16, mixed_bfloat16, or the path of a plan.toml. Default: auto.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Inputs per step. Default: 64.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Decides weights and data order. Default: 0.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use at most so many inputs for training and for testing, for a quick look.")
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(min=1, metavar="STEPS", help="Steps between checkpoints. Default: one a minute, and each epoch."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Run directory. Default: a new one, runs/WORKLOAD-POLICY-NUMBER.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly where it stood.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON on stdout; everything else goes to stderr.")
]


@train.command(epilog="Example: halfwise train image --policy auto --out runs/first")
def image(
    framework: Framework = None,
    backend: Backend = None,
    loop: Loop = None,
    policy: Policy = None,
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
    batch_size: BatchSize = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's learning rate. Default: 0.001.")] = None,
    seed: Seed = None,
    limit: Limit = None,
    checkpoint_every: CheckpointEvery = None,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a convolutional image classifier, and say what the policy did and what it cost.

    The run directory holds plan, metrics, events, checkpoint and summary.
    Killed at whatever moment, a run goes on with --resume, exact to the last bit.
    """
    given = {
        "framework": framework,
        "backend": backend,
        "loop": loop,
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
    _train("image", given, out, resume, as_json)


@train.command(epilog="Example: halfwise train text --framework keras --backend jax --policy mixed_bfloat16")
def text(
    framework: Framework = None,
    backend: Backend = None,
    loop: Loop = None,
    policy: Policy = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="sotu (6,000 passages of real speeches), a file of JSON lines with text and label, or a directory "
            "with train.jsonl and test.jsonl. Default: sotu.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data. Default: 10 for sotu, 5 for a path.")
    ] = None,
    batch_size: BatchSize = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's learning rate. Default: 0.003.")] = None,
    seed: Seed = None,
    limit: Limit = None,
    checkpoint_every: CheckpointEvery = None,
    out: Out = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a text classifier (embedding, mean over the words, dense), and say what the policy did and what it cost.

    The run directory holds plan, metrics, events, checkpoint and summary.
    Killed at whatever moment, a run goes on with --resume, exact to the last bit.
    """
    given = {
        "framework": framework,
        "backend": backend,
        "loop": loop,
        "policy": policy,
        "data": data,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "limit": limit,
        "checkpoint_every": checkpoint_every,
    }
    _train("text", given, out, resume, as_json)


def _train(workload: str, options: Mapping[str, object], out: Path | None, resume: bool, as_json: bool) -> None:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if resume and out is None:
        raise UsageError("--resume needs the run to go on with: add --out DIR, the directory that the run printed.")
    rate = given.get("learning_rate", 1.0)
    if not (isinstance(rate, float) and 0.0 < rate < float("inf")):
        raise UsageError(f"--learning-rate {rate} cannot be used; give a positive number, such as 0.001.")
    from rich.console import Console

    from halfwise.core.diagnosis import VERDICTS
    from halfwise.core.record import json_ready
    from halfwise.report.train import TrainingView, training_screen
    from halfwise.workloads.runs import finish, new_run, resumed_run
    from halfwise.workloads.settings import Settings

    console = Console(stderr=as_json)
    record = None
    try:
        with TrainingView(console) as view:
            if resume and out is not None:
                training, record = resumed_run(workload, out, given, view)
            else:
                training, record = new_run(Settings.of(workload, **given), out, view)
            results = training.run(record)
            summary = finish(training, record, results)
    except KeyboardInterrupt:
        kept = ""
        if record is not None:
            kept = f"; the run is kept. Go on with:\n  halfwise train {workload} --out {record.directory} --resume"
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
