"""halfwise for Keras 3."""
