"""The built-in workloads in Keras 3."""
