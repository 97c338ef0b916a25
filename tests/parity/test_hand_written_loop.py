"""`MixedPrecision` against hand-written loops that use none of our code: equal bits.

With float32 the reference is the plain loop; with the half policies it is `torch.autocast` and
`torch.amp.GradScaler`, through a trace that includes skipped steps. One difference is meant and tested: a skipped
step leaves batch-norm statistics as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw

STEPS = 20


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 36, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def factor(step: int) -> float:
    """Blows the loss up in some steps, so that float16 gradients overflow at loss scale 65536, not at a tenth of it."""
    return {3: 40.0, 4: 40.0, 11: 3000.0}.get(step, 1.0)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return nn.functional.cross_entropy(model(x), y) * factor(step)


Loop = Callable[[nn.Module, torch.optim.Optimizer, float | None], list[bool]]


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> list[bool]:
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss_of(model, x, y, step).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return [True] * STEPS


def amp_loop(dtype: torch.dtype) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> list[bool]:
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        applied = []
        for step, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, x, y, step)
            scaler.scale(loss).backward()
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            applied.append(scaler.get_scale() >= before)
        return applied

    return loop


def our_loop(policy: str, *, parts: bool = False) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> list[bool]:
        applied = []
        with hw.MixedPrecision(model, optimizer, policy) as mp:
            for step, (x, y) in enumerate(batches()):
                if parts:
                    mp.zero_grad()
                    with mp.autocast():
                        loss = loss_of(model, x, y, step)
                    mp.backward(loss)
                    if max_norm is not None:
                        mp.clip_grad_norm_(max_norm)
                    result = mp.optimizer_step()
                else:
                    result = mp.step(partial(loss_of, model, x, y, step), clip_grad_norm=max_norm)
                applied.append(result.applied)
        return applied

    return loop


def trained(
    loop: Loop, make_optimizer: Callable[..., torch.optim.Optimizer], max_norm: float | None
) -> tuple[nn.Module, list[bool]]:
    model = network()
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    return model, loop(model, optimizer, max_norm)


REFERENCES: dict[str, Loop] = {
    "float32": plain_loop,
    "mixed_bfloat16": amp_loop(torch.bfloat16),
    "mixed_float16": amp_loop(torch.float16),
}


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("parts", [False, True], ids=["step", "parts"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("policy", list(REFERENCES))
def test_weights_are_bit_identical(
    policy: str, make_optimizer: Callable[..., torch.optim.Optimizer], parts: bool, max_norm: float | None
) -> None:
    theirs, expected = trained(REFERENCES[policy], make_optimizer, max_norm)
    ours, applied = trained(our_loop(policy, parts=parts), make_optimizer, max_norm)
    assert applied == expected
    if policy == "mixed_float16":
        assert 2 <= applied.count(False) <= 8  # the trace does include skipped steps
    differing = [
        n
        for (n, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    assert differing == []
    if all(applied):
        assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_the_comparison_fails_on_a_loop_that_clips_before_unscaling() -> None:
    """A comparer that cannot fail proves nothing: the classic mistake must be seen."""

    def wrong(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> list[bool]:
        assert max_norm is not None
        scaler = torch.amp.GradScaler("cpu")
        for step, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, x, y, step)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
        return []

    theirs, _ = trained(wrong, torch.optim.SGD, 0.5)
    ours, _ = trained(our_loop("mixed_float16"), torch.optim.SGD, 0.5)
    assert not all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_only_skipped_batches_are_missing_from_the_batch_norm_statistics() -> None:
    theirs, applied = trained(amp_loop(torch.float16), torch.optim.SGD, None)
    ours, _ = trained(our_loop("mixed_float16"), torch.optim.SGD, None)
    assert int(theirs.get_buffer("1.num_batches_tracked")) == STEPS
    assert int(ours.get_buffer("1.num_batches_tracked")) == applied.count(True)
    assert not torch.equal(ours.get_buffer("1.running_mean"), theirs.get_buffer("1.running_mean"))


def test_accumulation_is_bit_identical_to_the_mean_of_the_losses() -> None:
    pairs = list(zip(batches()[::2], batches()[1::2], strict=True))

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(3)
    for pair in pairs:
        optimizer.zero_grad()
        for x, y in pair:
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()

    twin = network()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(twin(x), y)

    with hw.MixedPrecision(twin, torch.optim.Adam(twin.parameters()), "float32") as mp:
        torch.manual_seed(3)
        for pair in pairs:
            mp.step([partial(loss, x, y) for x, y in pair])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("guard", [True, "report", False])
def test_the_guard_changes_no_bit_of_a_healthy_run(guard: bool) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: float | None) -> list[bool]:
        with hw.MixedPrecision(model, optimizer, "mixed_float16", guard=guard) as mp:
            return [mp.step(partial(loss_of, model, x, y, s)).applied for s, (x, y) in enumerate(batches())]

    theirs, expected = trained(amp_loop(torch.float16), torch.optim.Adam, None)
    ours, applied = trained(loop, torch.optim.Adam, None)
    assert applied == expected
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
