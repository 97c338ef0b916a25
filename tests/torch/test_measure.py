"""Timing layers in passing: which layers, what is cut short, and that nothing changes."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from halfwise.torch.measure import LayerTimer, half_formats
from halfwise.torch.region import region


class SlowInHalf(nn.Linear):
    """Forward takes 20 ms in half and no time in float32."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            time.sleep(0.02)
        return super().forward(x)


def test_layers_are_timed_once_and_slow_formats_cut_short() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), SlowInHalf(8, 2))
    timer = LayerTimer(model, "cpu", ("bfloat16",))
    before = [t.clone() for t in model.state_dict().values()]
    random_state = torch.get_rng_state()
    with timer.timing(), region("cpu", "float32"):
        hidden = model[:3](torch.randn(6, 4))
        torch.set_rng_state(random_state)
        model[3](hidden.detach())
    table = timer.table
    assert set(table.seconds) == {"0", "1", "3"}
    assert table.is_lower_bound("3", "bfloat16")
    seconds = table.get("3", "bfloat16")
    assert seconds is not None
    assert seconds >= 0.02
    assert seconds > 5 * table.seconds["3"]["float32"]
    assert not table.is_lower_bound("0", "float32")
    after = model.state_dict()
    assert int(after["1.num_batches_tracked"]) == 1  # the model's own pass, none of the timer's
    assert torch.equal(before[0], after["0.weight"])
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_containers_and_wholes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))
            self.attention = nn.MultiheadAttention(4, 2)
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.attention(x, x, x)[0] + self.bias)

    model = Net()
    timer = LayerTimer(model, "cpu", half_formats("cpu"))
    with timer.timing():
        model(torch.randn(3, 2, 4))
    assert set(timer.table.seconds) == {"attention", "fc"}
    assert all(set(times) == {"float32", "bfloat16", "float16"} for times in timer.table.seconds.values())


def test_evaluation_is_not_timed() -> None:
    model = nn.Linear(2, 2)
    timer = LayerTimer(model, "cpu", ("bfloat16",))
    with timer.timing(), torch.no_grad():
        model(torch.ones(1, 2))
    assert timer.table.seconds == {}
