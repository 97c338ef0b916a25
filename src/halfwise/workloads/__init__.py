"""Built-in workloads: real data and models to try halfwise on, without a download.

What all have in common is here: data (`datasets.py`), settings, the record of a run (`session.py`), and a run from
start to summary (`runs.py`). `torch` and `keras` hold networks and training loops, written by hand on the public API:
they read as a user's own would. A framework is imported only by the trainings that use it.
"""
