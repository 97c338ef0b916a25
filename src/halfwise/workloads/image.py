"""The old place of the image classifier in PyTorch, until `benchmarks/overhead.py` imports it from the new one."""

from __future__ import annotations

from halfwise.workloads.torch.networks import ConvNet

__all__ = ["ConvNet"]
