"""The run directory: what a training run leaves behind, readable by people and programs, whole after a crash.

```
run/
  environment.json   versions, hardware, threads, and the settings that the run was started with
  plan.toml          the precision plan in force
  profile.npz        exponent histograms, where they were gathered
  metrics.jsonl      one line per step
  events.jsonl       one line per incident
  summary.json       written when the run is complete
  checkpoint/        the adapter's: weights, optimizer, loss scale, generators, position in the data
```
Single files are replaced in one step. The `.jsonl` files grow by one line at a time, so that a process killed at any
moment leaves at most one torn last line: readers skip it, and resuming removes it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from halfwise.core.diagnosis import Incident
from halfwise.core.files import sync_directory, write_file
from halfwise.errors import DataError, UsageError

__all__ = ["RunRecord", "json_ready"]

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunRecord:
    """A run directory, for writing and for reading.

    Numbers that JSON does not have are written as the strings `"nan"`, `"inf"` and `"-inf"`, and read back as floats.

    Attributes:
        directory: the run directory.

    >>> import tempfile
    >>> with RunRecord.create(Path(tempfile.mkdtemp()) / "run", {"seed": 0}) as run:
    ...     run.append_metrics({"step": 0, "epoch": 0, "loss": 2.3})
    >>> RunRecord.open(run.directory).metrics()
    [{'step': 0, 'epoch': 0, 'loss': 2.3}]
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._appending: dict[str, TextIO] = {}

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], environment: Mapping[str, Any], *, plan: str | None = None
    ) -> Self:
        """A new run directory with its `environment.json`, and `plan.toml` where its text is given: all or nothing.

        Raises:
            UsageError: `directory` is a file, or a directory that holds something.
        """
        target = Path(directory)
        if target.exists() and not target.is_dir():
            raise UsageError(f"cannot create the run directory {str(target)!r}: a file has that name. Choose another.")
        if target.is_dir() and any(target.iterdir()):
            what = "a run" if (target / "environment.json").exists() else "files"
            hint = "continue it with --resume, or choose another" if what == "a run" else "choose another"
            raise UsageError(
                f"the directory {str(target)!r} already holds {what}, and nothing is overwritten: {hint} directory."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had the same number
        beside.mkdir()
        try:
            write_file(beside / "environment.json", _dump(environment))
            if plan is not None:
                write_file(beside / "plan.toml", plan)
            if target.is_dir():
                target.rmdir()  # empty: refuses otherwise
            beside.rename(target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_directory(target.parent)
        return cls(target)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Self:
        """The run that `directory` holds.

        Raises:
            UsageError: there is no run.
            DataError: its `environment.json` is malformed.
        """
        target = Path(directory)
        if not (target / "environment.json").is_file():
            state = "does not exist" if not target.exists() else "holds no run (environment.json is missing)"
            raise UsageError(
                f"{str(target)!r} {state}; give the directory that `halfwise train` printed, such as runs/image-auto-1."
            )
        record = cls(target)
        record.environment()
        return record

    @property
    def plan_path(self) -> Path:
        """Where the plan lies: `plan.toml`."""
        return self.directory / "plan.toml"

    @property
    def profile_path(self) -> Path:
        """Where the profile lies: `profile.npz`."""
        return self.directory / "profile.npz"

    @property
    def checkpoint_path(self) -> Path:
        """Where the checkpoint lies: the directory `checkpoint`."""
        return self.directory / "checkpoint"

    def environment(self) -> dict[str, Any]:
        """What `environment.json` holds."""
        return _load(self.directory / "environment.json")

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replaces `environment.json`."""
        write_file(self.directory / "environment.json", _dump(environment))

    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` holds; None while the run is not complete."""
        path = self.directory / "summary.json"
        return _load(path) if path.is_file() else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces `summary.json`."""
        write_file(self.directory / "summary.json", _dump(summary))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`. `row` has the step's number under `"step"`."""
        self._append("metrics.jsonl", row)

    def append_event(self, incident: Incident) -> None:
        """Adds a line to `events.jsonl`."""
        self._append("events.jsonl", incident.as_dict())

    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of `metrics.jsonl`.

        Raises:
            DataError: a line is no object with a step's number.
        """
        return [row for _, row in _lines(self.directory / "metrics.jsonl")]

    def events(self) -> list[Incident]:
        """The complete lines of `events.jsonl`.

        Raises:
            DataError: a line is no incident.
        """
        path = self.directory / "events.jsonl"
        try:
            return [Incident.from_dict(row) for _, row in _lines(path)]
        except TypeError as error:
            raise DataError(f"{str(path)!r} holds a line that is no incident ({error}); restore the file.") from error

    def truncate_after(self, step: int) -> None:
        """Removes from metrics and events what came after `step`, and torn lines; -1 removes everything.

        The lines that stay keep their bytes. A summary is removed: the run goes on.
        """
        self.close()
        for name in ("metrics.jsonl", "events.jsonl"):
            path = self.directory / name
            if path.is_file():
                write_file(path, b"".join(line for line, row in _lines(path) if row["step"] <= step))
        (self.directory / "summary.json").unlink(missing_ok=True)
        for left_by_a_kill in [*self.directory.glob("*.tmp"), *self.directory.glob(".plan.toml.*")]:
            left_by_a_kill.unlink(missing_ok=True)

    def sync(self) -> None:
        """Flushes the appended lines to the disk. Call it before a checkpoint: it must not know more than they do."""
        for file in self._appending.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files. Appending opens them again."""
        for file in self._appending.values():
            file.close()
        self._appending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        file = self._appending.get(name)
        if file is None:
            path = self.directory / name
            _remove_torn_line(path)
            file = path.open("a", encoding="utf-8", newline="\n", buffering=1)
            self._appending[name] = file
        file.write(json.dumps(json_ready(row), allow_nan=False, separators=(",", ":")) + "\n")


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(json_ready(value), allow_nan=False, indent=2) + "\n"


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); restore the file, or start a new run.") from error
    if not isinstance(value, dict):
        raise DataError(f"{str(path)!r} holds a {type(value).__name__} where an object is expected; restore the file.")
    return {key: _restored(item) for key, item in value.items()}


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each complete line of a `.jsonl` file with its value."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break  # torn by a kill
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(
                f'line {number} of {str(path)!r} is no JSON object with a "step"; restore the file, or start a new run.'
            )
        rows.append((line, {key: _restored(item) for key, item in row.items()}))
    return rows


def _remove_torn_line(path: Path) -> None:
    if path.is_file():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            write_file(path, data[: data.rfind(b"\n") + 1])


def json_ready(value: Any) -> Any:
    """`value` with lists for tuples, and the numbers that JSON does not have as `"nan"`, `"inf"` and `"-inf"`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    """The inverse of `json_ready`, tuples aside."""
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
