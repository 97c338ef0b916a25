"""The table of hardware, and estimates made from it."""

from __future__ import annotations

import pytest

from halfwise.core.formats import FORMATS
from halfwise.core.hardware import native_formats_cuda
from halfwise.core.targets import TARGETS, get_target, kind_of
from halfwise.errors import PolicyError

CAPABILITY = {"cuda:volta": (7, 0), "cuda:ampere": (8, 0), "cuda:hopper": (9, 0), "cuda:blackwell": (10, 0)}


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_every_target_has_a_source_and_known_formats(target: object) -> None:
    assert target.source  # type: ignore[attr-defined]
    assert set(target.formats) <= set(FORMATS)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "capability"), CAPABILITY.items())
def test_units_agree_with_what_doctor_knows_of_compute_capabilities(name: str, capability: tuple[int, int]) -> None:
    known = set(native_formats_cuda(capability)) - {"float32", "float8_e5m2"}
    assert set(get_target(name).formats) == known


def test_relative_times_follow_the_peaks() -> None:
    ampere = get_target("cuda:ampere")
    assert ampere.relative_time("matmul", "float32") == 1.0
    assert ampere.relative_time("matmul", "bfloat16") == pytest.approx(2 * 19.5 / 312)
    assert ampere.relative_time("conv", "bfloat16") == pytest.approx(3 * 19.5 / 312)
    assert ampere.relative_time("norm", "bfloat16") == 0.6
    assert ampere.relative_time("norm", "tensorfloat32") == 1.0
    assert ampere.relative_time("matmul", "float8_e4m3fn") is None
    assert get_target("cuda:volta").relative_time("matmul", "bfloat16") is None
    assert get_target("cpu:avx2").relative_time("matmul", "bfloat16") == 10.0


def test_an_estimate_keeps_how_layers_compare() -> None:
    table = get_target("cuda:hopper").estimate({"fc": 2.0, "norm": 1.0}, {"fc": "matmul", "norm": "norm"}, {"fc": 7})
    assert list(table.seconds) == ["fc", "norm"]
    assert table.seconds["fc"]["float32"] == 2.0
    assert table.seconds["norm"]["bfloat16"] == pytest.approx(0.6)
    assert set(table.seconds["fc"]) == {"float32", "tensorfloat32", "bfloat16", "float16", "float8_e4m3fn"}
    assert table.saved == {"fc": 7}


def test_a_target_without_units_runs_its_formats_emulated() -> None:
    table = get_target("cpu:avx2").estimate({"fc": 1.0}, {}, {})
    assert table.seconds["fc"] == {"float32": 1.0, "bfloat16": 10.0, "float16": 10.0}


@pytest.mark.parametrize("name", ["cuda", "here", "cuda:pascal", None])
def test_an_unknown_target_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match="use one of here, cuda:volta"):
        get_target(name)


@pytest.mark.parametrize(
    ("class_name", "kind"),
    [
        ("Linear", "matmul"),
        ("Dense", "matmul"),
        ("EinsumDense", "matmul"),
        ("LSTM", "matmul"),
        ("Conv2d", "conv"),
        ("Conv2DTranspose", "conv"),
        ("BatchNorm2d", "norm"),
        ("LayerNormalization", "norm"),
        ("MultiHeadAttention", "attention"),
        ("Embedding", "other"),
        ("Mine", "other"),
    ],
)
def test_kinds_of_layers(class_name: str, kind: str) -> None:
    assert kind_of(class_name) == kind
