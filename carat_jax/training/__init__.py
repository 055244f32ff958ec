"""Training with optax: the bundled model (`python -m carat_jax.training.tiny`) and drafters
(`python -m carat_jax.training.drafter`).
"""
