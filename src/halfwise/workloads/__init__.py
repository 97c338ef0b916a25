"""Built-in workloads: real data and models to try halfwise on, without a download.

The training loops are written by hand on the public API: they read as a user's own loop would.
"""
