"""Hardware to plan for: which formats it has units for, and how fast they usually are beside its float32.

The ratios come from the makers' peak figures and are estimates. Matrix multiplications are taken to reach half of what
the peaks promise, convolutions a third, and what only moves memory follows the bytes: a plan for another machine is for
sending there, and `"auto"` measures anew where it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from halfwise.core.timing import TimingTable
from halfwise.errors import PolicyError

__all__ = ["HERE", "TARGETS", "Kind", "Target", "get_target", "kind_of"]

Kind = Literal["matmul", "conv", "attention", "norm", "other"]
"""What a layer mostly does."""

HERE = "here"
"""The target that is this machine, measured."""

_REACHED: Mapping[Kind, float] = {"matmul": 1 / 2, "attention": 1 / 2, "conv": 1 / 3}
_MOVING_MEMORY: Mapping[str, float] = {"tensorfloat32": 1.0, "bfloat16": 0.6, "float16": 0.6, "float8_e4m3fn": 0.6}


@dataclass(frozen=True)
class Target:
    """A kind of hardware.

    Attributes:
        name: what users type.
        device_type: `"cuda"`, `"tpu"` or `"cpu"`: whose rules for mixed precision hold.
        peaks: format -> peak rate of multiplications relative to float32; the formats that it has units for.
        emulated: format -> time relative to float32 of a format that runs without units of its own.
        source: where the peaks come from.
    """

    name: str
    device_type: Literal["cuda", "tpu", "cpu"]
    peaks: Mapping[str, float]
    source: str
    emulated: Mapping[str, float] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats besides float32 that it has units for, the ones with fewer bits last."""
        return tuple(self.peaks)

    @property
    def runs(self) -> tuple[str, ...]:
        """The formats besides float32 that it can run, emulated ones included."""
        return (*self.peaks, *self.emulated)

    def relative_time(self, kind: Kind, format_name: str) -> float | None:
        """Usual time of a layer of this kind in the format, relative to float32; None where it cannot run.

        >>> get_target("cuda:ampere").relative_time("matmul", "bfloat16")
        0.125
        """
        if format_name == "float32":
            return 1.0
        if format_name in self.emulated:
            return self.emulated[format_name]
        if format_name not in self.peaks:
            return None
        if kind not in _REACHED:
            return _MOVING_MEMORY[format_name]
        return min(1.0, 1.0 / (self.peaks[format_name] * _REACHED[kind]))

    def estimate(
        self, float32: Mapping[str, float], kinds: Mapping[str, Kind], saved: Mapping[str, int]
    ) -> TimingTable:
        """A timing table for this target: the layers' float32 times, measured anywhere, times the usual ratios.

        Args:
            float32: path -> seconds. Only how they compare among the layers matters.
            kinds: path -> what the layer mostly does; absent means `"other"`.
            saved: as in `TimingTable`.
        """
        seconds: dict[str, dict[str, float]] = {}
        for path, full in float32.items():
            ratios = {name: self.relative_time(kinds.get(path, "other"), name) for name in ("float32", *self.runs)}
            seconds[path] = {name: full * ratio for name, ratio in ratios.items() if ratio is not None}
        return TimingTable(seconds, saved=saved)


def _cuda(name: str, float32: float, peaks: Mapping[str, float], source: str) -> Target:
    """From teraflops: dense, tensor cores, float32 accumulation; `float32` without tensor cores."""
    return Target(name, "cuda", MappingProxyType({f: peak / float32 for f, peak in peaks.items()}), source)


_AMPERE = {"tensorfloat32": 156.0, "bfloat16": 312.0, "float16": 312.0}
_HOPPER = {"tensorfloat32": 494.7, "bfloat16": 989.4, "float16": 989.4, "float8_e4m3fn": 1978.9}
_BLACKWELL = {"tensorfloat32": 1125.0, "bfloat16": 2250.0, "float16": 2250.0, "float8_e4m3fn": 4500.0}

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            _cuda("cuda:volta", 15.7, {"float16": 125.0}, "NVIDIA V100 data sheet, SXM2"),
            _cuda("cuda:ampere", 19.5, _AMPERE, "NVIDIA A100 data sheet, SXM4, without sparsity"),
            _cuda("cuda:hopper", 66.9, _HOPPER, "NVIDIA H100 data sheet, SXM5, without sparsity"),
            _cuda("cuda:blackwell", 75.0, _BLACKWELL, "NVIDIA HGX B200 data sheet, one GPU, without sparsity"),
            Target(
                "tpu",
                "tpu",
                MappingProxyType({"bfloat16": 6.0}),
                "JAX's documentation of matmul precision: float32 takes six passes of bfloat16",
            ),
            Target(
                "cpu:amx",
                "cpu",
                MappingProxyType({"bfloat16": 16.0}),
                "Intel's optimization manual: bfloat16 operations per cycle, AMX against AVX-512 float32",
            ),
            Target(
                "cpu:avx2",
                "cpu",
                MappingProxyType({}),
                "`halfwise doctor` on an AVX2 machine: half precision is emulated",
                emulated=MappingProxyType({"bfloat16": 10.0, "float16": 10.0}),
            ),
        )
    }
)
"""The targets besides `"here"`."""


def get_target(name: str) -> Target:
    """The target called `name`.

    Raises:
        PolicyError: there is no such target, or it is `"here"`, which has no table: it is measured.

    >>> get_target("cuda:volta").formats
    ('float16',)
    """
    try:
        return TARGETS[name]
    except (KeyError, TypeError):
        allowed = ", ".join([HERE, *TARGETS])
        raise PolicyError(f"unknown target {name!r}: use one of {allowed}") from None


def kind_of(class_name: str) -> Kind:
    """What a layer of this class mostly does, from the words in its name, which both frameworks share.

    >>> kind_of("Conv2D"), kind_of("MultiheadAttention"), kind_of("LayerNorm"), kind_of("LSTM"), kind_of("Embedding")
    ('conv', 'attention', 'norm', 'matmul', 'other')
    """
    words = class_name.lower()
    if "norm" in words:
        return "norm"
    if "attention" in words:
        return "attention"
    if "conv" in words:
        return "conv"
    matmul = ("linear", "dense", "lstm", "gru", "rnn")
    return "matmul" if any(word in words for word in matmul) else "other"
