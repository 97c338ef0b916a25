"""The built-in workloads in PyTorch."""
