"""Whether the planner's sensitivity score ranks layers, and predicts by how much a plan changes the loss.

For each model and format every layer is rounded alone (inputs, weights and output) and the change of each sample's loss
is measured: the truth. Beside it stand the predicted score, and what is often used instead: the layer's largest
activation, and how much its own output changes. Claims, from 4 batches: Spearman's correlation of score and truth
within a model and format at least 0.95 in the median and 0.85 at the least; the predicted change of the whole plan, all
layers rounded, within a factor 1.5 of the measured one in at least 90 % of the cases.

A batch norm in training couples the samples: what one sample seems to add another takes away, so that the change of one
sample's loss says little. The claims are for batch norms that use their running statistics; the same network with batch
statistics is shown beside them.

    python benchmarks/ranking.py [--json] [--seeds 3]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from _harness import emit, table
from halfwise.torch.measure import timed_layers
from halfwise.torch.nested import floating_tensors, map_tensors
from halfwise.torch.rounding import rounded
from halfwise.torch.sensitivity import SensitivityProbe
from halfwise.workloads.datasets import load_data

FORMATS = ("bfloat16", "float16", "float8_e4m3fn")
OUTPUTS = {"float8_e4m3fn": "bfloat16"}
BATCH, BATCHES, TRAINED = 64, 4, 40
COUPLED = "batch statistics"
HEADERS = ("model", "format", "layers", "score", "output error", "abs-max", "predicted", "measured", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for seed in range(arguments.seeds) for row in measured(seed)]
    claimed = [row for row in rows if COUPLED not in row["model"]]
    summary, beside = summarised(claimed), summarised([row for row in rows if COUPLED in row["model"]])
    shown = [tuple(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()) for row in rows]
    text = table(HEADERS, shown) + "\n"
    for what, numbers in (("claimed:", summary), (f"{COUPLED}:", beside)):
        text += "\n" + " ".join([what, *(f"{name} {value:.3f}" for name, value in numbers.items())])
    emit(text, {"rows": rows, "summary": summary}, as_json=arguments.json)
    assert summary["median"] >= 0.95, summary
    assert summary["least"] >= 0.85, summary
    assert summary["within_1.5"] >= 0.9, summary


def summarised(rows: list[dict[str, Any]]) -> dict[str, float]:
    scores = [row["score"] for row in rows]
    return {
        "median": statistics.median(scores),
        "least": min(scores),
        "median_output_error": statistics.median(row["output error"] for row in rows),
        "median_abs_max": statistics.median(row["abs-max"] for row in rows),
        "within_1.5": sum(1 / 1.5 <= row["ratio"] <= 1.5 for row in rows) / len(rows),
    }


def measured(seed: int) -> Iterator[dict[str, Any]]:
    """A row for each model and format."""
    data = load_data("image", "digits")
    images, labels = torch.from_numpy(data.train[0]), torch.from_numpy(data.train[1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    batches = [(images[rows].reshape(-1, 1, 8, 8), labels[rows]) for rows in torch.split(order, BATCH)]
    for name, make in MODELS.items():
        torch.manual_seed(seed)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for number in range(TRAINED):
            x, y = batches[number % len(batches)]
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.train(COUPLED in name or not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()))
        held = batches[-1 - BATCHES : -1]
        layers = timed_layers(model)
        probe = SensitivityProbe(model, "cpu")
        statistics_before = {key: value.clone() for key, value in model.named_buffers()}
        for x, y in held:
            with probe.watching(FORMATS):
                loss = cross_entropy(model(x), y)
                loss.backward()
            probe.keep(float(loss.detach()))
        predicted = probe.sensitivity
        largest = abs_max(model, layers, held)

        def losses(model: nn.Module = model, held: Any = held) -> Tensor:
            with torch.no_grad():
                each = [cross_entropy(model(x), y, reduction="none").double() for x, y in held]
            return torch.stack(each) / BATCH

        for format_name in FORMATS:
            exact = losses()
            truth, errors = {}, {}
            for path, layer in layers.items():
                with rounding({path: layer}, format_name) as error:
                    truth[path] = change(losses() - exact)
                errors[path] = error()
            with rounding(layers, format_name):
                whole = math.sqrt(change(losses() - exact))
            score = {path: predicted.layers[path][format_name].score for path in layers}
            told = predicted.loss_change(dict.fromkeys(layers, format_name))
            yield {
                "model": f"{name}, seed {seed}",
                "format": format_name,
                "layers": len(layers),
                "score": correlation(score, truth),
                "output error": correlation(errors, truth),
                "abs-max": correlation(largest, truth),
                "predicted": told,
                "measured": whole,
                "ratio": told / whole,
            }
        for key, value in model.named_buffers():
            value.copy_(statistics_before[key])


def change(differences: Tensor) -> float:
    """The sum over samples of the squared change of the batch's loss, the mean over batches."""
    return float(differences.square().sum(1).mean())


def correlation(found: Mapping[str, float], truth: Mapping[str, float]) -> float:
    return float(spearmanr([found[path] for path in truth], list(truth.values())).statistic)


@contextmanager
def rounding(layers: Mapping[str, nn.Module], name: str) -> Iterator[Callable[[], float]]:
    """Within the block the layers compute as the format would; gives a function for the outputs' relative error."""
    scaled, output_format = name.startswith("float8"), OUTPUTS.get(name, name)
    squares = [0.0, 0.0]

    def on_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(args, rounded_if_floating), map_tensors(kwargs, rounded_if_floating)

    def rounded_if_floating(tensor: Tensor) -> Tensor:
        return rounded(tensor, name, scaled=scaled) if tensor.is_floating_point() else tensor

    def on_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = map_tensors(output, lambda t: rounded(t, output_format) if t.is_floating_point() else t)
        if len(layers) == 1:
            with torch.nn.utils.stateless._reparametrize_module(module, kept[id(module)]):
                exact = type(module).forward(module, *args, **kwargs)
            for a, b in zip(floating_tensors(result), floating_tensors(exact), strict=True):
                squares[0] += float((a - b).square().sum())
                squares[1] += float(b.square().sum())
        return result

    kept: dict[int, dict[str, Tensor]] = {}
    with ExitStack() as stack:
        for layer in layers.values():
            kept[id(layer)] = {key: p.detach().clone() for key, p in layer.named_parameters()}
            lowered = {key: rounded(p, name, scaled=scaled) for key, p in layer.named_parameters()}
            with torch.no_grad():
                for key, parameter in layer.named_parameters():
                    parameter.copy_(lowered[key])
            stack.callback(layer.register_forward_pre_hook(on_input, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(on_output, with_kwargs=True).remove)
        try:
            yield lambda: math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
        finally:
            with torch.no_grad():
                for layer in layers.values():
                    for key, parameter in layer.named_parameters():
                        parameter.copy_(kept[id(layer)][key])


def abs_max(model: nn.Module, layers: Mapping[str, nn.Module], batches: Any) -> dict[str, float]:
    """The largest magnitude that each layer returns."""
    found = dict.fromkeys(layers, 0.0)
    with ExitStack() as stack:
        for path, layer in layers.items():

            def note(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                found[path] = max(found[path], *(float(t.detach().abs().max()) for t in floating_tensors(output)))

            stack.callback(layer.register_forward_hook(note).remove)
        with torch.no_grad():
            for x, _ in batches:
                model(x)
    return found


class ConvNet(nn.Module):
    """Six convolutions with batch norms, and a head: 13 layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for width in (16, 16, 32, 32, 64, 64):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x).mean((2, 3)))
        return logits


class Encoder(nn.Module):
    """Four transformer layers on 16 patches: 22 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(4, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)
        logits: Tensor = self.head(self.layers(self.patches(patches)).mean(1))
        return logits


class Recurrent(nn.Module):
    """Four LSTMs with norms and dense layers between, over the rows of an image: 13 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstms = nn.ModuleList([nn.LSTM(8 if i == 0 else 32, 32, batch_first=True) for i in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.dense = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        for lstm, norm, dense in zip(self.lstms, self.norms, self.dense, strict=True):
            x = torch.tanh(dense(norm(lstm(x)[0])))
        logits: Tensor = self.head(x[:, -1])
        return logits


class Outliers(nn.Module):
    """A residual network of dense layers of very unlike scales, some with outlier channels: 17 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(15)])
        self.head = nn.Linear(48, 10)
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, nn.Linear)
                layer.weight.mul_(2.0 ** (index % 5 - 2))
                layer.weight[: index % 4] *= 8.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.flatten(1)))
        for layer in self.layers:
            x = x + 0.2 * torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    f"convnet, {COUPLED}": ConvNet,
    "encoder": Encoder,
    "recurrent": Recurrent,
    "outliers": Outliers,
}


if __name__ == "__main__":
    main()
