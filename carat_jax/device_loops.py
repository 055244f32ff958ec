"""Jitted functions whose loops the GPU turns by itself.

XLA reads the condition of a `lax.while_loop` on the host in every turn, and only then launches the
next one: by the time of a decode step of 31B 0.1 ms, and of a speculative round, with its
many small kernels, 0.3 ms. As part of a CUDA graph the condition stays on the device.
"""

import functools

import jax

# XLA's own choice of what it makes CUDA graphs of, and loops.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"

# Like `jax.jit`, but JAX takes compiler options at the top only: what it makes cannot be called
# within another jitted function. Nothing to any device but an NVIDIA GPU.
jit = functools.partial(jax.jit, compiler_options={"xla_gpu_enable_command_buffer": GRAPHS})
