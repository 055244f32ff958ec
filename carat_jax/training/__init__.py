"""Training with optax: the bundled model (`python -m carat_jax.training.tiny`)."""
