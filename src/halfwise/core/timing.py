"""Measured (or supplied) time per layer and format: the planner's view of the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from halfwise.core.formats import get_format
from halfwise.errors import UsageError

__all__ = ["TimingTable"]


@dataclass(frozen=True)
class TimingTable:
    """Seconds of one training step's forward and backward, per layer and format.

    Attributes:
        seconds: module path -> format name -> seconds, in the order in which the layers run. Casts are included: from
            and to float32, as if the neighbours computed in that. Every layer has `"float32"`; a format that is absent
            was not measured and is not chosen.
        cut_short: `(path, format)` pairs whose probe was ended because it had already taken longer than float32:
            their seconds are a lower bound.
        casts: path -> seconds of casting the layer's inputs, and their gradients back, which it saves where the layer
            before it computes in the same format. A layer that is absent casts for nothing.
        spread: path -> seconds by which repeated measurements of the layer differ; a smaller gain is no gain. A layer
            that is absent was measured exactly.
        saved: path -> how many floating values the layer keeps for the backward pass. For the objective `"memory"`.

    Raises:
        UsageError: a time is not positive, or a layer lacks `"float32"`; PolicyError: a format is unknown.

    >>> table = TimingTable({"fc": {"float32": 2e-3, "bfloat16": 1e-3}})
    >>> table.ratio("bfloat16")
    0.5
    """

    seconds: Mapping[str, Mapping[str, float]]
    cut_short: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    casts: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Mapping) or not all(isinstance(t, Mapping) for t in self.seconds.values()):
            raise UsageError(
                f"timing table: {self.seconds!r:.60} does not map layers to times; give {{'fc': {{'float32': 2e-3}}}}"
            )
        for path, times in self.seconds.items():
            if "float32" not in times:
                raise UsageError(
                    f"timing table: layer {path!r} has no time for 'float32'; every format is compared with it"
                )
            for name, seconds in times.items():
                get_format(name)
                if not seconds > 0.0:
                    raise UsageError(
                        f"timing table: {path!r} in {name} takes {seconds!r} seconds; give a positive number"
                    )
        for what in ("casts", "spread", "saved"):
            for path, value in getattr(self, what).items():
                if path not in self.seconds or not 0.0 <= value < float("inf"):
                    raise UsageError(
                        f"timing table: {what}[{path!r}] is {value!r}; give a number from 0 on, for a layer with times"
                    )

    def check_paths(self, paths: Iterable[str], model: str) -> None:
        """Checks the table against the module paths that a model has.

        Raises:
            UsageError: it names layers that do not exist.
        """
        known = set(paths)
        unknown = [path for path in self.seconds if path not in known]
        if unknown:
            shown = ", ".join(map(repr, unknown[:5]))
            raise UsageError(f"the timing table names layers that {model!r} does not have: {shown}")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats besides float32 for which any layer has a time, sorted."""
        return tuple(sorted({name for times in self.seconds.values() for name in times} - {"float32"}))

    def get(self, path: str, format_name: str) -> float | None:
        """Seconds of the layer in the format, or None where it was not measured."""
        return self.seconds.get(path, {}).get(format_name)

    def is_lower_bound(self, path: str, format_name: str) -> bool:
        """True where the probe was cut short."""
        return (path, format_name) in self.cut_short

    def total(self, format_name: str, paths: Iterable[str] | None = None) -> float:
        """Seconds of all layers (or those of `paths`) in the format; where it was not measured, in float32."""
        chosen = self.seconds if paths is None else list(paths)
        return sum(self.seconds[p].get(format_name, self.seconds[p]["float32"]) for p in chosen)

    def saved_seconds(self, format_name: str) -> float:
        """What the layers that are quicker in the format save together, beside float32."""
        rows = [times for times in self.seconds.values() if format_name in times]
        return sum(max(0.0, times["float32"] - times[format_name]) for times in rows)

    def ratio(self, format_name: str) -> float:
        """Time of all layers in the format relative to float32; below 1 is faster. 1 where the table is empty."""
        everything = self.total("float32")
        return self.total(format_name) / everything if everything > 0.0 else 1.0

    @classmethod
    def uniform(cls, paths: Iterable[str], *, relative: Mapping[str, float], float32: float = 1e-3) -> TimingTable:
        """A table in which every layer takes `float32` seconds, and `relative[format]` times that in each format."""
        row = {"float32": float32, **{name: float32 * ratio for name, ratio in relative.items()}}
        return cls({path: dict(row) for path in paths})
