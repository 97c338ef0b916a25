from __future__ import annotations

from pathlib import Path

import pytest

from halfwise.core.files import write_file


def test_replaces_the_contents_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_file(path, "one\n")
    write_file(path, b"two\n")
    assert path.read_bytes() == b"two\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_contents(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(path, "\ud800")
    with pytest.raises(TypeError):
        write_file(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
