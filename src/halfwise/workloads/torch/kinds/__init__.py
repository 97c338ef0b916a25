"""Small honest versions of seven kinds of model in PyTorch, one file each, and the two that `halfwise train` trains.

Each file's `workload()` gives model, loss, four batches and an optimizer, on embedded real data where that suits.
"""
