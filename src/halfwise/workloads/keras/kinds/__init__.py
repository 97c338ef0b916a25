"""The seven kinds of model in Keras, one file each, built as in `halfwise.workloads.torch.kinds`, and the trained two.

Each file's `workload()` gives model, loss, four batches and an optimizer. Models return logits, so that no layer is a
softmax head, which would stay in float32 whatever the evidence says.
"""
