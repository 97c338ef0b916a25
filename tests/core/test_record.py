from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from halfwise.core.diagnosis import Incident
from halfwise.core.record import RunRecord, json_ready
from halfwise.errors import DataError, UsageError

INCIDENT = Incident(
    step=12,
    kind="healed",
    verdict="overflow_at_every_scale",
    module="encoder.3.mlp.fc2",
    operation="aten.addmm",
    direction="forward",
    source="model.py:41",
    dtype="float16",
    rank=3,
    action="float32",
    suspects=("encoder.3.mlp.fc2", ""),
    text="one\nscreen",
)


def a_run(directory: Path, steps: int = 0) -> RunRecord:
    record = RunRecord.create(directory, {"seed": 7})
    for step in range(steps):
        record.append_metrics({"step": step, "loss": 1.0 / (step + 1)})
    record.close()
    return record


def test_create_and_open(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "new" / "run", {"seed": 7, "rate": math.inf}, plan="format_version = 1\n")
    again = RunRecord.open(record.directory)
    assert again.environment() == {"seed": 7, "rate": math.inf}
    assert again.plan_path.read_text() == "format_version = 1\n"
    assert (again.metrics(), again.events(), again.summary()) == ([], [], None)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["run"]


def test_create_takes_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert a_run(tmp_path / "run").environment() == {"seed": 7}


@pytest.mark.parametrize("resident", ["environment.json", "notes.txt"])
def test_create_overwrites_nothing(tmp_path: Path, resident: str) -> None:
    (tmp_path / resident).write_text("mine")
    with pytest.raises(UsageError, match="nothing is overwritten") as caught:
        RunRecord.create(tmp_path, {})
    assert ("--resume" in str(caught.value)) == (resident == "environment.json")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_create_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="a file has that name"):
        RunRecord.create(tmp_path / "run", {})


def test_create_leaves_nothing_where_the_environment_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RunRecord.create(tmp_path / "run", {"what": object()})
    assert list(tmp_path.iterdir()) == []


def test_open_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        RunRecord.open(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no run"):
        RunRecord.open(tmp_path)
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        RunRecord.open(tmp_path)
    (tmp_path / "environment.json").write_text("[]")
    with pytest.raises(DataError, match="an object is expected"):
        RunRecord.open(tmp_path)


def test_metrics_and_events_round_trip(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": 0, "epoch": 0, "loss": 0.1, "loss_scale": 4096.0, "applied": True, "seconds": 1.5e-5},
        {"step": 1, "epoch": 0, "loss": math.inf, "loss_scale": 4096.0, "applied": False, "seconds": 2.0},
        {"step": 2, "epoch": 1, "loss": -math.inf, "note": "ünïcode\nline"},
    ]
    with a_run(tmp_path / "run") as record:
        for row in rows:
            record.append_metrics(row)
        record.append_event(INCIDENT)
    again = RunRecord.open(record.directory)
    assert again.metrics() == rows
    assert again.events() == [INCIDENT]
    for line in (record.directory / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_nan_round_trips(tmp_path: Path) -> None:
    with a_run(tmp_path / "run") as record:
        record.append_metrics({"step": 0, "loss": math.nan, "nested": [{"x": math.nan}]})
    (row,) = record.metrics()
    assert math.isnan(row["loss"])
    assert math.isnan(row["nested"][0]["x"])


def test_summary(tmp_path: Path) -> None:
    record = a_run(tmp_path / "run")
    record.write_summary({"accuracy": 0.5, "pairs": (1, 2)})
    assert record.summary() == {"accuracy": 0.5, "pairs": [1, 2]}


def test_lines_are_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    record = a_run(tmp_path / "run")
    record.append_metrics({"step": 0})
    assert RunRecord.open(record.directory).metrics() == [{"step": 0}]
    record.close()


def test_readers_skip_a_torn_line_and_appending_removes_it(tmp_path: Path) -> None:
    record = a_run(tmp_path / "run", steps=2)
    path = record.directory / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step":2,"lo')
    assert [row["step"] for row in record.metrics()] == [0, 1]
    with record:
        record.append_metrics({"step": 2})
    assert [row["step"] for row in record.metrics()] == [0, 1, 2]
    assert path.read_text().endswith('}\n{"step":2}\n')


@pytest.mark.parametrize("line", ["{torn}", "[1]", '{"loss":1}', '{"step":"1"}', ""])
def test_a_malformed_line_before_the_last_is_an_error(tmp_path: Path, line: str) -> None:
    record = a_run(tmp_path / "run")
    (record.directory / "metrics.jsonl").write_text(f'{{"step":0}}\n{line}\n{{"step":1}}\n')
    with pytest.raises(DataError, match="line 2"):
        record.metrics()


def test_an_event_that_is_none_is_an_error(tmp_path: Path) -> None:
    record = a_run(tmp_path / "run")
    (record.directory / "events.jsonl").write_text('{"step":0,"colour":"red"}\n')
    with pytest.raises(DataError, match="no incident"):
        record.events()


def test_truncate_after_keeps_bytes_and_removes_the_summary(tmp_path: Path) -> None:
    record = a_run(tmp_path / "run", steps=5)
    record.append_event(INCIDENT)  # step 12
    record.write_summary({})
    path = record.directory / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"step":5')
    for name in (".metrics.jsonl.17.tmp", "profile.npz.17.tmp", ".plan.toml.x1"):
        (record.directory / name).write_text("left by a kill")
    record.truncate_after(2)
    assert {entry.name for entry in record.directory.iterdir()} == {"environment.json", "metrics.jsonl", "events.jsonl"}
    assert path.read_bytes() == b"".join(lines[:3])
    assert (record.events(), record.summary()) == ([], None)
    record.truncate_after(-1)
    assert record.metrics() == []
    assert record.environment() == {"seed": 7}


def test_json_ready_changes_only_what_json_lacks() -> None:
    value = {"a": (1, 2.5, None, True, "x"), "b": {"c": -math.inf}}
    assert json_ready(value) == {"a": [1, 2.5, None, True, "x"], "b": {"c": "-inf"}}


def test_a_killed_writer_leaves_a_readable_record(tmp_path: Path) -> None:
    program = """
        import itertools, sys
        from pathlib import Path
        from halfwise.core.record import RunRecord
        record = RunRecord.create(Path(sys.argv[1]), {"seed": 7})
        for step in itertools.count():
            record.append_metrics({"step": step, "padding": "x" * 3000})
            if step == 50:
                print("writing", flush=True)
    """
    directory = tmp_path / "run"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    steps = [row["step"] for row in RunRecord.open(directory).metrics()]
    assert len(steps) > 50
    assert steps == list(range(len(steps)))
