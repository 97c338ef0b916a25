"""The few things that Keras does not do alike on TensorFlow, JAX and torch."""
