"""IDX files, the format of MNIST, Fashion-MNIST, KMNIST and their kind: plain or gzip, images and labels in bytes.

A file is a magic number (two zero bytes, the type's code, the number of dimensions), one big-endian uint32 per
dimension, and the bytes. Headers are not believed: memory is taken only as the data really come, and never more than
`LARGEST` bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from halfwise.errors import DataError
from halfwise.workloads.image_data import ImageData

__all__ = ["LARGEST", "load_idx", "read_idx"]

LARGEST = 1 << 30
"""The largest array that is read, in bytes; MNIST has 47 million."""

_UBYTE = 0x08
_CHUNK = 1 << 20
_SIDES = range(4, 257)  # pixels: a 3 x 3 convolution and a 2 x 2 pooling must leave something, and the rest fit memory
_STEMS = {"train": "train", "test": "t10k"}


def load_idx(directory: Path) -> ImageData:
    """The images and labels in `directory`: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and those of `t10k`.

    Each may end in `.gz`, and may be spelled with a dot before `idx`.

    Raises:
        DataError: a file is missing, malformed, or does not fit the others.
    """
    images = {part: read_idx(_find(directory, f"{stem}-images", 3), 3) for part, stem in _STEMS.items()}
    labels = {part: read_idx(_find(directory, f"{stem}-labels", 1), 1) for part, stem in _STEMS.items()}
    for part in _STEMS:
        if len(images[part]) != len(labels[part]) or not len(labels[part]):
            raise DataError(
                f"{str(directory)!r} has {len(images[part])} images and {len(labels[part])} labels for {part}ing; "
                "there must be as many of both, and at least one: the files may come from different data sets."
            )
    train, test = images["train"], images["test"]
    if train.shape[1:] != test.shape[1:] or not all(side in _SIDES for side in train.shape[1:]):
        raise DataError(
            f"{str(directory)!r} has images of {_size(train)} pixels for training and {_size(test)} for testing; "
            f"both must have the same size, {_SIDES[0]} to {_SIDES[-1]} pixels a side."
        )
    return ImageData(
        name=str(directory),
        train_images=_scaled(train),
        train_labels=labels["train"].astype(np.int64),
        test_images=_scaled(test),
        test_labels=labels["test"].astype(np.int64),
        classes=max(2, 1 + int(max(labels["train"].max(), labels["test"].max()))),
    )


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes with `dimensions` dimensions; `.gz` files are unpacked on the way.

    Raises:
        DataError: the file is missing, of another type, shorter or longer than its header says, or too large.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read(cast(BinaryIO, file), path, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}. Download or unpack the file again.") from error


def _read(file: BinaryIO, path: Path, dimensions: int) -> NDArray[np.uint8]:
    magic = file.read(4)
    expected = bytes([0, 0, _UBYTE, dimensions])
    if magic != expected:
        raise DataError(
            f"{str(path)!r} begins with the bytes {magic.hex(' ') or '(none)'}; an IDX file of bytes with {dimensions} "
            f"dimension{'s' if dimensions > 1 else ''} begins with {expected.hex(' ')}."
        )
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(f"{str(path)!r} ends within its header. Download or unpack the file again.")
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(0, len(header), 4))
    size = math.prod(shape)
    if size > LARGEST:
        raise DataError(f"{str(path)!r} claims {size} bytes of data, {shape}; at most {LARGEST} are read.")
    data = bytearray()
    while len(data) <= size and (chunk := file.read(min(_CHUNK, size + 1 - len(data)))):
        data += chunk
    if len(data) != size:
        found = f"only {len(data)}" if len(data) < size else "more"
        raise DataError(
            f"{str(path)!r} should hold {size} bytes of data, {shape}, and holds {found}. "
            "Download or unpack the file again."
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _find(directory: Path, stem: str, dimensions: int) -> Path:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    there = sorted(entry.name for entry in directory.iterdir())[:6] if directory.is_dir() else []
    raise DataError(
        f"{str(directory)!r} has no {names[0]}[.gz]; it should hold train-images-idx3-ubyte, train-labels-idx1-ubyte, "
        f"t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, plain or .gz. It holds: {', '.join(there) or 'nothing'}."
    )


def _scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return images[:, None].astype(np.float32) / np.float32(255.0)


def _size(images: NDArray[np.uint8]) -> str:
    return " x ".join(map(str, images.shape[1:]))
