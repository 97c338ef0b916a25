"""A layer whose output float16 cannot hold: named, demoted alone, trained to float32's accuracy."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import halfwise.torch as hw

DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.data, dtype=torch.float32) / 16
LABELS = torch.tensor(DIGITS.target)
TRAINING = 1400


class SixLayers(nn.Module):
    """Its third layer has weights of 40 and inputs of 60: sums of 150,000. The norm behind it brings them back to 1."""

    def __init__(self) -> None:
        super().__init__()
        layers = [*(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 10)]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList([nn.LayerNorm(64) for _ in range(5)])
        with torch.no_grad():
            layers[2].weight.fill_(40.0).add_(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(5):
            if number == 2:
                x = 60 * torch.sigmoid(x + 3)
            x = torch.relu(self.norms[number](self.layers[number](x)))
        return self.layers[5](x)


FORWARD_LINE = inspect.getsourcelines(SixLayers.forward)[1] + 4


def batches(epochs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [part for _ in range(epochs) for part in torch.randperm(TRAINING, generator=generator).split(64)]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(IMAGES[rows]), LABELS[rows])


def accuracy(model: nn.Module, mp: hw.MixedPrecision) -> float:
    with torch.no_grad(), mp.autocast():
        return float((model(IMAGES[TRAINING:]).argmax(1) == LABELS[TRAINING:]).float().mean())


def train(policy: str, seed: int, epochs: int = 10) -> tuple[float, hw.MixedPrecision]:
    torch.manual_seed(seed)
    model = SixLayers()
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters(), 1e-3), policy, log=lambda _: None) as mp:
        for rows in batches(epochs):
            mp.step(partial(loss_of, model, rows))
        return accuracy(model, mp), mp


def test_every_step_skips_in_plain_amp() -> None:
    model = SixLayers()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    for rows in batches(1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, rows)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_exactly_the_planted_layer_is_named_and_demoted_and_the_batch_is_not_lost() -> None:
    model = SixLayers()
    said: list[str] = []
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters(), 1e-3), "mixed_float16", log=said.append) as mp:
        results = [mp.step(partial(loss_of, model, rows)) for rows in batches(1)]
    (incident,) = mp.incidents
    assert (incident.kind, incident.verdict, incident.module) == ("healed", "overflow_at_every_scale", "layers.2")
    assert (incident.operation, incident.direction, incident.dtype) == ("aten.addmm", "forward", "float16")
    assert incident.source == f"{__file__.rpartition('/')[2]}:{FORWARD_LINE}"
    assert incident.suspects == ("layers.2",)
    assert results[0].incident == incident
    assert results[0].retries == 1
    assert mp.plan is not None
    assert [(rule.path, rule.compute, rule.reason) for rule in mp.plan.layers] == [("layers.2", "float32", "healed")]
    assert len(said) == 1
    assert "layers.2" in said[0]
    assert sum(r.applied for r in results) >= len(results) - 4  # the loss scale's first descent


def test_training_ends_at_float32s_accuracy() -> None:
    full = [train("float32", seed)[0] for seed in range(3)]
    healed = [train("mixed_float16", seed)[0] for seed in range(3)]
    assert min(full) > 0.85
    assert np.mean(healed) == pytest.approx(np.mean(full), abs=0.02)


def test_reported_and_not_changed() -> None:
    model = SixLayers()
    before = [p.detach().clone() for p in model.parameters()]
    with hw.MixedPrecision(
        model, torch.optim.Adam(model.parameters()), "mixed_float16", guard="report", log=lambda _: None
    ) as mp:
        rows = batches(1)[0]
        result = mp.step(partial(loss_of, model, rows))
        assert mp.plan is not None
        assert mp.plan.layers == ()
    assert result.incident is not None
    assert (result.incident.kind, result.incident.module) == ("reported", "layers.2")
    assert not result.applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_auto_keeps_the_layer_in_float32_before_anything_fails() -> None:
    torch.manual_seed(0)
    model = SixLayers()
    paths = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
    timing = hw.TimingTable.uniform(paths, relative={"float16": 0.5})
    with hw.MixedPrecision(model, torch.optim.Adam(model.parameters(), 1e-3), "auto", timing=timing) as mp:
        for rows in batches(1):
            mp.step(partial(loss_of, model, rows))
        assert mp.plan is not None
        in_float32 = {path for path in paths if mp.plan.compute(path) == "float32"}
    assert in_float32 == {"layers.2", "norms.2"}  # the norm reads what the layer writes
    assert mp.incidents == ()
    assert mp.plan.rule_for("layers.2").reason == "range"


class Chain(nn.Module):
    """Nothing brings the large values back before the next layer, so that one cannot read them in float16 either."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        with torch.no_grad():
            self.a.weight.fill_(40.0)
            self.b.weight.mul_(1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def test_layers_that_read_the_large_values_follow_one_by_one() -> None:
    model = Chain()
    x = torch.full((4, 64), 60.0)
    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1e-9), "mixed_float16", log=lambda _: None) as mp:
        results = [mp.step(lambda: nn.functional.cross_entropy(model(x), LABELS[:4])) for _ in range(18)]
        assert mp.plan is not None
        assert {rule.path for rule in mp.plan.layers if rule.compute == "float32"} == {"a", "b"}
    assert results[-1].applied


def test_a_loss_outside_all_modules_is_raised_and_the_model_stays_in_half() -> None:
    model = nn.Sequential(nn.Linear(64, 70_000))

    def closure() -> Tensor:
        return (model(torch.ones(1, 64)) * 0 + 1).sum() * 1e-6  # 70,000 ones: inf in float16

    with hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), 1e-6), "mixed_float16", log=lambda _: None) as mp:
        result = mp.step(closure)
        assert result.applied
        assert mp.plan is not None
        assert mp.plan.default.compute == "float32"
        assert mp.plan.compute("0") == "float16"
    assert float(result.loss) == pytest.approx(0.07)
