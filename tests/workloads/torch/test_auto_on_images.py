"""Under "auto" exactly the layers that fit go to half: on real digits.

The timing table says that half precision is twice as fast. What fits is worked out here by hand, from the tensors' own
values, with none of halfwise's statistics.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.core.ranges import HEADROOM, LARGEST_UNDERFLOW
from halfwise.workloads.digits import load_digits
from halfwise.workloads.torch.networks import ConvNet

DATA = load_digits()
LAYERS = ("conv", "hidden", "head")
EVIDENCE_STEPS = 3


def network(blow_up: str | None) -> ConvNet:
    torch.manual_seed(0)
    model = ConvNet(DATA.shape, DATA.classes)
    if blow_up is not None:
        with torch.no_grad():  # this layer's output leaves float16's range, and the next one brings it back
            model.get_parameter(f"{blow_up}.weight").mul_(1e5)
            model.get_parameter(f"{LAYERS[LAYERS.index(blow_up) + 1]}.weight").mul_(1e-5)
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    rows = slice(64 * step, 64 * step + 64)
    return nn.functional.cross_entropy(
        model(torch.from_numpy(DATA.train_images[rows])), torch.from_numpy(DATA.train_labels[rows])
    )


def values_seen(blow_up: str | None) -> dict[str, dict[str, list[Tensor]]]:
    """What each layer reads and writes, and the gradients of that, in a plain float32 loop over the evidence steps."""
    model = network(blow_up)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    seen: dict[str, dict[str, list[Tensor]]] = {name: defaultdict(list) for name in LAYERS}

    for step in range(EVIDENCE_STEPS):
        handles = []
        for name in LAYERS:

            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                for tensor in (*args, output):
                    seen[name]["forward"].append(tensor.detach())
                    if tensor.requires_grad:
                        tensor.register_hook(lambda g: seen[name]["activation_gradient"].append(g))

            handles.append(model.get_submodule(name).register_forward_hook(hook))
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        for name in LAYERS:
            for parameter in model.get_submodule(name).parameters():
                assert parameter.grad is not None
                seen[name]["forward"].append(parameter.detach().clone())
                seen[name]["weight_gradient"].append(parameter.grad.clone())
    return seen


def fits_float16(seen: dict[str, list[Tensor]], loss_scale: float) -> bool:
    largest = max(float(t.abs().max()) for t in seen["forward"])
    if largest * HEADROOM > 65504:
        return False
    for role in ("activation_gradient", "weight_gradient"):
        values = torch.cat([t.flatten() for t in seen[role]]) * loss_scale
        values = values[values != 0]
        lost = float((values.half() == 0).float().mean())
        if float(values.abs().max()) * HEADROOM > 65504 or lost > LARGEST_UNDERFLOW:
            return False
    return True


@pytest.mark.parametrize("blow_up", [None, "conv", "hidden"])
def test_exactly_the_layers_that_fit_go_to_float16(blow_up: str | None) -> None:
    model = network(blow_up)
    timing = hw.TimingTable.uniform(LAYERS, relative={"float16": 0.5})
    dtypes: dict[str, torch.dtype] = {}
    for name in LAYERS:
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: dtypes.update({name: out.dtype}))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with hw.MixedPrecision(model, optimizer, "auto", timing=timing, log=lambda _: None) as mp:
        for step in range(EVIDENCE_STEPS + 1):
            mp.step(partial(loss_of, model, step))
        plan = mp.plan
    assert plan is not None
    scale = plan.loss_scale.initial if plan.loss_scale is not None else 1.0
    seen = values_seen(blow_up)
    expected = {name for name in LAYERS if fits_float16(seen[name], scale)}
    planned = {name for name in LAYERS if plan.compute(name) == "float16"}
    assert planned == expected
    assert expected == ({"conv", "hidden", "head"} if blow_up is None else {"head"} if blow_up == "conv" else {"conv"})
    assert dtypes == {name: torch.float16 if name in planned else torch.float32 for name in LAYERS}  # what really ran
    for name in set(LAYERS) - planned:
        assert plan.rule_for(name).reason == "range"
