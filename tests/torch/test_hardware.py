"""`inspect` on the CPU of the machine that runs the tests, with real kernels; faults are planted beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfwise.core.formats import FORMATS
from halfwise.core.hardware import OPERATIONS, HardwareReport, advice
from halfwise.errors import UsageError
from halfwise.torch import kernel_probes
from halfwise.torch.hardware import inspect

QUICK = 1e-5  # seconds: the smallest probes


@pytest.fixture(scope="module")
def report() -> HardwareReport:
    return inspect("cpu", seconds=QUICK)


def test_every_format_is_answered_for(report: HardwareReport) -> None:
    assert list(report.formats) == list(FORMATS)
    for support in report.formats.values():
        assert tuple(support.relative_time) == OPERATIONS
        assert set(support.lower_bounds) <= {name for name, value in support.relative_time.items() if value is not None}
        assert all(value is None or value > 0 for value in support.relative_time.values())


def test_device_and_versions(report: HardwareReport) -> None:
    assert report.device == "cpu"
    assert report.device_name
    assert report.frameworks["torch"] == torch.__version__


def test_float32_is_the_measure(report: HardwareReport) -> None:
    support = report.formats["float32"]
    assert support.support == "native"
    assert support.relative_time == dict.fromkeys(OPERATIONS, 1.0)
    assert support.correct


def test_both_halves_run_every_operation_and_are_correct(report: HardwareReport) -> None:
    for name in ("bfloat16", "float16"):
        support = report.formats[name]
        assert None not in support.relative_time.values()
        assert support.correct, support.faults


def test_tensorfloat32_is_absent_on_a_cpu(report: HardwareReport) -> None:
    support = report.formats["tensorfloat32"]
    assert support.support == "absent"
    assert support.relative_time == dict.fromkeys(OPERATIONS)
    assert not support.correct


def test_float8_has_matrix_products_or_nothing(report: HardwareReport) -> None:
    for name in ("float8_e4m3fn", "float8_e5m2"):
        support = report.formats[name]
        assert [support.relative_time[operation] for operation in OPERATIONS[1:]] == [None] * 3
        assert (support.support == "absent") == (support.relative_time["matmul"] is None)


def test_bfloat16_is_native_exactly_where_the_cpu_says_so(report: HardwareReport) -> None:
    flags = torch.cpu.get_capabilities()
    units = any(flags.get(name) is True for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    assert report.formats["bfloat16"].support == ("native" if units else "emulated")


def test_progress_is_told_what_comes_next() -> None:
    told: list[tuple[str, float]] = []
    inspect("cpu", seconds=QUICK, progress=lambda operation, share: told.append((operation, share)))
    assert told == [("matmul", 0.0), ("conv", 0.25), ("attention", 0.5), ("norm", 0.75)]


def test_the_settings_of_the_caller_neither_matter_nor_change() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    precision = torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")  # lets float32 products be computed in bfloat16
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            report = inspect("cpu", seconds=QUICK)
            assert torch.is_autocast_enabled("cpu")
        assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_num_threads() == 2
        assert torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert report.formats["float32"].correct, report.formats["float32"].faults


def plant(monkeypatch: pytest.MonkeyPatch, operation: str, dtype: torch.dtype, kernel: kernel_probes.Run) -> None:
    """`operation` runs as before, except in `dtype`, where `kernel` runs."""
    probe = kernel_probes.PROBES["cpu"][operation]

    def run(batch: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((kernel if batch.dtype == dtype else probe.run)(batch, weight))

    changed = {**kernel_probes.PROBES["cpu"], operation: replace(probe, run=run)}
    monkeypatch.setitem(kernel_probes.PROBES, "cpu", changed)


def test_a_kernel_that_returns_nan_makes_its_format_incorrect(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "norm", torch.bfloat16, lambda batch, weight: (torch.full_like(batch, float("nan")),))
    report = inspect("cpu", seconds=QUICK)
    assert not report.formats["bfloat16"].correct
    assert report.formats["bfloat16"].faults == ("norm: NaN or inf in the result",)
    assert report.formats["float16"].correct
    assert "mixed_bfloat16" not in advice(report)


def test_a_format_without_matrix_products_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(batch: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    plant(monkeypatch, "matmul", torch.float16, missing)
    support = inspect("cpu", seconds=QUICK).formats["float16"]
    assert support.support == "absent"
    assert not support.correct
    assert support.relative_time["matmul"] is None


def test_float32_that_does_not_run_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no engine found\nto execute this convolution")

    plant(monkeypatch, "conv", torch.float32, broken)
    report = inspect("cpu", seconds=QUICK)
    assert report.formats["float32"].faults == ("conv: does not run: no engine found",)
    assert "float32 itself fails" in advice(report)


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "cuda:x", ""])
def test_a_device_that_is_not_here_is_a_usage_error(device: str) -> None:
    with pytest.raises(UsageError, match=rf"device '{device}' cannot be inspected\. Here: 'cpu'"):
        inspect(device)


def test_the_cpu_may_be_given_as_a_torch_device() -> None:
    assert inspect(torch.device("cpu", 0), seconds=QUICK).device == "cpu"
