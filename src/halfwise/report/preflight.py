"""`halfwise preflight` on the screen: the verdict, what is behind it, and what to do. From data only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfwise.core.hazards import Hazard
from halfwise.core.preflight import LayerRow, LossScaleRange, Preflight
from halfwise.report.tables import facts, format_name, plain
from halfwise.report.words import count

__all__ = ["preflight_screen"]

_MOST_HAZARDS = 8
_MOST_LAYERS = 12
_NOTABLE_UNDERFLOW = 0.05
_NOTABLE_ERROR = 0.1


def preflight_screen(found: Preflight, *, command: str = "") -> RenderableType:
    """The whole screen. Fits 80 columns.

    Args:
        found: what to tell.
        command: the command that was typed, to tell how to go on; `""` where it was none.
    """
    parts: list[RenderableType] = ["", _verdict(found), "", facts(_summary(found))]
    if found.hazards:
        parts += ["", Text("Hazards", style="bold")]
        groups = _alike(found.hazards)
        parts += [_hazards(number, group) for number, group in enumerate(groups[:_MOST_HAZARDS], start=1)]
        if len(groups) > _MOST_HAZARDS:
            hidden = sum(map(len, groups[_MOST_HAZARDS:]))
            parts.append(Text(f"     ... and {count(hidden, 'more')}".removesuffix("s"), style="dim"))
    if found.layers:
        parts += ["", _layers(found)]
    parts += ["", facts(_what_to_do(found, command))]
    return Padding(Group(*parts, ""), (0, 1))


def _verdict(found: Preflight) -> Text:
    if found.ready:
        return Text.assemble(("READY", "bold green"), f" for {found.policy} on {found.target}")
    number = count(len(found.hazards), "hazard")
    return Text.assemble(("NOT READY", "bold red"), f" for {found.policy} on {found.target}: {number}")


def _summary(found: Preflight) -> list[tuple[str, RenderableType]]:
    model = f"{found.model or 'a model'} ({found.framework}), {count(found.batches, 'batch')}"
    if found.batches != 1:
        model = model.replace("batchs", "batches")
    rows: list[tuple[str, RenderableType]] = [("Model", model), ("Loss", _loss(found))]
    if found.loss_scale is not None:
        rows.append(("Loss scale", _loss_scale(found.loss_scale, found.framework)))
    return rows


def _loss(found: Preflight) -> str:
    full = f"{found.loss_float32:.5g} in float32"
    if found.policy == "float32":
        return full
    if found.loss is None:
        return f"{full}; under {found.policy} it is not reached"
    if not math.isfinite(found.loss):
        return f"{full}, {found.loss} under {found.policy}"
    error = found.loss_error
    apart = "" if error is None else f" ({error:.1%} apart)" if error >= 5e-4 else " (< 0.1% apart)"
    return f"{full}, {found.loss:.5g} under {found.policy}{apart}"


def _loss_scale(scale: LossScaleRange, framework: str) -> str:
    if scale.used > scale.largest:
        return f"{scale.used:,.0f} overflows; the largest that fits these batches is {scale.largest:,.0f}"
    text = f"start at {scale.highest:,.0f}; from {scale.lowest:,.0f} to {scale.largest:,.0f} fits these batches"
    name, first = ("GradScaler", 65536.0) if framework == "torch" else ("Keras' optimizer", 32768.0)
    return text if scale.largest >= first else f"{text} ({name} starts at {first:,.0f} and comes down)"


def _alike(hazards: Iterable[Hazard]) -> list[list[Hazard]]:
    """Hazards of one kind at one line together: a block that is repeated has the same one each time."""
    groups: dict[tuple[str, ...], list[Hazard]] = {}
    for hazard in hazards:
        key = (hazard.kind, hazard.operation, hazard.direction, hazard.source, hazard.module_class)
        groups.setdefault(key if hazard.source else (*key, hazard.module), []).append(hazard)
    return list(groups.values())


def _hazards(number: int, alike: Sequence[Hazard]) -> RenderableType:
    hazard = alike[0]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", width=2, no_wrap=True)
    grid.add_column(overflow="fold")
    place = hazard.place + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")
    head = plain(f"{place}: " if place else "")
    head.stylize("bold red")
    grid.add_row(Text(f"{number}", style="bold red"), head.append(hazard.what, style="bold"))
    where = ", ".join(part for part in (hazard.source, hazard.operation, hazard.direction) if part)
    if where:
        grid.add_row("", plain(where))
    if hazard.detail:
        grid.add_row("", plain(hazard.detail))
    for line in hazard.fix:
        text = plain(line)
        text.stylize("cyan")
        grid.add_row("", text)
    return Padding(grid, (0, 0, 0, 1))


def _layers(found: Preflight) -> RenderableType:
    rows = _worth_showing(found)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("layer", overflow="fold", min_width=8)
    table.add_column("computes in", no_wrap=True)
    for title in ("largest", "gradient", "lost", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    guilty = {hazard.module for hazard in found.hazards}
    for row in rows:
        table.add_row(
            Text(row.path or "(the model)", style="red" if row.path in guilty else ""),
            format_name(row.formats[0]) if row.formats else Text("-"),
            f"{row.largest_activation:.3g}",
            f"{row.largest_gradient:.3g}" if row.largest_gradient else "-",
            _lost(row),
            _error(row),
        )
    legend = (
        "Largest: of what the layer reads and writes, and of its gradients. Lost: share that overflows or rounds to "
        "zero. Error: of its weight gradients against float32."
    )
    parts: list[RenderableType] = [table]
    if len(found.layers) > len(rows):
        others = count(len(found.layers) - len(rows), "other layer")
        parts.append(Text(f"and {others}, nothing to see in them", style="dim"))
    return Group(*parts, Text(legend, style="dim"))


def _worth_showing(found: Preflight) -> list[LayerRow]:
    """The layers that say something; where none does, the one with the largest values and the one with most error."""
    guilty = {hazard.module for hazard in found.hazards}
    notable = [row for row in found.layers if row.path in guilty or _is_notable(row)]
    if not notable:
        largest = max(found.layers, key=lambda row: row.largest_activation)
        worst = max(found.layers, key=lambda row: row.relative_error or 0.0)
        notable = [row for row in found.layers if row is largest or row is worst]
    if len(notable) > _MOST_LAYERS:
        first = [row for row in notable if row.path in guilty][:_MOST_LAYERS]
        rest = sorted((row for row in notable if row not in first), key=lambda row: -(row.relative_error or 0.0))
        kept = [*first, *rest][:_MOST_LAYERS]
        notable = [row for row in notable if row in kept]
    return notable


def _is_notable(row: LayerRow) -> bool:
    return (
        row.dead
        or row.overflow > 0.0
        or row.underflow > _NOTABLE_UNDERFLOW
        or (row.relative_error or 0.0) > _NOTABLE_ERROR
        or (row.dead_updates or 0.0) > _NOTABLE_UNDERFLOW
    )


def _lost(row: LayerRow) -> Text:
    share = max(row.overflow, row.underflow)
    if share == 0.0:
        return Text("none", style="dim")
    text = f"{share:.1%}" if share >= 0.001 else "< 0.1%"
    return Text(text, style="red" if row.overflow > 0.0 or row.underflow > _NOTABLE_UNDERFLOW else "")


def _error(row: LayerRow) -> Text:
    if row.dead:
        return Text("dead", style="red")
    if row.relative_error is None:
        return Text("-", style="dim")
    if not math.isfinite(row.relative_error):
        return Text("inf", style="red")
    text = f"{row.relative_error:.1%}" if row.relative_error < 10.0 else "> 1000%"
    return Text(text, style="red" if row.relative_error > 0.5 else "")


def _what_to_do(found: Preflight, command: str) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    if found.hazards:
        rows += _cure(found, command)
        if found.alternative:
            rows.append(("Or", plain(f'policy="{found.alternative}": tried here on the same batches, no hazard')))
    elif found.plan is not None and found.loss_scale is not None:
        rows.append(("Do", Text(_with_loss_scale(found.framework, found.loss_scale.highest), style="cyan")))
    rows += [("Note" if index == 0 else "", note) for index, note in enumerate(found.notes)]
    return rows


def _cure(found: Preflight, command: str) -> list[tuple[str, RenderableType]]:
    plan = found.plan
    kept = [rule.name or "the model's own code" for rule in plan.layers if rule.compute == "float32"] if plan else []
    shown = kept[:4] + ([f"{len(kept) - 4} more"] if len(kept) > 4 else [])
    if found.loss_in_float32:
        shown.append("the loss (see the note)")
    if not shown:
        return [("Cure", "no plan cures it: change the lines that are named above, then look again")]
    tried = {
        True: "tried here: nothing goes wrong any more",
        False: "tried here: it is not enough; change the lines that are named above",
        None: "not tried",
    }[found.cured]
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    rows: list[tuple[str, RenderableType]] = [("Cure", plain(f"compute in float32: {listed}")), ("", tried)]
    if kept and found.cured:
        how = f"{command} -o plan.toml" if command else "hw.MixedPrecision(model, optimizer, found.plan)"
        rows.append(("", Text(how, style="cyan")))
    return rows


def _with_loss_scale(framework: str, scale: float) -> str:
    """The line that trains with this loss scale."""
    if framework == "torch":
        return f"torch.amp.GradScaler(init_scale={scale:.1f})"
    return f"hw.LossScaleOptimizer(optimizer, initial_scale={scale:.1f})"
