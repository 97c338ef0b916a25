"""What a rehearsal leaves behind: nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfwise.torch.snapshot import BufferCopies, RandomState, rehearsal


class Counting(nn.Module):
    """Writes its buffers in every way there is: in place, by replacement, one of them not persistent."""

    calls: Tensor
    last: Tensor
    late: Tensor  # registered by a test

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(nn.functional.dropout(self.linear(x)))
        self.last = y.detach().mean(0)
        return y


def state_of(model: nn.Module) -> list[Tensor]:
    return [t.clone() for t in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_rehearsal_leaves_no_trace(error: type[BaseException] | None) -> None:
    model = Counting()
    model(torch.randn(5, 3)).square().sum().backward()
    before, gradients, last = state_of(model), [p.grad for p in model.parameters()], model.last
    generator = torch.get_rng_state()
    try:
        with rehearsal(model):
            assert all(p.grad is None for p in model.parameters())
            model(torch.randn(5, 3) * float("inf")).square().sum().backward()
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.last is last
    assert torch.equal(generator, torch.get_rng_state())


def test_copies_follow_buffers_that_were_replaced_or_added() -> None:
    model = Counting()
    copies = BufferCopies(model)
    copies.save()
    model.last = torch.ones(3)
    model.register_buffer("late", torch.ones(2))
    copies.save()
    model.last += 5
    model.late += 5
    copies.restore()
    assert model.last.tolist() == [1.0] * 3
    assert model.late.tolist() == [1.0] * 2


def test_random_state_survives_a_round_trip() -> None:
    state = RandomState([torch.device("cpu")])
    first = torch.rand(3)
    RandomState.from_state_dict(state.state_dict()).restore()
    assert torch.equal(torch.rand(3), first)
