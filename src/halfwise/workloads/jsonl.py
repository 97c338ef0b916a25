"""Labelled texts in JSON lines, plain or gzip. What a file says is checked line by line, and memory is bounded."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from halfwise.errors import DataError

__all__ = ["LARGEST", "LONGEST", "LabelledText", "read_texts"]

LARGEST = 1 << 30
"""The largest file that is read, in bytes without compression."""
LONGEST = 1 << 20
"""The longest line that is read, in bytes."""

_SPLITS = ("train", "test")


@dataclass(frozen=True)
class LabelledText:
    """One line: a text, its class, and whether it is for training or testing, where that is said."""

    text: str
    label: str | int
    split: str | None = None


def read_texts(path: Path) -> list[LabelledText]:
    """The texts in a file of JSON lines; `.gz` files are unpacked on the way, and empty lines skipped.

    Raises:
        DataError: the file is missing, damaged or too large, or a line is no object with a text and a label.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return [_parsed(line, f"line {number} of {str(path)!r}") for number, line in _lines(file, path)]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}. Download or unpack the file again.") from error


def _lines(file: object, path: Path) -> Iterator[tuple[int, bytes]]:
    size = 0
    for number, line in enumerate(iter(lambda: cast(BinaryIO, file).readline(LONGEST + 1), b""), start=1):
        size += len(line)
        if len(line) > LONGEST or size > LARGEST:
            what = f"line {number} of {str(path)!r}" if len(line) > LONGEST else repr(str(path))
            raise DataError(f"{what} is too long; at most {LONGEST} bytes a line and {LARGEST} in all are read.")
        if line.strip():
            yield number, line


def _parsed(line: bytes, where: str) -> LabelledText:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where} is not JSON ({error}); a line is {{"text": ..., "label": ...}}.') from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise DataError(f'{where} is no object with a string under "text"; a line is {{"text": ..., "label": ...}}.')
    label, split = value.get("label"), value.get("split")
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise DataError(f'{where} has {label!r:.40} under "label"; give a string or an integer.')
    if split is not None and split not in _SPLITS:
        raise DataError(f'{where} has {split!r:.40} under "split"; give "train" or "test", or leave it out.')
    return LabelledText(value["text"], label, split)
