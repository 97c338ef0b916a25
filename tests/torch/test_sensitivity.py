"""Sensitivities against what really happens when one layer is rounded, and that looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from halfwise.core.sensitivity import Sensitivity
from halfwise.torch.rounding import rounded
from halfwise.torch.sensitivity import SensitivityProbe, _seen_by_the_loss

FORMATS = ("bfloat16", "float16", "tensorfloat32", "float8_e4m3fn")


class Net(nn.Module):
    """A bit of everything: an in-place activation, statistics, a recurrence, attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x, _ = self.lstm(x)
        x = x + self.attention(x, x, x)[0]
        return self.head(torch.relu(self.hidden(x.mean(1))))


LAYERS = {"conv", "norm", "lstm", "attention", "hidden", "head"}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 1, 6, 6, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def probed(model: nn.Module, loss: Callable[[], Tensor], formats: tuple[str, ...] = FORMATS) -> Sensitivity:
    probe = SensitivityProbe(model, "cpu")
    with probe.watching(formats):
        value = loss()
        value.backward()
    probe.record_gradients()
    probe.keep(float(value.detach()))
    return probe.sensitivity


def test_every_kind_of_layer_is_looked_at_and_nothing_changes() -> None:
    def run(look: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        model = Net()
        x, y = batch()
        if look:
            found = probed(model, lambda: cross_entropy(model(x), y))
            assert set(found.layers) == LAYERS
            for by_format in found.layers.values():
                assert set(by_format) == set(FORMATS)
                assert all(one.score > 0.0 and 0.0 < one.gradient_error < 0.3 for one in by_format.values())
                assert by_format["float16"].score < by_format["bfloat16"].score < by_format["float8_e4m3fn"].score
        else:
            cross_entropy(model(x), y).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        return [*gradients, *model.buffers()], torch.rand(3)

    (plain, drawn), (looked_at, drawn_after) = run(False), run(True)
    assert len(plain) == len(looked_at)
    assert all(torch.equal(a, b) for a, b in zip(plain, looked_at, strict=True))
    assert torch.equal(drawn, drawn_after)


class Deep(nn.Module):
    """Twelve layers of unlike scales, with outliers in some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(11)])
        self.head = nn.Linear(32, 10)
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, nn.Linear)
                layer.weight.mul_(0.5 + 0.3 * index)
                layer.weight[0, 0] = 4.0 * (index % 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.3 * torch.tanh(layer(x))
        return self.head(x)


def rounded_layer(layer: nn.Module, name: str) -> Any:
    """Makes the layer compute as the format would; returns what undoes it."""
    weights = {key: p.detach().clone() for key, p in layer.named_parameters()}
    scaled = name.startswith("float8")
    output = {"tensorfloat32": "float32", "float8_e4m3fn": "bfloat16"}.get(name, name)
    before = layer.register_forward_pre_hook(lambda _, args: tuple(rounded(a, name, scaled=scaled) for a in args))
    after = layer.register_forward_hook(lambda _, __, result: rounded(result, output))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(rounded(parameter, name, scaled=scaled))

    def undo() -> None:
        before.remove()
        after.remove()
        with torch.no_grad():
            for key, parameter in layer.named_parameters():
                parameter.copy_(weights[key])

    return undo


@pytest.mark.parametrize("name", FORMATS)
def test_scores_rank_and_predict_what_rounding_one_layer_does(name: str) -> None:
    model = Deep()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    y = torch.randint(0, 10, (64,), generator=torch.Generator().manual_seed(3))
    found = probed(model, lambda: cross_entropy(model(x), y), (name,))

    @torch.no_grad()
    def losses() -> Tensor:
        return cross_entropy(model(x), y, reduction="none").double() / len(x)

    exact, true = losses(), {}
    for path in found.layers:
        undo = rounded_layer(model.get_submodule(path), name)
        true[path] = float((losses() - exact).square().sum())
        undo()
    scores = [found.layers[path][name].score for path in true]
    assert len(scores) == 12
    assert spearmanr(scores, list(true.values())).statistic > 0.9
    predicted, measured = sum(scores) ** 0.5, sum(true.values()) ** 0.5
    assert 1 / 1.5 < predicted / measured < 1.5


def test_a_layer_that_is_called_twice_adds_up() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    once = probed(model, lambda: model(x).sum(), ("bfloat16",)).layers["0"]["bfloat16"].score
    twice = probed(model, lambda: (model(x) + model(x)).sum(), ("bfloat16",)).layers["0"]["bfloat16"].score
    assert twice == pytest.approx(2 * once)


def test_checkpointed_layers_are_looked_at_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    plain = probed(model, lambda: model(x).sum(), ("bfloat16",))
    checkpointed = probed(model, lambda: checkpoint(model, x, use_reentrant=False).sum(), ("bfloat16",))
    for path in ("0", "2"):
        assert checkpointed.layers[path]["bfloat16"].score == pytest.approx(plain.layers[path]["bfloat16"].score)


def test_what_overflows_has_no_finite_score() -> None:
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(layer)
    nn.init.constant_(layer.weight, 1e3)
    found = probed(model, lambda: model(torch.full((2, 4), 1e3)).mean(), ("float16", "bfloat16"))
    assert found.layers["0"]["float16"].score == float("inf")
    assert found.layers["0"]["bfloat16"].score < float("inf")


def test_a_layer_that_cannot_be_run_again_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Once(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("only once")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Once(4, 4))
    with caplog.at_level("INFO", logger="halfwise"):
        found = probed(model, lambda: model(torch.ones(2, 4)).sum(), ("bfloat16",))
    assert set(found.layers) == {"0"}
    assert "only once" in caplog.text
    assert model[0].weight.grad is not None


def test_what_a_batch_norm_takes_out_again_does_not_count() -> None:
    """A shift or a stretch of a whole channel, which rounding a weight brings, ends in the norm behind the layer."""
    torch.manual_seed(0)
    output, y = torch.randn(64, 8, 3, 3, requires_grad=True), torch.randn(64, 8, 3, 3)
    (nn.functional.batch_norm(output, None, None, training=True) * y).sum().backward()
    assert output.grad is not None
    other, change = torch.randn(64, 8, 3, 3), 3.0 + 2.0 * output.detach()
    seen = _seen_by_the_loss(change + other, output.detach(), output.grad)
    assert float((seen * output.grad).sum()) == pytest.approx(float((other * output.grad).sum()), rel=1e-2)
    assert float(seen.square().sum()) < 1.05 * float(other.square().sum())
    unlike = torch.randn(64, 8, 3, 3)  # no norm behind: this gradient is not orthogonal
    assert torch.equal(_seen_by_the_loss(change, output.detach(), unlike), change)


def test_frozen_weights_have_no_gradient_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    found = probed(model, lambda: model(torch.randn(2, 4)).sum(), ("bfloat16",))
    assert found.layers["1"]["bfloat16"].gradient_error == 0.0
    assert found.layers["0"]["bfloat16"].gradient_error > 0.0


def test_noise_tells_batches_that_agree_from_batches_that_do_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    same = torch.randn(4, 8)
    for batches, low, high in (([same] * 4, 0.0, 0.01), (list(torch.randn(4, 4, 8)), 0.5, 1.0)):
        probe = SensitivityProbe(model, "cpu")
        for x in batches:
            model.zero_grad()
            loss = (model(x) * torch.randn(4, 4, generator=torch.Generator().manual_seed(int(x[0, 0] * 1e6)))).sum()
            loss.backward()
            probe.record_gradients()
            probe.keep(float(loss.detach()))
        assert low <= probe.sensitivity.gradient_noise["0"] <= high
