"""Profiles: arithmetic, and the file under every damage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfwise.core.exponent_counts import BIN_COUNT
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.profile import ACTIVATION, ACTIVATION_GRADIENT, ROLES, WEIGHT, WEIGHT_GRADIENT, Profile
from halfwise.errors import DataError, UsageError


def histogram(seed: int) -> ExponentHistogram:
    counts = np.random.default_rng(seed).integers(0, 1 << 40, BIN_COUNT)
    return ExponentHistogram(counts, zeros=seed + 1, infinities=seed + 2, nans=seed + 3)


@pytest.fixture
def profile() -> Profile:
    keys = [("encoder.1", ACTIVATION), ("encoder.1", WEIGHT), ("", ACTIVATION_GRADIENT), ("кодер.0", WEIGHT_GRADIENT)]
    return Profile({key: histogram(seed) for seed, key in enumerate(keys)})


def fields(**changes: Any) -> bytes:
    """A profile file, some of whose arrays are others. None leaves one out."""
    arrays: dict[str, Any] = {
        "format_version": np.int64(1),
        "paths": np.array(["a", "b"]),
        "roles": np.array(["weight", "weight"]),
        "counts": np.zeros((2, BIN_COUNT), np.int64),
        "zeros": np.zeros(2, np.int64),
        "infinities": np.zeros(2, np.int64),
        "nans": np.zeros(2, np.int64),
        **changes,
    }
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file.getvalue()


def test_roles() -> None:
    assert ROLES == (ACTIVATION, ACTIVATION_GRADIENT, WEIGHT, WEIGHT_GRADIENT)
    assert ROLES == ("activation", "activation_gradient", "weight", "weight_gradient")


def test_reading_back(profile: Profile) -> None:
    assert profile.paths() == ("encoder.1", "", "кодер.0")
    assert profile.get("encoder.1", "weight") == histogram(1)
    assert profile.get("encoder.1", "weight_gradient") is None
    assert profile.get("encoder", "weight") is None
    with pytest.raises(UsageError, match="unknown role 'gradient'"):
        profile.get("encoder.1", "gradient")  # type: ignore[arg-type]


def test_merging_adds(profile: Profile) -> None:
    other = Profile({("encoder.1", WEIGHT): histogram(7), ("head", WEIGHT): histogram(8)})
    merged = profile.merge(other)
    assert merged.get("encoder.1", "weight") == histogram(1) + histogram(7)
    assert merged.get("head", "weight") == histogram(8)
    assert merged.get("", "activation_gradient") == histogram(2)
    assert merged.paths() == ("encoder.1", "", "кодер.0", "head")
    assert profile.get("encoder.1", "weight") == histogram(1)
    assert profile.merge(Profile()) == profile


def test_with_histogram_adds_to_what_is_there(profile: Profile) -> None:
    more = profile.with_histogram("encoder.1", "weight", histogram(5)).with_histogram(
        "head", "activation", histogram(6)
    )
    assert more.get("encoder.1", "weight") == histogram(1) + histogram(5)
    assert more.get("head", "activation") == histogram(6)
    assert profile.get("encoder.1", "weight") == histogram(1)
    assert profile.get("head", "activation") is None
    with pytest.raises(UsageError, match="one of activation"):
        profile.with_histogram("head", "input", histogram(0))  # type: ignore[arg-type]


def test_profiles_are_read_only_copies() -> None:
    given: dict[Any, Any] = {("a", "weight"): histogram(0)}
    for profile in (Profile(given), Profile().with_histogram("a", "weight", histogram(0))):
        with pytest.raises(TypeError):
            profile.histograms["b", "weight"] = histogram(1)  # type: ignore[index]
    profile = Profile(given)
    given.clear()
    assert profile.paths() == ("a",)


@pytest.mark.parametrize(
    "histograms",
    [{"a": histogram(0)}, {("a", "bias"): histogram(0)}, {(1, "weight"): histogram(0)}, {("a", "weight"): np.zeros(3)}],
)
def test_unfit_entries_are_refused(histograms: Any) -> None:
    with pytest.raises(UsageError, match="Profile got"):
        Profile(histograms)


def test_every_field_goes_through_the_file(profile: Profile, tmp_path: Path) -> None:
    for suffix in ("profile.npz", "no_suffix"):
        profile.save(tmp_path / suffix)
        loaded = Profile.load(str(tmp_path / suffix))
        assert loaded == profile
        assert list(loaded.histograms) == list(profile.histograms)
    Profile().save(tmp_path / "empty")
    assert Profile.load(tmp_path / "empty") == Profile()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "no_suffix", "profile.npz"]


def test_the_file_is_plain_npz(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.npz")
    with np.load(tmp_path / "profile.npz", allow_pickle=False) as arrays:
        assert arrays["paths"].tolist() == ["encoder.1", "encoder.1", "", "кодер.0"]
        assert arrays["counts"].shape == (4, BIN_COUNT)
        assert arrays["nans"].tolist() == [3, 4, 5, 6]


def test_a_directory_that_is_missing(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot write the profile"):
        profile.save(tmp_path / "missing" / "profile.npz")
    with pytest.raises(DataError, match="cannot read the profile"):
        Profile.load(tmp_path / "missing.npz")
    with pytest.raises(DataError, match="cannot read the profile"):
        Profile.load(tmp_path)


def test_a_failed_write_leaves_the_old_file(profile: Profile, tmp_path: Path) -> None:
    target = tmp_path / "profile.npz"
    target.mkdir()  # renaming onto a directory fails after the data were written
    with pytest.raises(DataError, match="cannot write the profile"):
        profile.save(target)
    assert [file.name for file in tmp_path.iterdir()] == ["profile.npz"]


@pytest.mark.parametrize(
    "changes",
    [
        {"paths": None},
        {"format_version": None},
        {"format_version": np.array(["x"])},
        {"format_version": np.arange(2)},
        {"paths": np.array([1, 2])},
        {"paths": np.array(["a"])},
        {"paths": np.array([["a", "b"]])},
        {"paths": np.array(["a", None], dtype=object)},
        {"roles": np.array(["weight", "bias"])},
        {"counts": np.zeros((2, 5), np.int64)},
        {"counts": np.zeros((2, BIN_COUNT))},
        {"counts": np.full((2, BIN_COUNT), -1)},
        {"counts": np.zeros(BIN_COUNT, np.int64)},
        {"nans": np.array([0.5, 0.5])},
        {"zeros": np.array([-1, 0])},
    ],
)
def test_malformed_fields_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "profile.npz"
    file.write_bytes(fields())
    assert Profile.load(file).paths() == ("a", "b")
    file.write_bytes(fields(**changes))
    with pytest.raises(DataError, match=r"profile\.npz is no profile, or a damaged one"):
        Profile.load(file)


def test_newer_versions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.npz"
    file.write_bytes(fields(format_version=np.int64(2), counts=None))
    with pytest.raises(DataError, match="version 2, this halfwise reads 1: update halfwise"):
        Profile.load(file)


def test_damaged_files_are_refused(profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "profile.npz"
    profile.save(file)
    whole = file.read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    others = [b"", b"PK\x03\x04", b"format_version = 1", (tmp_path / "array.npy").read_bytes()]
    for damaged in [*others, *(whole[:length] for length in range(0, len(whole) - 1, 211))]:
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="no profile, or a damaged one"):
            Profile.load(file)


def test_flipped_bytes_never_give_another_profile(profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "profile.npz"
    profile.save(file)
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    positions = [*range(60), *range(len(whole) - 400, len(whole)), *random.integers(0, len(whole), 200).tolist()]
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
        try:
            assert Profile.load(file) == profile  # a flip in the archive's dates, say, does no harm
        except DataError:
            refused += 1
    assert refused > 150
