"""Hardware reports: which formats are native, what a report survives, what follows from it."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from halfwise.core.formats import FORMATS
from halfwise.core.hardware import (
    OPERATIONS,
    FormatSupport,
    HardwareReport,
    Support,
    advice,
    error_bound,
    framework_versions,
    native_formats_cpu,
    native_formats_cuda,
    time_text,
)


def timed(
    support: Support,
    matmul: float,
    conv: float,
    attention: float = 1.0,
    norm: float = 1.0,
    *,
    lower_bounds: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
) -> FormatSupport:
    times = dict(zip(OPERATIONS, (matmul, conv, attention, norm), strict=True))
    return FormatSupport(support, times, lower_bounds, correct=not faults, faults=faults)


FLOAT32 = timed("native", 1.0, 1.0)
FAST = timed("native", 0.1, 0.3, 0.25, 0.6)
SLOW = timed("emulated", 22.0, 37.0, 2.4, 0.42, lower_bounds=("matmul", "conv", "attention"))


def report(**formats: FormatSupport) -> HardwareReport:
    everything = {name: FormatSupport("absent") for name in FORMATS} | {"float32": FLOAT32} | formats
    return HardwareReport("cpu", "a machine", (), {"torch": "2.13.0"}, everything)


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), set()),
        ((7, 0), {"float16"}),
        ((7, 5), {"float16"}),
        ((8, 0), {"float16", "bfloat16", "tensorfloat32"}),
        ((8, 6), {"float16", "bfloat16", "tensorfloat32"}),
        ((8, 9), {"float16", "bfloat16", "tensorfloat32", "float8_e4m3fn", "float8_e5m2"}),
        ((9, 0), {"float16", "bfloat16", "tensorfloat32", "float8_e4m3fn", "float8_e5m2"}),
        ((12, 0), {"float16", "bfloat16", "tensorfloat32", "float8_e4m3fn", "float8_e5m2"}),
    ],
)
def test_tensor_cores_by_compute_capability(capability: tuple[int, int], native: set[str]) -> None:
    assert native_formats_cuda(capability) == native | {"float32"}


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ({"avx2", "f16c", "fma3"}, set()),
        ({"avx512_f", "avx512_bf16"}, {"bfloat16"}),
        ({"amx_bf16"}, {"bfloat16"}),
        ({"avx512_bf16", "avx512_fp16"}, {"bfloat16", "float16"}),
        ({"neon", "fp16_arith"}, {"float16"}),
        ({"neon", "fp16_arith", "bf16"}, {"bfloat16", "float16"}),
    ],
)
def test_cpu_units_by_instruction_set(flags: set[str], native: set[str]) -> None:
    assert native_formats_cpu(flags) == native | {"float32"}


def test_every_native_format_is_a_known_format() -> None:
    assert native_formats_cuda((99, 0)) <= set(FORMATS)
    assert native_formats_cpu({"avx512_bf16", "avx512_fp16"}) <= set(FORMATS)


def test_error_bound_grows_with_the_length_and_with_the_format() -> None:
    assert error_bound("float32", 4096, 2) > error_bound("float32", 256, 2)
    assert error_bound("float32", 256, 2) < error_bound("float16", 256, 2) < error_bound("bfloat16", 256, 2)
    # By hand: 2 * (2 * 2^-10 + 16 * 2^-23)
    assert error_bound("float16", 256, 2) == 2 * (2 * 2**-10 + 16 * 2**-23)


def test_a_report_survives_json() -> None:
    original = HardwareReport(
        device="cuda:1",
        device_name="a GPU",
        device_features=("compute capability 8.9", "24 GiB"),
        frameworks={"torch": "2.13.0", "keras": "3.15.1"},
        formats={
            "float32": FLOAT32,
            "bfloat16": timed("emulated", 3.0, 2.0, lower_bounds=("matmul", "conv"), faults=("norm: NaN or inf",)),
            "float8_e5m2": FormatSupport("absent"),
        },
    )
    fields = json.loads(json.dumps(original.to_dict(), allow_nan=False))
    assert HardwareReport.from_dict(fields) == original
    assert fields["advice"] == advice(original)
    assert fields["formats"]["bfloat16"]["lower_bounds"] == ["matmul", "conv"]
    assert fields["formats"]["float8_e5m2"]["relative_time"] == dict.fromkeys(OPERATIONS)


def test_without_half_units_auto_stays_in_float32_and_gives_the_ratios() -> None:
    text = advice(report(bfloat16=timed("emulated", 9.6, 55.0, 4.1, 0.42), float16=SLOW))
    assert text.startswith('"auto" would stay in float32 here')
    assert "bfloat16 (emulated) takes 9.60 x float32's time in matmul, 55 x in conv, 4.10 x in attention" in text
    assert "float16 (emulated) takes at least 22 x float32's time in matmul, at least 37 x in conv" in text
    assert "try" not in text
    assert text.count(".") == 1 + sum(part.count(".") for part in ("9.60", "4.10", "2.40"))  # one sentence


def test_faster_normalisation_alone_is_no_reason_for_half_precision() -> None:
    text = advice(report(bfloat16=timed("native", 1.0, 1.0, 0.5, 0.2)))
    assert text.startswith('"auto" would stay in float32')


def test_a_gain_that_casts_would_eat_up_is_no_reason_either() -> None:
    assert "stay in float32" in advice(report(float16=timed("native", 0.93, 0.95)))
    assert "try mixed_float16" in advice(report(float16=timed("native", 0.80, 0.95)))


def test_native_bfloat16_comes_first_and_float16_second() -> None:
    text = advice(report(bfloat16=FAST, float16=FAST))
    assert text.startswith('"auto" would try mixed_bfloat16, then mixed_float16 here')
    assert "bfloat16 takes 0.10 x float32's time in matmul, 0.30 x in conv" in text


def test_volta_gets_mixed_float16() -> None:
    text = advice(report(bfloat16=SLOW, float16=FAST))
    assert text.startswith('"auto" would try mixed_float16 here')
    assert "mixed_bfloat16" not in text
    assert "bfloat16 (emulated) takes at least 22 x" in text


def test_an_incorrect_format_is_never_advised_however_fast() -> None:
    broken = timed("native", 0.01, 0.01, faults=("matmul: NaN or inf in the result",))
    text = advice(report(bfloat16=broken, float16=FAST))
    assert text.startswith('"auto" would try mixed_float16 here')
    assert "bfloat16 gives wrong results (matmul: NaN or inf in the result)" in text
    assert "stay in float32" in advice(report(bfloat16=broken, float16=broken))


def test_a_lower_bound_is_never_a_gain() -> None:
    cut = timed("emulated", 0.5, 0.5, lower_bounds=("matmul", "conv"))
    assert "stay in float32" in advice(report(bfloat16=cut))


def test_an_absent_format_is_called_absent() -> None:
    assert "bfloat16 cannot run" in advice(report())


def test_broken_float32_stops_everything() -> None:
    text = advice(report(float32=timed("native", 1.0, 1.0, faults=("conv: relative error 0.3",)), bfloat16=FAST))
    assert "float32 itself fails (conv: relative error 0.3)" in text
    assert "mixed_bfloat16" not in text


def test_time_text() -> None:
    support = timed("emulated", 0.4249, 9.949, 9.96, 131.7, lower_bounds=("norm",))
    assert [time_text(support, name) for name in OPERATIONS] == ["0.42", "9.95", "10", "> 132"]
    assert time_text(FormatSupport("absent"), "matmul") == "-"


def test_framework_versions_lists_what_is_installed() -> None:
    assert framework_versions()["torch"] == importlib.metadata.version("torch")
