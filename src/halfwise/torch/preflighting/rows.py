"""A row for each layer, from everything that was found."""

from __future__ import annotations

from collections.abc import Mapping

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.preflight import LayerRow
from halfwise.core.scale_range import GRADIENT_ROLES, largest_gradient, underflow_share
from halfwise.torch.preflighting.examine import Examination, Subject

__all__ = ["layer_rows"]

_CONTRACTING = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "linear", "_scaled_mm"})


def layer_rows(subject: Subject, found: Examination, dead_updates: Mapping[str, float]) -> tuple[LayerRow, ...]:
    """The rows of the layers that ran, in the order of the model."""
    scale = found.loss_scale.used if found.loss_scale is not None else 1.0
    rows = []
    for path, module in subject.layers.items():
        activation = subject.profile.get(path, "activation")
        if activation is None:
            continue
        formats = _formats(subject, found, path)
        low = formats[0] if formats and formats[0] in ("float16", "bfloat16") else None
        comparison = found.comparisons.get(path)
        rows.append(
            LayerRow(
                path=path,
                kind=type(module).__name__,
                formats=formats,
                largest_activation=activation.largest,
                largest_gradient=largest_gradient(subject.profile, path),
                overflow=_overflow(subject, path, activation, low, scale) if low else 0.0,
                underflow=underflow_share(subject.profile, path, scale, low) if low else 0.0,
                cosine=comparison.cosine if comparison is not None else None,
                relative_error=comparison.relative_error if comparison is not None else None,
                dead=comparison is not None and comparison.dead,
                dead_updates=dead_updates.get(path),
            )
        )
    return tuple(rows)


def _formats(subject: Subject, found: Examination, path: str) -> tuple[str, ...]:
    """What the layer's results were in; the products of a matmul in an emulated format are told as that format."""
    counted = found.runs[0].layers.dtypes.get(path) if found.runs else None
    names = tuple(name for name, _ in counted.most_common()) if counted else ()
    compute = subject.setting.compute
    if compute in ("tensorfloat32", "float8") and _contracts(subject, path):
        return tuple(dict.fromkeys([compute, *names]))
    return names


def _contracts(subject: Subject, path: str) -> bool:
    trace = subject.references[0].trace if subject.references else None
    if trace is None:
        return False
    inside = f"{path}."
    return any(
        record.short in _CONTRACTING and (record.place.module == path or record.place.module.startswith(inside))
        for record in trace.records
        if record.direction == "forward"
    )


def _overflow(subject: Subject, path: str, activation: ExponentHistogram, low: str, scale: float) -> float:
    gradients = (h for role in GRADIENT_ROLES if (h := subject.profile.get(path, role)) is not None)
    shares = [activation.overflow(low).lower, *(h.overflow(low, scale).lower for h in gradients)]
    return max(shares)
