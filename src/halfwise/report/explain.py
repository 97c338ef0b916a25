"""`halfwise explain` on the screen: a plan, or all that is known about one module. From data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfwise.core.diagnosis import Incident
from halfwise.report.tables import facts, format_name, incident_text, plain, plan_table
from halfwise.report.words import count, evidence_text, ratio_text

__all__ = ["module_screen", "plan_screen"]


def plan_screen(explanation: Mapping[str, Any], *, keep: str = "") -> RenderableType:
    """The plan: what `explain_plan` gathered. Fits 80 columns.

    Args:
        explanation: the plan.
        keep: the command that writes the plan to a file, where it is in none yet.
    """
    model = f" for {explanation['model']}" if explanation["model"] else ""
    rows: list[tuple[str, RenderableType]] = [
        ("Plan", f"{explanation['origin']}  ({explanation['framework']}{model}, target: {explanation['target']})"),
        ("Default", _what_and_why(explanation["default"])),
    ]
    rows += _storage(explanation["default"])
    if explanation["loss_scale"] is not None:
        scale = explanation["loss_scale"]
        bounds = f"between {scale['floor']:,.6g} and {scale['ceiling']:,.0f}"
        rows.append(("Loss scale", f"starts at {scale['initial']:,.6g}, stays {bounds}"))
    rows += _run(explanation["run"])
    rows += _incidents(explanation["incidents"])
    parts: list[RenderableType] = ["", facts(rows)]
    if explanation["layers"]:
        parts += ["", plan_table(explanation["layers"])]
        hint = f"halfwise explain {explanation['origin']} {explanation['layers'][0]['name'] or 'MODULE'}"
        told = ("Keep it", keep) if keep else ("One module", hint)
        parts += ["", facts([(told[0], Text(told[1], style="cyan"))])]
    return Padding(Group(*parts, ""), (0, 1))


def module_screen(explanation: Mapping[str, Any]) -> RenderableType:
    """One module: what `explain_module` gathered. Fits 80 columns."""
    kind = f"  ({explanation['class']})" if explanation["class"] else ""
    rows: list[tuple[str, RenderableType]] = [
        ("Module", f"{explanation['module'] or '(the model)'}{kind}"),
        ("Computes in", format_name(explanation["compute"])),
        ("Because", explanation["reason_text"]),
    ]
    if explanation["detail"]:
        rows.append(("", explanation["detail"]))
    if explanation["from"] != explanation["module"]:
        rows.append(
            ("Said by", "the default" if explanation["from"] == "default" else f"the entry {explanation['from']}")
        )
    rows += _storage(explanation)
    rows += _incidents(explanation["incidents"])
    parts: list[RenderableType] = ["", facts(rows)]
    if explanation["evidence"]:
        parts += ["", Text("Evidence", style="bold"), Padding(_pairs(explanation["evidence"]), (0, 0, 0, 2))]
    if explanation["ranges"]:
        parts += ["", _ranges(explanation["ranges"], explanation["loss_scale"])]
    return Padding(Group(*parts, ""), (0, 1))


def _what_and_why(entry: Mapping[str, Any]) -> Text:
    detail = f": {entry['detail']}" if entry["detail"] else ""
    return Text.assemble(format_name(entry["compute"]), ", because ", plain(f"{entry['reason_text']}{detail}"))


def _storage(entry: Mapping[str, Any]) -> list[tuple[str, RenderableType]]:
    names = {"parameters": "Parameters in", "saved_activations": "Saved in", "optimizer_state": "Optimizer in"}
    return [(title, format_name(entry[name])) for name, title in names.items() if name in entry]


def _run(run: Mapping[str, Any] | None) -> list[tuple[str, RenderableType]]:
    if run is None:
        return []
    steps = f"{count(run['steps'], 'step')}, {run['skipped_steps']:,} skipped"
    rows: list[tuple[str, RenderableType]] = [("Run", f"test accuracy {run['test_accuracy']:.4f} after {steps}")]
    if run["step_time"] is not None:
        rows.append(("Step time", f"{ratio_text(run['step_time']['ratio'])} that of float32, measured in pairs"))
    return rows


def _incidents(incidents: list[Mapping[str, Any]]) -> list[tuple[str, RenderableType]]:
    return [
        ("Incidents" if index == 0 else "", Text(incident_text(Incident.from_dict(fields)), style="yellow"))
        for index, fields in enumerate(incidents)
    ]


def _pairs(evidence: Mapping[str, float]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column()
    grid.add_column(justify="right")
    for name, value in evidence_text(evidence):
        grid.add_row(name, value)
    return grid


def _ranges(ranges: Mapping[str, Mapping[str, Any]], loss_scale: float) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Values", no_wrap=True)
    for title in ("Largest", "Zeros", "float16 loses", "bfloat16 loses", "NaN/inf"):
        table.add_column(title, justify="right", no_wrap=True)
    for role, found in ranges.items():
        table.add_row(
            role.replace("_", " "),
            f"{found['largest']:.3g}",
            f"{found['zeros'] / max(1, found['values']):.1%}",
            _lost(found, "float16"),
            _lost(found, "bfloat16"),
            f"{found['nans'] + found['infinities']:,}",
        )
    scaled = f", float16's gradients at the loss scale {loss_scale:g}" if loss_scale != 1.0 else ""
    legend = Text(f"Loses: at most this share overflows or rounds to zero{scaled}. Largest: upper bound.", style="dim")
    return Group(table, legend)


def _lost(found: Mapping[str, Any], name: str) -> Text:
    share = found[f"overflow_{name}"] + found[f"underflow_{name}"]
    text = "none" if share == 0.0 else f"{share:.1%}" if share >= 0.001 else "< 0.1%"
    return Text(text, style="dim" if share == 0.0 else "red" if share > 0.05 else "")
