.PHONY: help setup demo test test-slow test-gpu

help:
	@echo 'make demo      set up .venv, then continue "def " with the bundled model'
	@echo 'make test      set up .venv, then lint and run the tests'
	@echo 'make test-slow set up .venv, then run the tests that `make test` leaves out for their time'
	@echo 'make test-gpu  set up .venv, then run the kernels and the model on a GPU'
	@echo 'make setup     set up .venv only (JAX with CUDA where nvidia-smi finds a GPU)'

setup:
	@bash scripts/setup.sh

demo: setup
	.venv/bin/carat generate "def "

test: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/python -m pytest -n 2

test-slow: setup
	.venv/bin/python -m pytest -n 2 -m "slow and not gpu and not network"

# Every implementation of every op, and the model end to end. What simulates kernels or lowers them
# for a GPU is left to `make test`.
test-gpu: setup
	@.venv/bin/python -c 'import jax; d = jax.default_backend(); exit(d != "gpu" and f"make test-gpu needs a GPU: JAX finds only {d}")'
	XLA_PYTHON_CLIENT_PREALLOCATE=false .venv/bin/python -m pytest -m "not network and not slow" -n 8 \
	  --ignore-glob "*_mosaic.py" --ignore tests/kernels/test_split_keys.py tests/kernels tests/test_gpu.py
