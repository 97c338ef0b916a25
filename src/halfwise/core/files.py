"""Files that are either the old ones or the new ones, complete, whenever the process dies."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "write_file"]


def write_file(path: Path, data: bytes | str) -> None:
    """Replaces the contents of `path` in one step: written beside, flushed to the disk, renamed.

    Text is written as UTF-8 with `\\n` line ends on every system.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames and new names inside `path` survive a power failure, where directories have fsync."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows cannot open a directory
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse
        pass
    finally:
        os.close(descriptor)
