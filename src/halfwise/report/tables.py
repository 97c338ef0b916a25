"""Pieces that several screens share: facts, plans, incidents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from halfwise.core.diagnosis import VERDICTS, Incident
from halfwise.core.plan import REASONS

__all__ = ["because", "facts", "format_name", "incident_text", "plain", "plan_table"]


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names in bold on the left, what belongs to them on the right."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, plain(value) if isinstance(value, str) else value)
    return grid


def plain(text: str) -> Text:
    """`text` as it is: brackets are no markup, and characters that steer a terminal are shown as `?`."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


def plan_table(layers: Iterable[Mapping[str, Any]], *, most: int | None = None) -> RenderableType:
    """Layers with their format and the reason; where there are more than `most`, the rest is counted.

    Layers that differ in an index only, such as those of repeated blocks, and of which the same is said, share a row.
    """
    rows = _merged(layers)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Layer", overflow="fold", min_width=8)
    table.add_column("Computes in", no_wrap=True)
    table.add_column("Because", overflow="fold")
    for row in rows[:most]:
        table.add_row(plain(row["name"] or "(the model)"), format_name(row["compute"]), _because(row))
    if most is not None and len(rows) > most:
        table.add_row(Text(f"... and {len(rows) - most} more", style="dim"), "", "")
    return table


def _merged(layers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in layers:
        pattern = ".".join("*" if part.isdigit() else part for part in row["name"].split("."))
        groups.setdefault((pattern, row["compute"], row["reason"], row["detail"]), []).append(row)
    return [
        rows[0] if len(rows) == 1 else {**rows[0], "name": f"{pattern} ({len(rows)} layers)"}
        for (pattern, *_), rows in groups.items()
    ]


def incident_text(incident: Incident) -> str:
    """One incident as a sentence or two."""
    where = incident.module or "the code outside all modules (the loss?)"
    source = f" ({incident.source})" if incident.source else ""
    what = f"step {incident.step}: {VERDICTS.get(incident.verdict, incident.verdict)}"
    if incident.operation:
        what += f"; {incident.operation} of {where}{source}"
    match incident.kind:
        case "healed":
            return f"{what}. Healed: it computes in {incident.action} from there on."
        case "stopped":
            return f"{what}. The run was stopped."
        case _:
            return f"{what}. Nothing was changed{': the step was skipped' if incident.action == 'skipped' else ''}."


def because(entry: Mapping[str, Any]) -> str:
    """An entry's reason in words, with its detail."""
    reason = REASONS.get(entry["reason"], entry["reason"])
    return f"{reason}: {entry['detail']}" if entry["detail"] else reason


def _because(entry: Mapping[str, Any]) -> Text:
    text = plain(because({**entry, "detail": ""}))
    if entry["detail"]:
        detail = plain(f": {entry['detail']}")
        detail.stylize("dim")
        text.append_text(detail)
    return text


def format_name(name: str) -> Text:
    """A format's name; formats other than float32 stand out."""
    return Text(name, style="" if name == "float32" else "cyan")
