.PHONY: help setup demo test

help:
	@echo 'make demo   set up .venv, then continue "def " with the bundled model'
	@echo 'make test   set up .venv, then lint and run the tests'
	@echo 'make setup  set up .venv only (JAX with CUDA where nvidia-smi finds a GPU)'

setup:
	@bash scripts/setup.sh

demo: setup
	.venv/bin/carat generate "def "

test: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/python -m pytest -n 2 --dist loadfile
