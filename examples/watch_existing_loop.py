"""A loop that exists, hand-written autocast and GradScaler, in which every step is skipped. One line says why.

python examples/watch_existing_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfwise.torch as hw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.wide = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)
        nn.init.constant_(self.wide.weight, 40.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 60 * torch.sigmoid(self.body(x) + 3)
        return self.head(self.norm(self.wide(hidden)))  # type: ignore[no-any-return]


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")

watch = hw.watch(model, optimizer, scaler=scaler)  # the one line

for _ in range(6):
    x, y = torch.randn(8, 64), torch.randint(0, 10, (8,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

print(watch.summary())
watch.close()
