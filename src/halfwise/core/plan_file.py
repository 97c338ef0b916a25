"""Plans as TOML: strict when reading (a plan may come from a stranger), made to be read when writing."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import InlineTable

from halfwise.core.files import write_file
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import REASONS, Default, Plan, Rule
from halfwise.errors import PlanError, PolicyError

__all__ = ["FORMAT_VERSION", "dumps", "loads", "read_plan", "write_plan"]

FORMAT_VERSION = 1
_LARGEST_FILE = 16 * 1024 * 1024  # bytes; a plan for 10,000 layers takes about 3 MB

_TEXT = ("framework", "model", "target")
_ENTRY_TEXT = ("compute", "parameters", "saved_activations", "optimizer_state", "reason", "detail")
_LOSS_SCALE = tuple(item.name for item in fields(LossScaleSettings))
_INTEGERS = ("growth_interval", "hysteresis", "growth_delay")


def read_plan(path: str | Path) -> Plan:
    """The plan in a TOML file.

    Raises:
        PlanError: the file is missing, too large, not TOML, or not a plan.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise PlanError(f"{file} has {file.stat().st_size} bytes; a plan has at most {_LARGEST_FILE}")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"cannot read the plan {str(file)!r}: {error}; give the path of a plan file (plan.toml)"
        ) from error
    return loads(text, source=str(file))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes `plan` as TOML, in one step: a reader sees the old file or the new one."""
    write_file(Path(path), dumps(plan))


def dumps(plan: Plan) -> str:
    """`plan` as TOML text; `loads` gives an equal plan back."""
    document = tomlkit.document()
    document.add("format_version", tomlkit.item(FORMAT_VERSION))
    for name in _TEXT:
        document.add(name, tomlkit.item(getattr(plan, name)))
    default = {name: value for name, value in _entry(plan.default).items() if value != "float32" or name == "compute"}
    document.add("default", _inline(default))
    if plan.loss_scale is not None:
        table = tomlkit.table()
        for name in _LOSS_SCALE:
            table.add(name, getattr(plan.loss_scale, name))
        document.add("loss_scale", table)
    if plan.layers:
        layers = tomlkit.aot()
        for rule in plan.layers:
            table = tomlkit.table()
            table.add("path" if rule.pattern is None else "pattern", rule.name)
            for name, value in _entry(rule).items():
                table.add(name, _inline(value) if isinstance(value, Mapping) else value)
            layers.append(table)
        document.add("layers", layers)
    return tomlkit.dumps(document)


def loads(text: str, *, source: str = "plan") -> Plan:
    """The plan in TOML text; `source` names it in errors.

    Raises:
        PlanError: it is not TOML, has unknown or wrong fields, or was written by a newer halfwise.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{source}: not valid TOML: {str(error) or 'nested too deeply'}") from error
    version = data.pop("format_version", None)
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise PlanError(
            f"{source}: format_version is {version!r}; this halfwise reads format_version = {FORMAT_VERSION}"
        )
    _only(data, {*_TEXT, "default", "loss_scale", "layers"}, source)
    text_fields = {name: _text(data[name], name, source) for name in _TEXT if name in data}
    if text_fields.get("framework", "torch") not in ("torch", "keras"):
        raise PlanError(f"{source}: framework is {text_fields['framework']!r}; allowed: 'torch', 'keras'")
    layers = data.get("layers", [])
    if not isinstance(layers, list):
        raise PlanError(f"{source}: layers must be [[layers]] tables")
    try:
        return Plan(
            **text_fields,  # type: ignore[arg-type]  # framework was checked above
            default=Default(**_read_entry(data.get("default", {}), set(), f"{source}: default")),
            loss_scale=_read_loss_scale(data["loss_scale"], source) if "loss_scale" in data else None,
            layers=tuple(
                Rule(**_read_rule(entry, f"{source}: entry {number} of layers"))
                for number, entry in enumerate(layers, start=1)
            ),
        )
    except (PlanError, PolicyError) as error:
        message = str(error)
        raise PlanError(message if message.startswith(source) else f"{source}: {message}") from error


def _entry(entry: Default | Rule) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in _ENTRY_TEXT:
        value = getattr(entry, name)
        if value is not None and (value != "" or name not in ("detail",)):
            values[name] = value
    if entry.evidence:
        values["evidence"] = dict(entry.evidence)
    return values


def _inline(values: Mapping[str, Any]) -> InlineTable:
    table = tomlkit.inline_table()
    for name, value in values.items():
        table.add(name, _inline(value) if isinstance(value, Mapping) else value)
    return table


def _read_rule(data: Any, where: str) -> dict[str, Any]:
    entry = _read_entry(data, {"path", "pattern"}, where)
    if "compute" not in entry:
        raise PlanError(f"{where} has no compute; give a format")
    return entry


def _read_entry(data: Any, more: set[str], where: str) -> dict[str, Any]:
    table = _table(data, where)
    _only(table, {*_ENTRY_TEXT, "evidence", *more}, where)
    entry: dict[str, Any] = {name: _text(value, name, where) for name, value in table.items() if name != "evidence"}
    if entry.get("reason", "manual") not in REASONS:
        raise PlanError(f"{where}: reason is {entry['reason']!r}; allowed: {', '.join(REASONS)}")
    if "evidence" in table:
        evidence = _table(table["evidence"], f"{where}: evidence")
        entry["evidence"] = {name: _number(value, name, where) for name, value in evidence.items()}
    return entry


def _read_loss_scale(data: Any, source: str) -> LossScaleSettings:
    where = f"{source}: loss_scale"
    table = _table(data, where)
    _only(table, set(_LOSS_SCALE), where)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name in _INTEGERS and (isinstance(value, bool) or not isinstance(value, int)):
            raise PlanError(f"{where}: {name} is {value!r}; it must be an integer")
        number = _number(value, name, where)
        if not math.isfinite(number):
            raise PlanError(f"{where}: {name} is {value!r}; it must be finite")
        values[name] = value if name in _INTEGERS else number
    return LossScaleSettings(**values)


def _only(table: Mapping[str, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise PlanError(
            f"{where} has unknown fields {', '.join(map(repr, unknown[:8]))}; allowed: {', '.join(sorted(allowed))}"
        )


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where} is {value!r:.80}; it must be a table")
    return value


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or len(value) > 10_000:
        raise PlanError(f"{where}: {name} is {value!r:.80}; it must be a string of at most 10,000 characters")
    return value


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{where}: {name} is {value!r:.80}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise PlanError(f"{where}: {name} is an integer too large for a number") from None
