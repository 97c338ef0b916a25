"""What rounding each layer to each format would do to the loss and the weight gradients, beside training's own noise.

Forward, to first order: with g the loss's gradient with respect to a layer's output and dY the change of that output
when the layer's inputs, weights and output are rounded, each sample changes the loss by sum(g * dY). Changes of
different samples and layers are taken as independent, so their squares add (arXiv 2505.13060). Backward: the relative
error of each weight gradient (arXiv 2407.02327, 2602.01410); a forward score alone misses what breaks training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LayerSensitivity", "Sensitivity", "SensitivityRecord"]


@dataclass(frozen=True)
class LayerSensitivity:
    """What rounding one layer to one format does.

    Attributes:
        score: expected square of the change of a batch's loss.
        gradient_error: relative error (2-norms, not squared) of the layer's weight gradients; 0 where it has none.
    """

    score: float
    gradient_error: float = 0.0


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivities of a model's layers, and the noise to hold them against.

    Attributes:
        layers: path -> format -> what rounding does. A layer or format that is absent was not looked at.
        loss: mean loss of the batches.
        loss_noise: standard deviation of the loss over the batches; 0 for a single batch.
        gradient_noise: path -> the spread of the layer's weight gradients over the batches, relative to their size: 0
            where all batches give the same gradient, 1 where they have nothing in common.

    >>> found = Sensitivity({"fc": {"bfloat16": LayerSensitivity(score=4e-6)}}, loss=2.3, loss_noise=0.1)
    >>> found.loss_change({"fc": "bfloat16"})
    0.002
    """

    layers: Mapping[str, Mapping[str, LayerSensitivity]] = field(default_factory=dict)
    loss: float = 0.0
    loss_noise: float = 0.0
    gradient_noise: Mapping[str, float] = field(default_factory=dict)

    def get(self, path: str, format_name: str) -> LayerSensitivity | None:
        """What rounding the layer to the format does, or None where that was not looked at."""
        return self.layers.get(path, {}).get(format_name)

    def loss_change(self, formats: Mapping[str, str]) -> float:
        """The predicted change of a batch's loss when these layers compute in these formats, the others in float32."""
        found = [self.get(path, name) for path, name in formats.items()]
        return math.sqrt(math.fsum(one.score for one in found if one is not None))


class SensitivityRecord:
    """Gathers a `Sensitivity` batch by batch; adapters fill it.

    >>> record = SensitivityRecord()
    >>> for loss in (1.0, 3.0):
    ...     record.add_score("fc", "float16", 2e-4)
    ...     record.add_gradient("fc", norm=1.0)
    ...     record.end_batch(loss)
    >>> found = record.sensitivity({"fc": 0.5})
    >>> found.loss_noise, found.get("fc", "float16").score, round(found.gradient_noise["fc"], 3)
    (1.0, 0.0002, 1.0)
    """

    def __init__(self) -> None:
        self._scores: dict[tuple[str, str], float] = {}
        self._errors: dict[tuple[str, str], list[float]] = {}
        self._batch_scores: dict[tuple[str, str], float] = {}
        self._batch_errors: dict[tuple[str, str], list[float]] = {}
        self._batch_norms: dict[str, float] = {}
        self._squares: dict[str, list[float]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._losses: list[float] = []

    @property
    def batches(self) -> int:
        """How many batches were kept."""
        return len(self._losses)

    def add_score(self, path: str, format_name: str, score: float) -> None:
        """Adds the sum over samples of squared loss changes; a layer that is called twice adds twice."""
        key = path, format_name
        self._batch_scores[key] = self._batch_scores.get(key, 0.0) + score

    def add_gradient_error(self, path: str, format_name: str, error: float) -> None:
        """Adds the relative error of the layer's weight gradients in this batch."""
        self._batch_errors.setdefault((path, format_name), []).append(error)

    def add_gradient(self, path: str, *, norm: float) -> None:
        """Adds the 2-norm of the layer's weight gradients in this batch."""
        self._batch_norms[path] = norm

    def end_batch(self, loss: float) -> None:
        """Keeps what was added since the last batch."""
        for key, score in self._batch_scores.items():
            self._scores[key] = self._scores.get(key, 0.0) + score
            self._seen[key] = self._seen.get(key, 0) + 1
        for key, errors in self._batch_errors.items():
            self._errors.setdefault(key, []).append(max(errors))
        for path, norm in self._batch_norms.items():
            self._squares.setdefault(path, []).append(norm * norm)
        self._losses.append(loss)
        self.drop_batch()

    def drop_batch(self) -> None:
        """Forgets what was added since the last batch."""
        self._batch_scores, self._batch_errors, self._batch_norms = {}, {}, {}

    def sensitivity(self, mean_gradient_norms: Mapping[str, float] = {}) -> Sensitivity:
        """The result over all batches.

        Args:
            mean_gradient_norms: path -> 2-norm of the mean of the layer's weight gradients over the batches that were
                kept; it tells noise from signal. A layer without one has no known noise.
        """
        layers: dict[str, dict[str, LayerSensitivity]] = {}
        for (path, name), total in self._scores.items():
            errors = self._errors.get((path, name), [0.0])
            layers.setdefault(path, {})[name] = LayerSensitivity(
                score=total / self._seen[path, name], gradient_error=math.fsum(errors) / len(errors)
            )
        count = len(self._losses)
        mean = math.fsum(self._losses) / count if count else 0.0
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in self._losses) / count) if count else 0.0
        noise = {path: self._noise(path, norm) for path, norm in mean_gradient_norms.items() if path in self._squares}
        return Sensitivity(layers, loss=mean, loss_noise=spread, gradient_noise=noise)

    def _noise(self, path: str, mean_norm: float) -> float:
        squares = self._squares[path]
        count, size = len(squares), math.fsum(squares) / len(squares)
        if count < 2 or not 0.0 < size < math.inf:
            return 0.0
        variance = max(0.0, size - mean_norm * mean_norm) * count / (count - 1)
        return math.sqrt(min(1.0, variance / size))
