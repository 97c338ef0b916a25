"""The float32 side of a preflight: one traced run per batch, and the exponent histograms of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfwise.core.hazards import Hazard
from halfwise.core.profile import Profile
from halfwise.torch.closure import Closure
from halfwise.torch.histogram import exponent_histogram
from halfwise.torch.preflighting.faults import in_float32_too
from halfwise.torch.preflighting.observe import Run, observe, parameters_of
from halfwise.torch.preflighting.regions import Setting
from halfwise.torch.preflighting.trial import without_plan
from halfwise.torch.profile import Recorder, profiled_layers

__all__ = ["Reference", "reference_of"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reference:
    """What float32 shows.

    Attributes:
        layers: the layers by path.
        profile: their histograms.
        runs: one per batch; empty where the code does not run in float32.
        hazard: that float32 fails too; None where it does not.
        error: what the code raises in float32.
        notes: sentences for the reader.
    """

    layers: Mapping[str, nn.Module]
    profile: Profile
    runs: tuple[Run, ...]
    hazard: Hazard | None = None
    error: Exception | None = None
    notes: tuple[str, ...] = ()


def reference_of(model: nn.Module, closures: tuple[Closure, ...], setting: Setting) -> Reference:
    """Runs each closure in float32, no plan in force."""
    layers = profiled_layers(model)
    recorder = Recorder(model)
    runs: list[Run] = []
    with without_plan(model):
        for closure in closures:
            with recorder.recording():
                run = observe(model, _with_raised_weights(model, closure), setting.full, 1.0, layers, traced=True)
            if run.error is not None:
                note = (
                    f"the code does not run in float32 ({str(run.error).splitlines()[0][:80]}), perhaps because it "
                    "goes to half itself: there is nothing to compare with"
                )
                return Reference(layers, Profile(), (), error=run.error, notes=(note,))
            if not run.sound:
                return Reference(layers, recorder.profile, (*runs, run), hazard=in_float32_too(run))
            recorder.record_parameters()
            for path, module in layers.items():
                for parameter in parameters_of(module):
                    if id(parameter) in run.gradients:
                        recorder.add(path, "weight_gradient", exponent_histogram(run.gradients[id(parameter)]))
            recorder.keep()
            runs.append(run)
    return Reference(layers, recorder.profile, tuple(runs))


def _with_raised_weights(model: nn.Module, closure: Closure) -> Closure:
    """`closure` run with float32 copies of weights and buffers that are stored in half."""
    stored = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if t.dtype in _HALF}
    if not stored:
        return closure

    def raised() -> Any:
        copies = {name: tensor.float() for name, tensor in stored.items()}
        with torch.nn.utils.stateless._reparametrize_module(model, copies):
            return closure()

    return raised
