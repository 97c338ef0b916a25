"""Verdicts on what was bad from the start and reached the loss or gradients: parameters, buffers, data that came in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.torch.tracing.records import Record
from halfwise.torch.tracing.slicing import Origins
from halfwise.torch.tracing.trace import Trace

__all__ = ["RELOAD", "from_outside"]

RELOAD = "reload a checkpoint from before the first non-finite loss: model.load_state_dict(torch.load(path))"
_STATE = ("parameter", "buffer")
_CLEAN = "drop or repair such samples before the model sees them: assert torch.isfinite(x).all() in the data set"


def from_outside(trace: Trace, found: Origins) -> Diagnosis:
    """The verdict where the walk back from the bad values ended at tensors that were bad when they came in.

    Weights come before data, since they spoil every batch; but a buffer that holds inf may do so on purpose ("the best
    loss so far") and comes after them.
    """
    broken = [r for r in found.outside if r.kind == "parameter" or (r.kind == "buffer" and r.found == "nan")]
    guilty = broken or [r for r in found.outside if r.kind not in _STATE] or found.outside
    record = guilty[0]
    if record.kind in _STATE:
        names = [r.name for r in guilty]
        also = f"; also {', '.join(names[1:3])}" if names[1:] else ""
        more = f" and {len(names) - 3} more" if names[3:] else ""
        return Diagnosis(
            "nonfinite_parameters",
            suspects=_suspects(guilty),
            detail=f"{record.kind} {record.name} holds {record.found}{also}{more}",
            fix=(RELOAD,),
            evidence={"tensors": float(len(guilty))},
        )
    suspects = _suspects(guilty)
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


def _suspects(records: Sequence[Record]) -> tuple[Suspect, ...]:
    """Each under the path of the module that holds it; data belong to none."""
    return tuple(
        Suspect(r.name.rpartition(".")[0] if r.kind in _STATE else "", "", "", "", r.dtype, r.found, 0.0)
        for r in records
    )


def _reader(trace: Trace, record: Record) -> str:
    reader = next((r for r in trace.records if any(given.record == record.index for given in r.inputs)), None)
    return f" ({reader.operation} reads it at {reader.place.source})" if reader and reader.place.source else ""
