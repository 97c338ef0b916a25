"""`halfwise doctor` on the screen: a hardware report drawn with rich. Data in, renderables out."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfwise.core.hardware import OPERATIONS, FormatSupport, HardwareReport, advice, time_text

__all__ = ["doctor_screen"]

_SUPPORT_STYLES = {"native": "green", "emulated": "yellow", "absent": "dim"}
# Between the two a ratio is noise rather than a gain or a loss, and stays uncoloured.
_FASTER, _SLOWER = 0.95, 1.05


def doctor_screen(report: HardwareReport) -> RenderableType:
    """The whole screen: device, table of formats, faults if any, advice. Fits 80 columns."""
    parts: list[RenderableType] = ["", _facts(report), "", _formats(report), "", _legend(report)]
    faults = [(name, fault) for name, support in report.formats.items() for fault in support.faults]
    if faults:
        lines = [Text.assemble((f"{name} ", "bold red"), fault) for name, fault in faults]
        parts += ["", Text("Faults", style="bold red"), *(Padding(line, (0, 0, 0, 2)) for line in lines)]
    verdict = _labelled()
    verdict.add_row("Advice", Text(advice(report)))
    return Padding(Group(*parts, "", verdict, ""), (0, 1))


def _labelled() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True, min_width=len("Frameworks"))
    grid.add_column(overflow="fold")
    return grid


def _facts(report: HardwareReport) -> Table:
    grid = _labelled()
    grid.add_row("Device", Text.assemble((report.device, "cyan"), f"  {report.device_name}"))
    if report.device_features:
        grid.add_row("", Text(", ".join(report.device_features), style="dim"))
    versions = ", ".join(f"{name} {version}" for name, version in report.frameworks.items())
    grid.add_row("Frameworks", Text(versions or "none"))
    return grid


def _formats(report: HardwareReport) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("format", no_wrap=True)
    table.add_column("support", no_wrap=True)
    for operation in OPERATIONS:
        table.add_column(operation, justify="right", no_wrap=True)
    table.add_column("self-check", no_wrap=True)
    for name, support in report.formats.items():
        table.add_row(
            Text(name, style="dim" if support.support == "absent" else ""),
            Text(support.support, style=_SUPPORT_STYLES[support.support]),
            *(_time(support, operation) for operation in OPERATIONS),
            _verdict(support),
        )
    return table


def _time(support: FormatSupport, operation: str) -> Text:
    value = support.relative_time.get(operation)
    text = time_text(support, operation)
    if value is None:
        return Text(text, style="dim")
    return Text(text, style="green" if value < _FASTER else "red" if value > _SLOWER else "")


def _verdict(support: FormatSupport) -> Text:
    if support.support == "absent" and not support.faults:
        return Text("-", style="dim")
    return Text("correct", style="green") if support.correct else Text("wrong", style="bold red")


def _legend(report: HardwareReport) -> Text:
    text = "Times are relative to float32: 0.50 is twice as fast, 2.00 half as fast."
    if any(support.lower_bounds for support in report.formats.values()):
        text += ' ">" means at least: that probe was cut short.'
    return Text(text + " Results are checked against float64.", style="dim")
