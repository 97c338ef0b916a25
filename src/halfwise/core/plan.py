"""Plans: which module computes and stores in which format, and why.

A plan is made to be read, reviewed and committed like a lock file; `plan_file.py` reads and writes it as TOML.

How a rule is found for a module path: a rule with exactly that path; else the one pattern that matches; else the rule
of the nearest enclosing module; else the plan's default. Two patterns that match one path and say different things are
an error. In a pattern `*` stands for any characters but the dot, `**` for any characters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from halfwise.core.formats import FORMATS
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.errors import PlanError

__all__ = ["REASONS", "Change", "Default", "Plan", "Reason", "Rule"]

Reason = Literal[
    "range",
    "sensitivity",
    "slower",
    "operation",
    "hazard",
    "healed",
    "manual",
    "neighbours",
    "faster",
    "memory",
    "policy",
]

REASONS: Mapping[Reason, str] = {
    "range": "its values would not fit the format",
    "sensitivity": "rounding it would disturb the training too much",
    "slower": "the format is not faster here",
    "operation": "the operation cannot run in the format",
    "hazard": "the code holds a known hazard for the format",
    "healed": "it failed in training and was moved to keep the run alive",
    "manual": "set by hand",
    "neighbours": "switching between its neighbours would cost more than it gains",
    "faster": "the format is faster here, and range and tolerance allow it",
    "memory": "less is kept for the backward pass, and range and tolerance allow it",
    "policy": "the policy asks for it everywhere",
}

_STORAGE = ("parameters", "saved_activations", "optimizer_state")


@dataclass(frozen=True, kw_only=True)
class Default:
    """What holds for every module without a rule of its own.

    Attributes:
        compute: the format that the module computes in, by its framework's rules for mixed precision.
        parameters, saved_activations, optimizer_state: formats of what is stored; default `"float32"`.
        reason: a key of `REASONS`.
        detail: one sentence with the numbers behind the reason.
        evidence: named numbers.
    """

    compute: str = "float32"
    parameters: str = "float32"
    saved_activations: str = "float32"
    optimizer_state: str = "float32"
    reason: Reason = "manual"
    detail: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_formats(self, "default")
        if self.reason not in get_args(Reason):
            raise PlanError(f"default has the reason {self.reason!r}; allowed: {', '.join(REASONS)}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What holds for one module, or for all modules that a pattern matches, and for what they call.

    Attributes:
        path: dotted module path, matched exactly; or None.
        pattern: a pattern of paths; or None. Exactly one of the two is given.
        compute: the format that the module computes in.
        parameters, saved_activations, optimizer_state: formats of what is stored; None means as the default.
        reason, detail, evidence: as in `Default`.
    """

    path: str | None = None
    pattern: str | None = None
    compute: str
    parameters: str | None = None
    saved_activations: str | None = None
    optimizer_state: str | None = None
    reason: Reason = "manual"
    detail: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.pattern is None):
            raise PlanError(
                f"a layer needs a path or a pattern, and not both; got path={self.path!r}, pattern={self.pattern!r}"
            )
        _check_formats(self, self.name)
        if self.reason not in get_args(Reason):
            raise PlanError(f"layer {self.name!r} has the reason {self.reason!r}; allowed: {', '.join(REASONS)}")

    @property
    def name(self) -> str:
        """The path or the pattern, whichever is given."""
        return self.path if self.path is not None else str(self.pattern)

    def matches(self, path: str) -> bool:
        """True where the rule names `path` itself (not merely a module that encloses it)."""
        return self.path == path if self.pattern is None else _compiled(self.pattern).fullmatch(path) is not None

    def says_the_same_as(self, other: Rule) -> bool:
        """True where both rules have the same effect on a module that both match."""
        return all(getattr(self, name) == getattr(other, name) for name in ("compute", *_STORAGE))


@dataclass(frozen=True)
class Change:
    """One difference between two plans.

    `where` is a layer's path or pattern, `"default"`, `"loss_scale"` or `"plan"`.
    """

    where: str
    field: str
    before: object
    after: object

    def __str__(self) -> str:
        before, after = ("nothing" if value is None else value for value in (self.before, self.after))
        return f"{self.where}: {self.field} {before} -> {after}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Precision per module, with reasons.

    Attributes:
        framework: `"torch"` or `"keras"`.
        model: class name of the model, for the reader; `""` where the plan is not tied to one.
        target: the hardware it was made for; `"here"` is the machine that made it.
        default: what holds for modules without a rule.
        loss_scale: how the loss scale moves; None where nothing computes in float16.
        layers: the rules.

    Raises:
        PlanError: two rules have the same path or pattern.

    >>> plan = Plan.manual({"head": "float32"}, default="bfloat16")
    >>> plan.compute("head"), plan.compute("encoder.0")
    ('float32', 'bfloat16')
    """

    framework: Literal["torch", "keras"] = "torch"
    model: str = ""
    target: str = "here"
    default: Default = field(default_factory=Default)
    loss_scale: LossScaleSettings | None = None
    layers: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.layers]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise PlanError(f"the plan has several entries for {', '.join(map(repr, twice))}; keep one of each")

    @classmethod
    def manual(
        cls,
        layers: Mapping[str, str] | None = None,
        *,
        default: str = "float32",
        framework: Literal["torch", "keras"] = "torch",
        loss_scale: LossScaleSettings | None = None,
    ) -> Plan:
        """A plan set by hand: compute formats by module path or pattern (a key with a `*`)."""
        if layers is not None and not isinstance(layers, Mapping):
            raise PlanError(f"layers is {layers!r}; give a mapping of module paths to formats: {{'head': 'float32'}}")
        rules = tuple(
            Rule(pattern=key, compute=compute) if "*" in key else Rule(path=key, compute=compute)
            for key, compute in (layers or {}).items()
        )
        plan = cls(framework=framework, default=Default(compute=default), layers=rules, loss_scale=loss_scale)
        return replace(plan, loss_scale=LossScaleSettings()) if plan.uses("float16") and loss_scale is None else plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a TOML file. Raises `PlanError` where it cannot be read or is not a plan."""
        from halfwise.core.plan_file import read_plan

        return read_plan(path)

    def save(self, path: str | Path) -> None:
        """Writes the plan as TOML, beside the target first and renamed, so that no half-written plan is left."""
        from halfwise.core.plan_file import write_plan

        write_plan(self, path)

    def match(self, path: str) -> Rule | None:
        """The rule that names `path` itself, or None.

        Raises:
            PlanError: two patterns match and say different things.
        """
        for rule in self.layers:
            if rule.pattern is None and rule.path == path:
                return rule
        found = [rule for rule in self.layers if rule.pattern is not None and rule.matches(path)]
        for other in found[1:]:
            if not found[0].says_the_same_as(other):
                raise PlanError(
                    f"{path!r} is matched by the patterns {found[0].name!r} and {other.name!r}, which differ; "
                    f"add an entry with path = {path!r}, or narrow a pattern"
                )
        return found[0] if found else None

    def rule_for(self, path: str) -> Rule | Default:
        """What holds for the module at `path`: its own rule, that of the nearest enclosing module, or the default."""
        for candidate in _with_ancestors(path):
            if (rule := self.match(candidate)) is not None:
                return rule
        return self.default

    def compute(self, path: str) -> str:
        """The format in which the module at `path` computes."""
        return self.rule_for(path).compute

    def uses(self, format_name: str) -> bool:
        """True where the default or any rule computes in the format."""
        return self.default.compute == format_name or any(rule.compute == format_name for rule in self.layers)

    def with_rule(self, rule: Rule) -> Plan:
        """A copy in which `rule` replaces the entry of the same name, or is added."""
        return replace(self, layers=(*(r for r in self.layers if r.name != rule.name), rule))

    def check_paths(self, paths: Iterable[str], model: str) -> None:
        """Checks the plan against the module paths that a model has.

        Raises:
            PlanError: an entry names modules that do not exist, or two patterns contradict each other.
        """
        known = list(paths)
        known_set = set(known)
        missing = [
            rule.name
            for rule in self.layers
            if (rule.path not in known_set if rule.pattern is None else not any(rule.matches(p) for p in known))
        ]
        if missing:
            near = difflib.get_close_matches(missing[0], known, n=3)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"it has: {', '.join(map(repr, known[:8]))}"
            )
            shown = ", ".join(map(repr, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            made_for = f" (made for {self.model!r})" if self.model else ""
            raise PlanError(f"the plan{made_for} names modules that {model!r} does not have: {shown}; {hint}")
        for path in known:
            self.match(path)

    def __str__(self) -> str:
        """The plan for people: the default and every entry, each with its reason."""
        entries: list[tuple[str, Default | Rule]] = [
            ("default", self.default),
            *((r.name or "(the model)", r) for r in self.layers),
        ]
        width = max(len(name) for name, _ in entries)
        lines = [f"Plan for {self.model or 'any model'} ({self.framework}), target {self.target}"]
        for name, entry in entries:
            detail = f" ({entry.detail})" if entry.detail else ""
            lines.append(f"  {name:<{width}}  {entry.compute:<8}  {REASONS[entry.reason]}{detail}")
        if self.loss_scale is not None:
            lines.append(f"  loss scale from {self.loss_scale.initial:g}")
        return "\n".join(lines)

    def diff(self, other: Plan) -> tuple[Change, ...]:
        """What must change in this plan to become `other`, evidence and wording left out."""
        return tuple(_changes(self, other))


def _changes(before: Plan, after: Plan) -> Iterator[Change]:
    for name in ("framework", "model", "target"):
        if getattr(before, name) != getattr(after, name):
            yield Change("plan", name, getattr(before, name), getattr(after, name))
    for name in ("compute", *_STORAGE, "reason"):
        if getattr(before.default, name) != getattr(after.default, name):
            yield Change("default", name, getattr(before.default, name), getattr(after.default, name))
    if before.loss_scale is None or after.loss_scale is None:
        if before.loss_scale != after.loss_scale:
            yield Change("loss_scale", "settings", before.loss_scale, after.loss_scale)
    else:
        for item in fields(LossScaleSettings):
            old, new = getattr(before.loss_scale, item.name), getattr(after.loss_scale, item.name)
            if old != new:
                yield Change("loss_scale", item.name, old, new)
    old_rules, new_rules = {r.name: r for r in before.layers}, {r.name: r for r in after.layers}
    for name in dict.fromkeys([*old_rules, *new_rules]):
        old_rule, new_rule = old_rules.get(name), new_rules.get(name)
        for item_name in ("compute", *_STORAGE, "reason"):
            old = getattr(old_rule, item_name, None)
            new = getattr(new_rule, item_name, None)
            if old != new:
                yield Change(name, item_name, old, new)


def _check_formats(entry: Default | Rule, where: str) -> None:
    for name in ("compute", *_STORAGE):
        value = getattr(entry, name)
        optional = isinstance(entry, Rule) and name != "compute"
        if not (value is None and optional) and value not in FORMATS:
            raise PlanError(f"{where!r} has {name} = {value!r}; allowed: {', '.join(FORMATS)}")


def _with_ancestors(path: str) -> Iterator[str]:
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
    if path:
        yield ""


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"**": ".*", "*": r"[^.]*"}.get(part, re.escape(part)) for part in parts))
