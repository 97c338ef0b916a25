"""Profiles: the exponent histograms of a model, per module path and role, and their file `profile.npz`."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast, get_args

import numpy as np

from halfwise.core.exponent_counts import BIN_COUNT
from halfwise.core.files import write_file
from halfwise.core.histogram import ExponentHistogram
from halfwise.errors import DataError, UsageError

__all__ = ["ACTIVATION", "ACTIVATION_GRADIENT", "ROLES", "WEIGHT", "WEIGHT_GRADIENT", "Profile", "Role"]

Role = Literal["activation", "activation_gradient", "weight", "weight_gradient"]

ACTIVATION: Role = "activation"
ACTIVATION_GRADIENT: Role = "activation_gradient"
WEIGHT: Role = "weight"
WEIGHT_GRADIENT: Role = "weight_gradient"
ROLES: tuple[Role, ...] = get_args(Role)

_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Profile:
    """What was seen of a model's values.

    Attributes:
        histograms: for each (module path, role) the histogram of all values seen there, copied and read-only. Paths are
            dotted, without the prefixes that wrappers add; `""` is the model itself. The order is kept.

    Raises:
        UsageError: a key is no pair of path and role, or a value no `ExponentHistogram`.

    >>> import numpy as np
    >>> profile = Profile({("encoder.0", "activation"): ExponentHistogram.of(np.ones(3, np.float32))})
    >>> profile.paths(), profile.get("encoder.0", "activation").total
    (('encoder.0',), 3)
    """

    histograms: Mapping[tuple[str, Role], ExponentHistogram] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, histogram in self.histograms.items():
            _check(key, histogram)
        object.__setattr__(self, "histograms", MappingProxyType(dict(self.histograms)))

    def paths(self) -> tuple[str, ...]:
        """The module paths, each once, in the order in which they were first seen."""
        return tuple(dict.fromkeys(path for path, _ in self.histograms))

    def get(self, path: str, role: Role) -> ExponentHistogram | None:
        """The histogram of `role` at `path`, or None where nothing was recorded.

        Raises:
            UsageError: there is no such role.
        """
        if role not in ROLES:
            raise UsageError(f"unknown role {role!r}: use one of {', '.join(ROLES)}")
        return self.histograms.get((path, role))

    def with_histogram(self, path: str, role: Role, histogram: ExponentHistogram) -> Profile:
        """This profile with `histogram` added to what it holds under `path` and `role`.

        Raises:
            UsageError: there is no such role, or this is no histogram.
        """
        key = (path, role)
        _check(key, histogram)
        known = self.histograms.get(key)
        return self._with({**self.histograms, key: histogram if known is None else known + histogram})

    def merge(self, other: Profile) -> Profile:
        """The profile of both runs together: histograms under the same path and role are added."""
        merged = dict(self.histograms)
        for key, histogram in other.histograms.items():
            merged[key] = merged[key] + histogram if key in merged else histogram
        return self._with(merged)

    @staticmethod
    def _with(histograms: dict[tuple[str, Role], ExponentHistogram]) -> Profile:
        """A profile of histograms that were checked before: a recorder makes thousands."""
        profile = object.__new__(Profile)
        object.__setattr__(profile, "histograms", MappingProxyType(histograms))
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path`, an npz file, at once: a reader sees the old file or the new one, never a part.

        The file holds `format_version`, and for n histograms `paths` and `roles` (unicode, shape (n,)), `counts`
        (int64, shape (n, 1020)), `zeros`, `infinities` and `nans` (int64, shape (n,)).

        Raises:
            DataError: the file cannot be written.
        """
        histograms = list(self.histograms.values())
        file = io.BytesIO()
        np.savez_compressed(
            file,
            allow_pickle=False,
            format_version=np.int64(_FORMAT_VERSION),
            paths=np.array([path for path, _ in self.histograms], dtype=np.str_),
            roles=np.array([role for _, role in self.histograms], dtype=np.str_),
            counts=np.array([h.counts for h in histograms], dtype=np.int64).reshape(len(histograms), BIN_COUNT),
            zeros=np.array([h.zeros for h in histograms], dtype=np.int64),
            infinities=np.array([h.infinities for h in histograms], dtype=np.int64),
            nans=np.array([h.nans for h in histograms], dtype=np.int64),
        )
        try:
            write_file(Path(path), file.getvalue())
        except OSError as error:
            raise DataError(f"cannot write the profile {path}: {error}; give a file in a writable directory") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile that `save` wrote. Nothing in the file is executed.

        Raises:
            DataError: the file is missing, damaged, no profile, or of a newer version.
        """
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as fields:
                version = int(fields["format_version"])
                if version == _FORMAT_VERSION:
                    return cls._from_fields(fields)
        except OSError as error:
            raise DataError(f"cannot read the profile {path}: {error}") from error
        except _DAMAGES as error:
            raise DataError(
                f"{path} is no profile, or a damaged one ({error}): write it anew with Profile.save"
            ) from error
        raise DataError(
            f"{path} is a profile of version {version}, this halfwise reads {_FORMAT_VERSION}: update halfwise"
        )

    @classmethod
    def _from_fields(cls, fields: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> Profile:
        """The profile in the arrays of a file."""
        names = ("paths", "roles", "counts", "zeros", "infinities", "nans")
        columns = [fields[name] for name in names]
        for name, column in zip(names, columns, strict=True):
            expected = np.str_ if name in ("paths", "roles") else np.int64
            if column.ndim != (2 if name == "counts" else 1) or not np.issubdtype(column.dtype, expected):
                raise UsageError(f"{name} has shape {column.shape} and dtype {column.dtype}")
        histograms = {}
        for p, role, counts, zeros, infinities, nans in zip(*columns, strict=True):
            key = (str(p), cast(Role, str(role)))
            histograms[key] = ExponentHistogram(counts, int(zeros), int(infinities), int(nans))
        return cls(histograms)


def _check(key: object, histogram: object) -> None:
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and key[1] in ROLES):
        raise UsageError(f"Profile got the key {key!r}: give (module path, role), role one of {', '.join(ROLES)}")
    if not isinstance(histogram, ExponentHistogram):
        raise UsageError(f"Profile got a {type(histogram).__name__} for {key!r}: give an ExponentHistogram")


# What numpy and zipfile raise on a damaged file; ValueError includes our own UsageError on unfit arrays.
_DAMAGES = (
    AttributeError,
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
