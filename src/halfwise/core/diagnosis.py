"""What went wrong, in words: verdicts, the suspects behind them, and the incidents that a run records.

Data first: a `Diagnosis` holds facts; `Diagnosis.text()` renders them as one screen. Adapters fill it in, reports and
`events.jsonl` read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["VERDICTS", "Diagnosis", "Direction", "Incident", "Suspect", "Verdict"]

Verdict = Literal[
    "gradient_vanishes",
    "healthy",
    "loss_scale_settling",
    "loss_scale_too_high",
    "not_a_precision_problem",
    "nonfinite_input",
    "nonfinite_parameters",
    "not_reproducible",
    "overflow_at_every_scale",
]
Direction = Literal["forward", "backward", ""]

VERDICTS: Mapping[Verdict, str] = {
    "gradient_vanishes": "a gradient is exactly 0 where the loss is large: nothing is learned from such samples",
    "healthy": "the step is healthy",
    "loss_scale_settling": "steps are skipped while the loss scale settles: healthy",
    "loss_scale_too_high": "gradients overflow only because of the loss scale: a lower one cures it",
    "not_a_precision_problem": "NaN or inf in float32 too: not a precision problem",
    "nonfinite_input": "the input data hold NaN or inf: not a precision problem",
    "nonfinite_parameters": "the weights or buffers already hold NaN or inf: reload a checkpoint",
    "not_reproducible": "the failure did not come back when the step was run again",
    "overflow_at_every_scale": "overflow at every loss scale: the module needs float32",
}


@dataclass(frozen=True)
class Suspect:
    """An operation whose inputs were sound and whose output was not.

    Attributes:
        module: dotted path of the innermost module that ran the operation; `""` is the model itself where
            `module_class` is set, and else the code outside all modules (usually the loss).
        operation: the operation's name, such as `"aten.addmm"`; backward that of the operation whose gradient it is;
            `""`
            where no operation is to blame: a parameter or input that was bad from the start.
        direction: `"forward"`, `"backward"`, or `""` without an operation.
        source: `"file.py:line"` of the user's code, or `""` where unknown.
        dtype: the output's dtype, such as `"float16"`.
        found: what stood in the output: `"inf"`, `"-inf"` or `"nan"`.
        largest_input: largest finite magnitude among the operation's inputs.
        module_class: the module's class name, `""` outside all modules.
    """

    module: str
    operation: str
    direction: Direction
    source: str
    dtype: str
    found: str
    largest_input: float
    module_class: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a step, with its evidence and the smallest fix.

    Attributes:
        verdict: a key of `VERDICTS`.
        suspects: the producers of the non-finite values, the likeliest first. Empty where the verdict needs none.
        detail: one sentence with the numbers behind the verdict.
        fix: lines to paste, or advice, the smallest change first.
        evidence: named numbers (loss scale, largest values, ...).
    """

    verdict: Verdict
    suspects: tuple[Suspect, ...] = ()
    detail: str = ""
    fix: tuple[str, ...] = ()
    evidence: Mapping[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """True where nothing has to be done."""
        return self.verdict in ("healthy", "loss_scale_settling")

    @property
    def module(self) -> str:
        """Dotted path of the likeliest culprit; `""` where there is none or it lies outside all modules."""
        return self.suspects[0].module if self.suspects else ""

    @property
    def operation(self) -> str:
        """The likeliest culprit's operation, or `""`."""
        return self.suspects[0].operation if self.suspects else ""

    @property
    def direction(self) -> Direction:
        """`"forward"`, `"backward"`, or `""` where there is no culprit."""
        return self.suspects[0].direction if self.suspects else ""

    @property
    def source(self) -> str:
        """`"file.py:line"` of the likeliest culprit, or `""`."""
        return self.suspects[0].source if self.suspects else ""

    @property
    def dtype(self) -> str:
        """The dtype in which the likeliest culprit overflowed, or `""`."""
        return self.suspects[0].dtype if self.suspects else ""

    def text(self) -> str:
        """The diagnosis as one screen of plain text."""
        rows = [("verdict", VERDICTS[self.verdict])]
        if self.suspects and self.suspects[0].operation:
            first = self.suspects[0]
            rows.append(("module", _where(first)))
            rows.append(("operation", f"{first.operation} in {first.dtype}, {first.direction}"))
            if first.source:
                rows.append(("line", first.source))
            rows.append(("range", f"output holds {first.found}; largest input {first.largest_input:.4g}"))
        if self.detail:
            rows.append(("detail", self.detail))
        others = list(dict.fromkeys(_short(s) for s in self.suspects[1:] if s.operation))
        if others:
            rows.append(("also", ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")))
        for index, line in enumerate(self.fix):
            rows.append(("fix" if index == 0 else "", line))
        return "halfwise: " + "\n".join(f"{name:<10} {value}" for name, value in rows).removeprefix("verdict    ")


def _where(suspect: Suspect) -> str:
    if suspect.module:
        return f"{suspect.module} ({suspect.module_class})" if suspect.module_class else suspect.module
    return (
        f"the model's own code ({suspect.module_class})" if suspect.module_class else "outside all modules (the loss?)"
    )


def _short(suspect: Suspect) -> str:
    place = suspect.module or (suspect.module_class and f"({suspect.module_class})") or "(loss)"
    return f"{place} {suspect.operation}" + (f" at {suspect.source}" if suspect.source else "")


@dataclass(frozen=True)
class Incident:
    """What the guard records when it localises, heals or stops. One line of `events.jsonl`.

    Attributes:
        step: number of the step, from 0, counted over all calls of the run.
        kind: `"healed"`, `"reported"` (nothing was changed) or `"stopped"`.
        verdict: a key of `VERDICTS`.
        module, operation, direction, source, dtype: those of the likeliest suspect.
        rank: the process that saw it; 0 where training is not distributed.
        action: the format that the module was moved to (`"float32"`), `"skipped"`, or `"stopped"`.
        suspects: module paths of all suspects.
        text: the diagnosis as a person reads it.
    """

    step: int
    kind: Literal["healed", "reported", "stopped"]
    verdict: Verdict
    module: str = ""
    operation: str = ""
    direction: Direction = ""
    source: str = ""
    dtype: str = ""
    rank: int = 0
    action: str = ""
    suspects: tuple[str, ...] = ()
    text: str = ""

    @classmethod
    def of(
        cls,
        diagnosis: Diagnosis,
        *,
        step: int,
        kind: Literal["healed", "reported", "stopped"],
        action: str,
        rank: int = 0,
    ) -> Incident:
        """The incident that records `diagnosis` at `step`."""
        return cls(
            step=step,
            kind=kind,
            verdict=diagnosis.verdict,
            module=diagnosis.module,
            operation=diagnosis.operation,
            direction=diagnosis.direction,
            source=diagnosis.source,
            dtype=diagnosis.dtype,
            rank=rank,
            action=action,
            suspects=tuple(dict.fromkeys(s.module for s in diagnosis.suspects)),
            text=diagnosis.text(),
        )

    @property
    def same_as(self) -> tuple[str, ...]:
        """What two incidents have in common that tell the same thing about different steps."""
        return (self.kind, self.verdict, self.module, self.operation, self.direction, self.dtype)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Incident:
        """The inverse of `as_dict`."""
        return cls(**{**fields, "suspects": tuple(fields.get("suspects", ()))})
