"""What a device can do in each format, as data, and the sentence that follows from it.

An adapter measures (`halfwise.torch.inspect`), this module holds the result and judges it, `halfwise.report` draws it.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halfwise.core.formats import FORMATS

__all__ = [
    "FRAMEWORKS",
    "OPERATIONS",
    "FormatSupport",
    "HardwareReport",
    "Support",
    "advice",
    "error_bound",
    "framework_versions",
    "native_formats_cpu",
    "native_formats_cuda",
    "time_text",
]

Support = Literal["native", "emulated", "absent"]

OPERATIONS = ("matmul", "conv", "attention", "norm")
"""The operations that are measured, in the order in which they are shown."""

FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "jax": ("jax",),
}
"""Frameworks, and the distributions that may bring them."""

# The order is the preference: bfloat16 needs no loss scale and cannot overflow where float32 does not.
_CANDIDATES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
# Casts around a layer cost up to a fifth of the time (Campo, USENIX ATC 2022): a smaller gain would be eaten up.
_WORTH_IT = 0.9
# The layers that mixed precision is about. Attention or normalisation alone would not pay for the casts around them.
_DECISIVE = ("matmul", "conv")

_CPU_UNITS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
_CUDA_UNITS = {
    "float16": (7, 0),
    "tensorfloat32": (8, 0),
    "bfloat16": (8, 0),
    "float8_e4m3fn": (8, 9),
    "float8_e5m2": (8, 9),
}


@dataclass(frozen=True)
class FormatSupport:
    """What a device does in one format.

    Attributes:
        support: `"native"`: the device has units for it; `"emulated"`: it runs, by way of float32; `"absent"`: it
            cannot run.
        relative_time: operation -> median time divided by float32's (below 1 is faster); None where the format has no
            kernel for the operation. The keys are `OPERATIONS`.
        lower_bounds: the operations whose probe was cut short because it took longer than float32: their
            `relative_time` says "at least".
        correct: every kernel that ran agreed with float64 within `error_bound`. False where nothing ran.
        faults: one sentence for each kernel that did not.
    """

    support: Support
    relative_time: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(OPERATIONS))
    lower_bounds: tuple[str, ...] = ()
    correct: bool = False
    faults: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return {
            "support": self.support,
            "relative_time": dict(self.relative_time),
            "lower_bounds": list(self.lower_bounds),
            "correct": self.correct,
            "faults": list(self.faults),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FormatSupport:
        """The inverse of `to_dict`."""
        return cls(
            support=fields["support"],
            relative_time=dict(fields["relative_time"]),
            lower_bounds=tuple(fields["lower_bounds"]),
            correct=fields["correct"],
            faults=tuple(fields["faults"]),
        )


@dataclass(frozen=True)
class HardwareReport:
    """What a device does in every format.

    Attributes:
        device: `"cpu"` or `"cuda:N"`.
        device_name: the maker's name for it.
        device_features: what matters for precision, in words: instruction sets, or compute capability and memory.
        frameworks: name -> installed version.
        formats: format's name -> `FormatSupport`, one for each of `halfwise.core.formats.FORMATS`.
    """

    device: str
    device_name: str
    device_features: tuple[str, ...]
    frameworks: Mapping[str, str]
    formats: Mapping[str, FormatSupport]

    def to_dict(self) -> dict[str, Any]:
        """The fields and the advice that follows from them, JSON-ready: what `halfwise doctor --json` prints."""
        return {
            "device": self.device,
            "device_name": self.device_name,
            "device_features": list(self.device_features),
            "frameworks": dict(self.frameworks),
            "formats": {name: support.to_dict() for name, support in self.formats.items()},
            "advice": advice(self),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> HardwareReport:
        """The inverse of `to_dict`. The advice is not read: it follows from the rest."""
        return cls(
            device=fields["device"],
            device_name=fields["device_name"],
            device_features=tuple(fields["device_features"]),
            frameworks=dict(fields["frameworks"]),
            formats={name: FormatSupport.from_dict(support) for name, support in fields["formats"].items()},
        )


def framework_versions() -> dict[str, str]:
    """Framework -> version, for those that are installed. Nothing is imported."""
    versions = {}
    for name, distributions in FRAMEWORKS.items():
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def native_formats_cpu(flags: Collection[str]) -> frozenset[str]:
    """The formats that a CPU with these instruction sets (torch's names for them) computes in.

    `f16c` does not count: it converts float16, it does not compute in it.

    >>> sorted(native_formats_cpu({"avx2", "f16c", "avx512_bf16"}))
    ['bfloat16', 'float32']
    """
    return frozenset({"float32"} | {name for name, units in _CPU_UNITS.items() if any(unit in flags for unit in units)})


def native_formats_cuda(capability: tuple[int, int]) -> frozenset[str]:
    """The formats for which an NVIDIA GPU of this compute capability has tensor cores, and float32.

    >>> sorted(native_formats_cuda((7, 5)))
    ['float16', 'float32']
    """
    return frozenset({"float32"} | {name for name, least in _CUDA_UNITS.items() if capability >= least})


def error_bound(format_name: str, length: int, roundings: int) -> float:
    """The largest error, relative to the result's size, that a sound kernel of this format may make.

    Twice `roundings` roundings to the format, and a sum over `length` products in float32, which grows with the square
    root of the length (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). A sum kept in a half format does not pass.

    Args:
        format_name: the format of the result: for float8, whose products are returned in bfloat16, `"bfloat16"`.
        length: how many products are summed into one element of the result.
        roundings: how often a value is rounded to the format on its way.

    >>> error_bound("float32", 256, 2) < 5e-6 < 1e-3 < error_bound("float16", 256, 2) < 0.01
    True
    """
    return 2.0 * (roundings * FORMATS[format_name].eps + math.sqrt(length) * FORMATS["float32"].eps)


def advice(report: HardwareReport) -> str:
    """One sentence: what the policy `"auto"` would do on this device, and why.

    Wrong results rule a format out whatever its speed; of the others, those stay that make matrix products or
    convolutions clearly faster. Formats that no policy trains in (tensorfloat32, float8) play no part.
    """
    float32 = report.formats["float32"]
    if not float32.correct:
        fault = _first_fault(float32)
        return f'"auto" cannot help here: float32 itself fails ({fault}); train on another device.'
    candidates = {name: report.formats[name] for name in _CANDIDATES if name in report.formats}
    chosen = [name for name, support in candidates.items() if _worthwhile(support)]
    others = [name for name in candidates if name not in chosen]
    reasons = "; ".join(_reason(name, candidates[name]) for name in chosen + others)
    what = f"try {', then '.join(_CANDIDATES[name] for name in chosen)}" if chosen else "stay in float32"
    return f'"auto" would {what} here, because {reasons}.'


def time_text(support: FormatSupport, operation: str) -> str:
    """A relative time for the reader: `"0.42"`, `"> 15"` for a lower bound, `"-"` where nothing was measured.

    >>> time_text(FormatSupport("emulated", {"matmul": 15.23}, ("matmul",)), "matmul")
    '> 15'
    """
    value = support.relative_time.get(operation)
    if value is None:
        return "-"
    digits = f"{value:.2f}" if value < 9.95 else f"{value:.0f}"
    return f"> {digits}" if operation in support.lower_bounds else digits


def _worthwhile(support: FormatSupport) -> bool:
    return support.support != "absent" and support.correct and any(_gains(support, name) for name in _DECISIVE)


def _gains(support: FormatSupport, operation: str) -> bool:
    value = support.relative_time.get(operation)
    return value is not None and value <= _WORTH_IT and operation not in support.lower_bounds


def _reason(format_name: str, support: FormatSupport) -> str:
    if support.support == "absent":
        return f"{format_name} cannot run"
    if not support.correct:
        return f"{format_name} gives wrong results ({_first_fault(support)})"
    measured = [name for name in ("matmul", "conv", "attention") if support.relative_time.get(name) is not None]
    times = [time_text(support, operation).replace(">", "at least") for operation in measured]
    unit = " x float32's time"
    parts = [
        f"{time}{unit if index == 0 else ' x'} in {name}"
        for index, (time, name) in enumerate(zip(times, measured, strict=True))
    ]
    emulated = " (emulated)" if support.support == "emulated" else ""
    return f"{format_name}{emulated} takes {', '.join(parts)}"


def _first_fault(support: FormatSupport) -> str:
    return support.faults[0] if support.faults else "no kernel ran"
