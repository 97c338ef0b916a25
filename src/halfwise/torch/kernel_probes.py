"""Times one operation in several formats against float32, and checks the results against float64.

How it measures. The inputs are sized so that one float32 call takes about two milliseconds; the formats take turns
within each round; a ratio is the median over rounds of a format's time by the float32 time of the same round. On a CPU
a probe that has used up its float32 time is cut short after the call in progress, and a format that was cut in both of
the first two rounds drops out with its fastest call as a bound: calls of an emulated format may take a hundred times
as long, and "slower here" is all that a decision needs. A GPU's queued calls cannot be recalled: nothing is cut there.

How it checks. The very results that were timed are compared, on samples from both ends, with float64 on the CPU,
computed from the same rounded inputs; all of them must be finite.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halfwise.core.hardware import error_bound

__all__ = ["PROBES", "Measurement", "Probe", "Run", "measure"]

_ROUNDS = 7
_CALLS = 2  # per round and format
_DOUBLINGS = 6  # of the batch, at most
_FLOAT8_RESULT = torch.bfloat16  # the format that matrix products of float8 return in training

_DTYPES = {
    "float32": torch.float32,
    "tensorfloat32": torch.float32,  # a mode of the kernels, not a dtype
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}

Call = Callable[[], Sequence[Tensor]]
Run = Callable[[Tensor, Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Probe:
    """An operation and its inputs: a batch, whose first dimension may grow, and weights.

    Attributes:
        run: (batch, weight) -> results, each with the batch's first dimension.
        batch, weight: shapes.
        checked: how many entries at each end of the batch are compared with float64.
        length: products summed into one element.
        roundings: how often a value may be rounded to the format on its way.
    """

    run: Run
    batch: tuple[int, ...]
    weight: tuple[int, ...]
    checked: int
    length: int
    roundings: int


def _matmul(batch: Tensor, weight: Tensor) -> Sequence[Tensor]:
    # Both layouts that training uses: x @ w.T going forward, g @ w going backward. Their kernels differ in speed.
    return F.linear(batch, weight), torch.mm(batch, weight)


def _conv(batch: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return (F.conv2d(batch, weight, padding=1),)


def _attention(batch: Tensor, _weight: Tensor) -> Sequence[Tensor]:
    query, key, value = batch.unbind(1)
    return (F.scaled_dot_product_attention(query, key, value),)


def _norm(batch: Tensor, weight: Tensor) -> Sequence[Tensor]:
    # With weight and bias, as in training: without them other kernels run, which reverse the order of the formats.
    # Several in a row rather than one of a larger tensor, whose allocation by the system would be timed too.
    for _ in range(8):
        result = F.layer_norm(batch, batch.shape[-1:], *weight)
    return (result,)


# Roundings: inputs and result; for a convolution Winograd's transforms too; for attention scores, maxima, exponentials,
# probabilities; for a normalisation mean and variance.
PROBES: dict[str, Mapping[str, Probe]] = {
    "cpu": {
        "matmul": Probe(_matmul, (32, 512), (512, 512), checked=16, length=512, roundings=2),
        "conv": Probe(_conv, (1, 32, 28, 28), (32, 32, 3, 3), checked=1, length=288, roundings=4),
        "attention": Probe(_attention, (1, 3, 4, 128, 64), (1,), checked=1, length=128, roundings=6),
        "norm": Probe(_norm, (512, 512), (2, 512), checked=32, length=512, roundings=4),
    },
    "cuda": {
        "matmul": Probe(_matmul, (1024, 4096), (4096, 4096), checked=16, length=4096, roundings=2),
        "conv": Probe(_conv, (8, 128, 56, 56), (128, 128, 3, 3), checked=1, length=1152, roundings=4),
        "attention": Probe(_attention, (2, 3, 16, 1024, 64), (1,), checked=1, length=1024, roundings=6),
        "norm": Probe(_norm, (4096, 4096), (2, 4096), checked=16, length=4096, roundings=4),
    },
}


@dataclass(frozen=True)
class Measurement:
    """How a format did in an operation.

    Attributes:
        relative_time: its time divided by float32's; None where float32 itself does not run.
        lower_bound: the format was cut short: its relative time is at least this.
        fault: what is wrong with the results, or `""`.
    """

    relative_time: float | None
    lower_bound: bool = False
    fault: str = ""


def measure(operation: str, names: Sequence[str], device: torch.device, seconds: float) -> dict[str, Measurement]:
    """Times and checks `operation` in the formats `names`; those without a kernel for it are left out of the answer.

    Args:
        operation: a key of `halfwise.core.hardware.OPERATIONS`.
        names: formats, float32 among them.
        device: a CPU, or the current CUDA device.
        seconds: how long one float32 call should take, twice that on a GPU; the batch grows up to 64 times to reach it.
    """
    probe = PROBES[device.type][operation]
    try:
        batch, weight = _fitted_inputs(probe, device, seconds)
    except RuntimeError as error:  # there is nothing to compare with
        return {"float32": Measurement(None, fault=f"does not run: {str(error).partition(chr(10))[0]}")}
    calls: dict[str, Call] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            inputs = _rounded(name, batch, weight)
            call = _call(probe, name, *inputs)
            with _float32_as(name):
                results = call()  # the warm-up as well: some kernels are generated when first called
            faults[name] = _fault(probe, name, results, *inputs)
        except (RuntimeError, ValueError):  # torch has no such kernel here
            continue
        calls[name] = call
    return {name: Measurement(*timing, faults[name]) for name, timing in _race(calls, device).items()}


def _fitted_inputs(probe: Probe, device: torch.device, seconds: float) -> tuple[Tensor, Tensor]:
    """Batch and weight in float32, the batch so large that a call takes `seconds`."""
    generator = torch.Generator("cpu").manual_seed(0)  # our own: the caller's random numbers stay as they were
    batch, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
        for shape in (probe.batch, probe.weight)
    )
    wanted = seconds * (2 if device.type == "cuda" else 1)
    for _ in range(_DOUBLINGS):
        call = _call(probe, "float32", batch, weight)
        with _float32_as("float32"):
            call()
            taken = min(_seconds(call, device)[0] for _ in range(2))
        if taken >= wanted:
            break
        batch = torch.cat([batch, batch])
    return batch, weight


def _rounded(name: str, batch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    # float8_e5m2 is for gradients: GPUs multiply it with the float8_e4m3fn of weights, never with itself.
    weight_dtype = torch.float8_e4m3fn if name == "float8_e5m2" else _DTYPES[name]
    return batch.to(_DTYPES[name]), weight.to(weight_dtype)


def _call(probe: Probe, name: str, batch: Tensor, weight: Tensor) -> Call:
    if not name.startswith("float8"):
        return lambda: probe.run(batch, weight)
    if probe.run is not _matmul:
        raise ValueError(f"{name} has matrix products only")  # as torch says of a kernel that it lacks
    # The second operand must be column-major; training in float8 therefore keeps both layouts of a weight.
    one = torch.ones((), device=batch.device)
    operands = (weight.t(), weight.t().contiguous().t())
    return lambda: [torch._scaled_mm(batch, w, scale_a=one, scale_b=one, out_dtype=_FLOAT8_RESULT) for w in operands]


def _fault(probe: Probe, name: str, results: Sequence[Tensor], batch: Tensor, weight: Tensor) -> str:
    """What is wrong with `results`, or `""`."""
    ends = torch.cat([batch[: probe.checked].cpu(), batch[-probe.checked :].cpu()]).double()
    references = probe.run(ends, weight.cpu().double())
    bound = error_bound("bfloat16" if name.startswith("float8") else name, probe.length, probe.roundings)
    for result, reference in zip(results, references, strict=True):
        if not bool(result.isfinite().all()):
            return "NaN or inf in the result"
        sample = torch.cat([result[: probe.checked], result[-probe.checked :]]).cpu().double()
        # Relative to the element, or to the typical one where cancellation made the element small.
        error = float(((sample - reference).abs() / (reference.abs() + reference.square().mean().sqrt())).max())
        if not error <= bound:  # so written that NaN does not pass
            return f"relative error {error:.2g}, at most {bound:.2g} is sound"
    return ""


def _race(calls: Mapping[str, Call], device: torch.device) -> dict[str, tuple[float, bool]]:
    """Format -> (time relative to float32, whether that is a lower bound). float32 must be among them."""
    others = [name for name in calls if name != "float32"]
    base: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in others}
    cuts: dict[str, list[bool]] = {name: [] for name in others}
    for _ in range(_ROUNDS):
        with _float32_as("float32"):
            base.append(_seconds(calls["float32"], device)[0])
        for name in others:
            if cuts[name][:2] == [True, True]:
                continue
            with _float32_as(name):
                taken, cut = _seconds(calls[name], device, limit=_CALLS * base[-1])
            times[name].append(taken)
            cuts[name].append(cut)
    outcome = {"float32": (1.0, False)}
    for name in others:
        cut = 2 * sum(cuts[name]) > len(cuts[name])
        if cut:  # too few calls for a median: the fastest one gives a bound, and a cut means longer than float32
            ratio = max(1.0, min(times[name]) / statistics.median(base))
        else:
            ratio = statistics.median(taken / reference for taken, reference in zip(times[name], base, strict=True))
        outcome[name] = (float(f"{ratio:.4g}"), cut)  # more digits would be noise
    return outcome


def _seconds(call: Call, device: torch.device, limit: float = float("inf")) -> tuple[float, bool]:
    """Seconds per call, from `_CALLS` calls; on a CPU from fewer, and True, once they took more than `limit` in all."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _CALLS, False
    began = time.perf_counter()
    for made in range(1, _CALLS):
        call()
        taken = time.perf_counter() - began
        if taken > limit:
            return taken / made, True
    call()
    return (time.perf_counter() - began) / _CALLS, False


@contextmanager
def _float32_as(name: str) -> Iterator[None]:
    """Kernels for float32 tensors multiply in tensorfloat32 if that is `name`, else in float32, whatever was set."""
    # torch replaces these modules by objects that have the attributes.
    on_gpu = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    on_cpu = [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv]  # type: ignore[attr-defined]
    switches = on_gpu + on_cpu
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32" if name == "tensorfloat32" and switch in on_gpu else "ieee"
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
