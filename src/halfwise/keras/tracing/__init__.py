"""Records what a training step computes, operation by operation, and follows bad values to where they arose."""
