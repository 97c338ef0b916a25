"""The probes: the comparer rejects wrong results, a slow format is cut short and its time kept as a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfwise.torch import kernel_probes
from halfwise.torch.kernel_probes import Measurement, measure

CPU = torch.device("cpu")
QUICK = 1e-5


@pytest.fixture(autouse=True)
def _as_inspect_does() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def plant(monkeypatch: pytest.MonkeyPatch, operation: str, run: kernel_probes.Run) -> None:
    changed = replace(kernel_probes.PROBES["cpu"][operation], run=run)
    monkeypatch.setitem(kernel_probes.PROBES, "cpu", {**kernel_probes.PROBES["cpu"], operation: changed})


def measured(
    monkeypatch: pytest.MonkeyPatch, operation: str, name: str, change: Callable[[Tensor], Tensor]
) -> Measurement:
    """`operation` in format `name`, every result passed through `change`; the float64 reference is left alone."""
    probe = kernel_probes.PROBES["cpu"][operation]

    def run(batch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        results = probe.run(batch, weight)
        return tuple(results if batch.dtype in (torch.float64, torch.float32) else map(change, results))

    plant(monkeypatch, operation, run)
    return measure(operation, ("float32", name), CPU, QUICK)[name]


def with_element(result: Tensor, index: int, value: float) -> Tensor:
    result = result.clone()
    result.view(-1)[index] = value
    return result


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("operation", ["matmul", "conv", "attention", "norm"])
class TestTheComparer:
    def test_accepts_the_real_kernel(self, monkeypatch: pytest.MonkeyPatch, operation: str, name: str) -> None:
        assert measured(monkeypatch, operation, name, lambda result: result).fault == ""

    @pytest.mark.parametrize("index", [0, -1])
    def test_rejects_one_wrong_element_at_either_end(
        self, monkeypatch: pytest.MonkeyPatch, operation: str, name: str, index: int
    ) -> None:
        def change(result: Tensor) -> Tensor:
            return with_element(result, index, float(result.view(-1)[index]) + 2 * float(result.float().std()))

        assert "relative error" in measured(monkeypatch, operation, name, change).fault

    def test_rejects_one_nan_outside_the_sample(
        self, monkeypatch: pytest.MonkeyPatch, operation: str, name: str
    ) -> None:
        def change(result: Tensor) -> Tensor:
            return with_element(result, result.numel() // 2, float("nan"))

        assert measured(monkeypatch, operation, name, change).fault == "NaN or inf in the result"

    def test_rejects_zeros(self, monkeypatch: pytest.MonkeyPatch, operation: str, name: str) -> None:
        assert "relative error" in measured(monkeypatch, operation, name, torch.zeros_like).fault


def test_rejects_sums_kept_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = kernel_probes.PROBES["cpu"]["matmul"]

    def one_by_one(batch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if batch.dtype != torch.bfloat16:
            return tuple(probe.run(batch, weight))
        forward, backward = torch.zeros_like(batch), torch.zeros_like(batch)
        for k in range(batch.shape[1]):
            forward += batch[:, k, None] * weight[None, :, k]
            backward += batch[:, k, None] * weight[None, k, :]
        return forward, backward

    plant(monkeypatch, "matmul", one_by_one)
    found = measure("matmul", ("float32", "bfloat16"), CPU, QUICK)
    assert "relative error" in found["bfloat16"].fault
    assert found["float32"].fault == ""


def test_a_slow_format_is_cut_short_and_its_time_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = kernel_probes.PROBES["cpu"]["norm"]
    calls: list[torch.Size] = []

    def slow_in_half(batch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if batch.dtype == torch.float16:
            calls.append(batch.shape)
            time.sleep(0.2)
        return tuple(probe.run(batch, weight))

    plant(monkeypatch, "norm", slow_in_half)
    found = measure("norm", ("float32", "float16"), CPU, QUICK)["float16"]
    assert found.lower_bound
    assert found.relative_time is not None
    assert found.relative_time > 2
    assert len(calls) == 3  # the warm-up, then one call in each of two rounds


def test_a_format_that_is_faster_is_measured_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = kernel_probes.PROBES["cpu"]["norm"]
    waits = {torch.float32: 0.03, torch.float16: 0.003}

    def timed_by_sleep(batch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        time.sleep(waits.get(batch.dtype, 0.0))
        return tuple(probe.run(batch, weight))

    plant(monkeypatch, "norm", timed_by_sleep)
    found = measure("norm", ("float32", "float16"), CPU, QUICK)
    assert found["float32"] == Measurement(1.0)
    assert not found["float16"].lower_bound
    assert found["float16"].relative_time is not None
    assert found["float16"].relative_time < 1


def test_a_format_without_the_kernel_is_left_out() -> None:
    assert set(measure("conv", ("float32", "float8_e4m3fn"), CPU, QUICK)) == {"float32"}


def test_float32_is_measured_in_float32_whatever_the_caller_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = kernel_probes.PROBES["cpu"]["matmul"]
    switches = {
        "cuda matmul": torch.backends.cuda.matmul,
        "cudnn conv": torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        "mkldnn matmul": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        "mkldnn conv": torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    }
    seen: dict[str, set[str]] = {name: set() for name in switches}

    def run(batch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if batch.dtype == torch.float32:
            for name, switch in switches.items():
                seen[name].add(switch.fp32_precision)
        return tuple(probe.run(batch, weight))

    plant(monkeypatch, "matmul", run)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        before = {name: switch.fp32_precision for name, switch in switches.items()}
        measure("matmul", ("float32", "bfloat16"), CPU, QUICK)
        assert seen == {name: {"ieee"} for name in switches}
        measure("matmul", ("float32", "tensorfloat32"), CPU, QUICK)
        assert seen["cuda matmul"] == seen["cudnn conv"] == {"ieee", "tf32"}
        assert seen["mkldnn matmul"] == seen["mkldnn conv"] == {"ieee"}
        assert before == {name: switch.fp32_precision for name, switch in switches.items()}
    finally:
        torch.set_float32_matmul_precision(precision)
