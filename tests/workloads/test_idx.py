from __future__ import annotations

import gzip
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from halfwise.errors import DataError
from halfwise.workloads.idx import load_idx, read_idx

IMAGES = np.random.RandomState(0).randint(0, 256, (6, 8, 9), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 3, 1, 0], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def a_directory(path: Path, *, end: str = "", dot: str = "-") -> Path:
    for part, count in (("train", 6), ("t10k", 2)):
        for kind, array in (("images", IMAGES[:count]), ("labels", LABELS[:count])):
            data = idx(array)
            name = f"{part}-{kind}{dot}idx{array.ndim}-ubyte{end}"
            (path / name).write_bytes(gzip.compress(data) if end else data)
    return path


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("dot", ["-", "."])
def test_a_directory(tmp_path: Path, end: str, dot: str) -> None:
    data = load_idx(a_directory(tmp_path, end=end, dot=dot))
    assert data.train_images.shape == (6, 1, 8, 9)
    assert data.train_images.dtype == np.float32
    assert np.array_equal(data.train_images[:, 0], IMAGES.astype(np.float32) / np.float32(255))
    assert data.train_images.max() <= 1.0
    assert np.array_equal(data.train_labels, LABELS)
    assert data.train_labels.dtype == np.int64
    assert np.array_equal(data.test_images, data.train_images[:2])
    assert (data.classes, data.shape, data.name) == (4, (1, 8, 9), str(tmp_path))


def test_limit_and_description(tmp_path: Path) -> None:
    data = load_idx(a_directory(tmp_path)).first(3)
    assert data.describe() == {"name": str(tmp_path), "train": 3, "test": 2, "shape": [1, 8, 9], "classes": 4}


GOOD = idx(LABELS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with the bytes (none)"),
        (b"\x00\x00\x08", "begins with the bytes 00 00 08;"),
        (
            b"\x89PNG" + GOOD,
            "begins with the bytes 89 50 4e 47; an IDX file of bytes with 1 dimension begins with 00 00 08 01",
        ),
        (b"\x00\x00\x0d\x01" + GOOD[4:], "begins with the bytes 00 00 0d 01"),
        (idx(IMAGES), "begins with the bytes 00 00 08 03"),
        (GOOD[:6], "ends within its header"),
        (GOOD[:-1], "should hold 6 bytes of data, (6,), and holds only 5"),
        (GOOD + b"x", "should hold 6 bytes of data, (6,), and holds more"),
        (GOOD[:4] + b"\xff\xff\xff\xff" + GOOD[8:], "claims 4294967295 bytes"),
    ],
    ids=["empty", "short magic", "png", "floats", "images", "short header", "truncated", "longer", "huge claim"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_malformed_files(tmp_path: Path, data: bytes, message: str, packed: bool) -> None:
    path = tmp_path / ("labels.gz" if packed else "labels")
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(DataError, match=re.escape(message)):
        read_idx(path, 1)


@pytest.mark.parametrize("damage", ["cut", "no gzip", "flipped"])
def test_malformed_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(idx(IMAGES)))
    if damage == "cut":
        del packed[-20:]
    elif damage == "no gzip":
        packed = bytearray(idx(IMAGES))
    else:
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "images.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError, match="cannot read"):
        read_idx(path, 3)


def test_missing_files_are_named_with_what_is_there(tmp_path: Path) -> None:
    a_directory(tmp_path, end=".gz")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"no t10k-labels-idx1-ubyte\[\.gz\].*It holds: t10k-images-idx3"):
        load_idx(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        read_idx(tmp_path / "none", 1)


def test_parts_must_fit_each_other(tmp_path: Path) -> None:
    a_directory(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:5]))
    with pytest.raises(DataError, match="6 images and 5 labels for training"):
        load_idx(tmp_path)
    a_directory(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES[:2, :, :8]))
    with pytest.raises(DataError, match="8 x 9 pixels for training and 8 x 8 for testing"):
        load_idx(tmp_path)
    a_directory(tmp_path)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(IMAGES[: 6 if part == "train" else 2, :2]))
    with pytest.raises(DataError, match="4 to 256 pixels a side"):
        load_idx(tmp_path)
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(IMAGES[:0]))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(LABELS[:0]))
    with pytest.raises(DataError, match="at least one"):
        load_idx(tmp_path)


def test_a_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    """An unpacked size of 1000 MiB is claimed; 300 MiB of address space beyond what the imports took must do."""
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 1000, 1024, 1024) + b"x" * 100))
    program = """
        import resource, sys
        from pathlib import Path
        from halfwise.errors import DataError
        from halfwise.workloads.idx import read_idx
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
        try:
            read_idx(Path(sys.argv[1]), 3)
        except DataError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "holds only 100" in done.stdout, done.stderr
