"""Numbers and names as the reports spell them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["command_name", "count", "evidence_text", "ratio_text", "seconds_text"]

_NAMES = {
    "largest": "largest value",
    "largest_input": "largest input",
    "seconds": "time in the format",
    "seconds_float32": "time in float32",
    "underflow": "rounds to zero",
    "score": "squared change of the loss",
    "gradient_error": "error of its weight gradients",
    "relative_memory": "bytes kept for backward relative to float32",
    "relative_time": "time relative to float32",
    "saved_values": "values kept for backward",
}
_OF_A_FORMAT = {
    "relative_time_": "time in {} relative to float32",
    "score_": "squared change of the loss in {}",
    "seconds_": "time in {}",
}


def command_name() -> str:
    """How the command can be typed here: `halfwise` where the shell finds it, else the path that it was started by."""
    if shutil.which("halfwise"):
        return "halfwise"
    started = Path(sys.argv[0])
    if started.name != "halfwise":
        return "python -m halfwise"
    return os.path.relpath(started) if started.is_absolute() else str(started)


def seconds_text(seconds: float) -> str:
    """A duration with three digits and a unit that suits it.

    >>> seconds_text(0.00123), seconds_text(75.0)
    ('1.23 ms', '1 min 15 s')
    """
    if seconds >= 60.0:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def ratio_text(ratio: float, *, at_least: bool = False) -> str:
    """A ratio of times as a factor.

    >>> ratio_text(0.514), ratio_text(13.21, at_least=True)
    ('0.51x', 'at least 13x')
    """
    return f"{'at least ' if at_least else ''}{ratio:.{2 if ratio < 10 else 0}f}x"


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "step"), count(1438, "image")
    ('1 step', '1,438 images')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def evidence_text(evidence: Mapping[str, float]) -> list[tuple[str, str]]:
    """Named numbers as `(name, value)` in words."""
    return [(_evidence_name(name), _evidence_value(name, value)) for name, value in evidence.items()]


def _evidence_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    for start, words in _OF_A_FORMAT.items():
        if name.startswith(start):
            return words.format(name.removeprefix(start))
    return name.replace("_", " ")


def _evidence_value(name: str, value: float) -> str:
    if name.startswith("seconds"):
        return seconds_text(value)
    if name in ("underflow", "overflow", "gradient_error"):
        return f"{value:.2%}"
    if name == "saved_values":
        return f"{value:,.0f}"
    return f"{value:.4g}"
