"""`halfwise train` on the screen: what happens while it happens, and the closing summary. From data only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from halfwise.core.diagnosis import Incident
from halfwise.report.tables import because, facts, incident_text, plain, plan_table
from halfwise.report.words import command_name, count, ratio_text, seconds_text

__all__ = ["TrainingView", "training_screen"]

_MOST_LAYERS = 12
_MOST_INCIDENTS = 5


class TrainingView:
    """A line per epoch and, on a terminal, a live bar below. A context manager.

    Args:
        console: where to print; the bar is off where it is no terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._epochs = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, *, epochs: int, steps_per_epoch: int, step: int) -> None:
        """Training begins, or goes on, at `step`."""
        self._epochs = epochs
        if step:
            done = step >= epochs * steps_per_epoch
            where = f"epoch {step // steps_per_epoch + 1} of {epochs}"
            self.message("all epochs are done already" if done else f"going on at step {step:,}, {where}")
        total = epochs * steps_per_epoch
        self._task = self._progress.add_task("training", total=total, completed=step, state="")

    def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
        """A step is done."""
        epoch = f"epoch {row['epoch'] + 1:>{len(str(self._epochs))}}/{self._epochs}"
        if self._task is not None:
            state = f"loss {row['loss']:.4f}  accuracy {accuracy:.3f}{_scale_and_skips(row, skipped)}"
            self._progress.update(self._task, advance=1, description=epoch, state=state)
        if "test_accuracy" in row:
            self._console.print(
                f"{epoch}  loss {row['train_loss']:.4f}  accuracy {row['train_accuracy']:.3f}  "
                f"[bold]test accuracy {row['test_accuracy']:.3f}[/]{_scale_and_skips(row, skipped)}",
                highlight=False,
            )

    def measuring(self) -> None:
        """Training is over, and the step time is measured."""
        if self._task is not None:
            self._progress.update(self._task, description="measuring the step time", state="")

    def message(self, text: str) -> None:
        """Prints a message above the bar."""
        self._console.print(Text(text, style="yellow"))


def training_screen(summary: Mapping[str, Any], run: str) -> RenderableType:
    """The closing summary of a run: what `summary.json` holds, in words. Fits 80 columns.

    Args:
        summary: the contents of `summary.json`.
        run: the run directory.
    """
    parts: list[RenderableType] = ["", facts(_facts(summary))]
    layers = summary["plan"]["layers"] if summary["plan"] is not None else []
    if layers:
        parts += ["", plan_table(layers, most=_MOST_LAYERS)]
    where: list[tuple[str, RenderableType]] = [
        ("Run directory", run),
        ("Next", Text(f"{command_name()} explain {run}", style="cyan")),
    ]
    parts += ["", facts(where), ""]
    return Padding(Group(*parts), (0, 1))


def _facts(summary: Mapping[str, Any]) -> Iterable[tuple[str, RenderableType]]:
    data = summary["data"]
    accuracy = Text.assemble(
        (f"{summary['test_accuracy']:.4f}", "bold green"),
        f"  on {count(data['test'], summary['workload'])} never trained on",
    )
    yield "Test accuracy", accuracy
    length = f"{count(summary['epochs'], 'epoch')}, {count(summary['steps'], 'step')}"
    what = f"{summary['network']} on {data['name']}, {_framework(summary)}seed {summary['seed']}"
    yield "Training", f"{length}, {seconds_text(summary['seconds'])}; {what}"
    yield "Precision", _precision(summary)
    yield "Step time", _step_time(summary)
    if summary.get("elsewhere") is not None:
        yield "On a GPU", _elsewhere(summary["elsewhere"])
    yield "Skipped steps", _skipped(summary)
    incidents = [Incident.from_dict(fields) for fields in summary["incidents"]]
    if not incidents:
        yield "Incidents", "none"
    for index, incident in enumerate(incidents[:_MOST_INCIDENTS]):
        yield "Incidents" if index == 0 else "", Text(incident_text(incident), style="yellow")
    if len(incidents) > _MOST_INCIDENTS:
        yield "", f"and {len(incidents) - _MOST_INCIDENTS} more, in events.jsonl"


def _elsewhere(found: Mapping[str, Any]) -> Text:
    """What a preflight and an estimate say of other hardware."""
    ready = [policy for policy, verdict in found["preflight"].items() if verdict["verdict"] == "ready"]
    text = Text(f"{found['target']} ")
    if ready:
        text.append(f"{' and '.join(ready)}: ready", style="green")
    for policy, verdict in found["preflight"].items():
        if policy not in ready:
            text.append(f"{'; ' if ready else ''}{verdict['sentence']}", style="yellow")
    if found["compute"] == "float32":
        return text.append("; its plan would stay in float32")
    return text.append(f"; an estimated {ratio_text(found['relative_time'])} float32's time, in {found['compute']}")


def _framework(summary: Mapping[str, Any]) -> str:
    return f"Keras on {summary['backend']}, " if summary["framework"] == "keras" else ""


def _precision(summary: Mapping[str, Any]) -> Text:
    if summary["plan"] is None:
        return Text.assemble(("float32", "cyan"), ', too few steps for "auto" to gather its evidence')
    default = summary["plan"]["default"]
    by = {"auto": 'chosen by "auto"', "float32": "as asked"}.get(summary["policy"], f"policy {summary['policy']}")
    text = Text.assemble((default["compute"], "cyan"), f", {by}")
    if default["reason"] not in ("policy", "manual"):
        text.append_text(plain(f": {because(default)}"))
    return text


def _step_time(summary: Mapping[str, Any]) -> str:
    pair = summary["step_time"]
    if pair is not None:
        return (
            f"{seconds_text(pair['seconds'])}, float32 {seconds_text(pair['seconds_float32'])}: "
            f"{ratio_text(pair['ratio'])} (middle half {pair['low']:.2f} to {pair['high']:.2f}, {pair['pairs']} pairs)"
        )
    own = seconds_text(summary["median_step_seconds"])
    formats = summary["format_times"]
    if not formats:
        return f"{own} in float32"
    told = ", ".join(f"{ratio_text(t['ratio'], at_least=t['at_least'])} in {name}" for name, t in formats.items())
    return f"{own} in float32; its layers alone would take {told}"


def _skipped(summary: Mapping[str, Any]) -> str:
    skipped = summary["skipped_steps"]
    if not skipped:
        return "none"
    scale = f"; the loss scale ended at {summary['loss_scale']:g}" if summary["loss_scale"] != 1.0 else ""
    return f"{skipped:,} of {summary['steps']:,}{scale}"


def _scale_and_skips(row: Mapping[str, Any], skipped: int) -> str:
    scale = f"  scale {row['loss_scale']:g}" if row["loss_scale"] != 1.0 else ""
    return f"{scale}  skipped {skipped}" if skipped else scale
