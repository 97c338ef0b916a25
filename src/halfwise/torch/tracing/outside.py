"""Verdicts on what was bad from the start: parameters, buffers, and the data that came in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.torch.names import named_layers
from halfwise.torch.tracing.records import Record, measure
from halfwise.torch.tracing.slicing import Origins
from halfwise.torch.tracing.trace import Trace

__all__ = ["RELOAD", "broken_state", "from_outside"]

RELOAD = "reload a checkpoint from before the first non-finite loss: model.load_state_dict(torch.load(path))"
_CLEAN = "drop or repair such samples before the model sees them: assert torch.isfinite(x).all() in the data set"


class _Held(NamedTuple):
    kind: str
    path: str
    owner: nn.Module
    tensor: Tensor


def broken_state(model: nn.Module) -> Diagnosis | None:
    """The verdict `"nonfinite_parameters"` if a parameter or buffer holds NaN or inf; else None. A buffer's -inf is a
    mask.
    """
    held = [
        _Held(kind, f"{path}.{name}" if path else name, module, tensor)
        for path, module in named_layers(model)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, tensor in tensors.items()
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
    ]
    measured = [(one, extent) for one in held if (extent := measure(one.tensor.detach())) is not None]
    if not measured:
        return None
    device = measured[0][1][0].device
    lows = torch.stack([low.to(device, torch.float32) for _, (low, _) in measured]).tolist()
    highs = torch.stack([high.to(device, torch.float32) for _, (_, high) in measured]).tolist()
    bad = [
        (one, "nan" if low != low else "inf" if high == math.inf else "-inf")
        for (one, _), low, high in zip(measured, lows, highs, strict=True)
        if not math.isfinite(high) or (low == -math.inf and one.kind == "parameter")
    ]
    if not bad:
        return None
    names = [one.path for one, _ in bad]
    also = f"; also {', '.join(names[1:3])}" if names[1:] else ""
    return Diagnosis(
        "nonfinite_parameters",
        suspects=tuple(
            Suspect(one.path.rpartition(".")[0], "", "", "", _dtype(one.tensor), found, 0.0, type(one.owner).__name__)
            for one, found in bad
        ),
        detail=f"{bad[0][0].kind} {names[0]} holds {bad[0][1]}{also}"
        + (f" and {len(names) - 3} more" if names[3:] else ""),
        fix=(RELOAD,),
        evidence={"tensors": float(len(bad))},
    )


def from_outside(trace: Trace, found: Origins) -> Diagnosis:
    """The verdict where the walk back from the bad values ended at tensors that were bad when they came in."""
    record = found.outside[0]
    suspects = tuple(Suspect(_owner(r), "", "", "", r.dtype, r.found, 0.0) for r in found.outside)
    if record.kind in ("parameter", "buffer"):
        detail = f"{record.kind} {record.name} holds {record.found}"
        return Diagnosis("nonfinite_parameters", suspects=suspects, detail=detail, fix=(RELOAD,))
    detail, evidence = f"input {record.name!r} of the model holds {record.found}", {}
    if record.kind == "tensor":
        detail = f"a tensor that the step uses holds {record.found}{_reader(trace, record)}"
    tensor = trace.input_named(record.name) if record.kind == "input" else None
    if tensor is not None and tensor.dim() > 0:
        bad = ~torch.isfinite(tensor.detach())
        rows = bad.flatten(1).any(1) if tensor.dim() > 1 else bad
        if rows.any():
            first = int(rows.nonzero()[0])
            evidence = {"nonfinite_values": float(bad.sum()), "first_sample": float(first)}
            detail += f": {int(bad.sum())} of {tensor.numel()} values, first in sample {first}"
    return Diagnosis("nonfinite_input", suspects=suspects, detail=detail, fix=(_CLEAN,), evidence=evidence)


def _owner(record: Record) -> str:
    """Path of the module that holds a parameter or buffer."""
    return record.name.rpartition(".")[0] if record.kind in ("parameter", "buffer") else ""


def _reader(trace: Trace, record: Record) -> str:
    reader = next((r for r in trace.records if any(given.record == record.index for given in r.inputs)), None)
    return f" ({reader.operation} reads it at {reader.place.source})" if reader and reader.place.source else ""


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
