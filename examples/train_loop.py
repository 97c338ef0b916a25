"""A hand-written loop with halfwise: the closure is the forward pass and the loss, the batch is drawn outside.

python examples/train_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import halfwise.torch as hw
from halfwise.workloads.digits import load_digits

data = load_digits()
images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, 10)
)
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * (len(images) // 64 + 1))
criterion = nn.CrossEntropyLoss()

with hw.MixedPrecision(model, optimizer, policy="auto") as mp:
    for epoch in range(3):
        for rows in torch.randperm(len(images)).split(64):
            x, y = images[rows], labels[rows]
            result = mp.step(lambda: criterion(model(x), y), clip_grad_norm=1.0)
            if result.applied:  # a skipped step must not move the schedule
                scheduler.step()
        print(f"epoch {epoch + 1}: loss {result.loss:.3f}, {mp.skipped_steps} steps skipped")

    with torch.no_grad(), mp.autocast():
        predictions = model(torch.from_numpy(data.test_images)).argmax(1)
    print(f"test accuracy {(predictions == torch.from_numpy(data.test_labels)).float().mean():.3f}")
    assert mp.plan is not None
    print(f"auto chose {mp.plan.default.compute}: {mp.plan.default.detail}")
