from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from halfwise.errors import DataError
from halfwise.workloads import jsonl
from halfwise.workloads.jsonl import LabelledText, read_texts

GOOD = b'{"text":"One \xc3\xa9t\xc3\xa9.","label":"a","split":"test","year":1790}\n'


@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_texts_with_labels(tmp_path: Path, packed: bool) -> None:
    data = GOOD + b'\n  \n{"text":"","label":3}'  # no line end
    path = tmp_path / ("texts.jsonl.gz" if packed else "texts.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read_texts(path) == [LabelledText("One été.", "a", "test"), LabelledText("", 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"text,label", "line 2 of {path} is not JSON"),
        (b'{"text":"cut', "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", 'is no object with a string under "text"'),
        (b'{"label":1}', 'is no object with a string under "text"'),
        (b'{"text":["a"],"label":1}', 'is no object with a string under "text"'),
        (b'{"text":"a"}', 'has None under "label"; give a string or an integer'),
        (b'{"text":"a","label":1.5}', 'has 1.5 under "label"'),
        (b'{"text":"a","label":true}', 'has True under "label"'),
        (b'{"text":"a","label":["b"]}', "has ['b'] under \"label\""),
        (b'{"text":"a","label":1,"split":"dev"}', 'has \'dev\' under "split"; give "train" or "test"'),
        (b'{"text":"a","label":1,"split":[]}', 'has [] under "split"'),
    ],
    ids=range(13),
)
def test_malformed_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(GOOD + line + b"\n")
    with pytest.raises(DataError, match=re.escape(message.format(path=repr(str(path))))) as raised:
        read_texts(path)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("damage", ["cut", "no gzip", "flipped", "missing"])
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(b"".join(GOOD.replace(b"1790", b"%d" % year) for year in range(500))))
    if damage == "cut":
        del packed[-20:]
    elif damage == "no gzip":
        packed = bytearray(GOOD)
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "texts.jsonl.gz"
    if damage != "missing":
        path.write_bytes(packed)
    with pytest.raises(DataError, match=r"cannot read|is not JSON"):
        read_texts(path)


def test_what_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "LONGEST", 100)
    monkeypatch.setattr(jsonl, "LARGEST", 250)
    path = tmp_path / "texts.jsonl"
    path.write_bytes(GOOD + json.dumps({"text": "a" * 100, "label": 1}).encode())
    with pytest.raises(DataError, match=r"line 2 of .* is too long; at most 100 bytes a line and 250 in all"):
        read_texts(path)
    path.write_bytes(GOOD * 5)
    with pytest.raises(DataError, match=r"texts.jsonl' is too long; at most 100 bytes a line and 250 in all"):
        read_texts(path)


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    """A gigabyte of zeros, a megabyte when packed; 300 MiB of address space beyond what the imports took must do."""
    path = tmp_path / "texts.jsonl.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 24))
    program = """
        import resource, sys
        from pathlib import Path
        from halfwise.errors import DataError
        from halfwise.workloads.jsonl import read_texts
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
        try:
            read_texts(Path(sys.argv[1]))
        except DataError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "is too long" in done.stdout, done.stderr
