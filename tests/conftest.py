"""Puts this folder on the import path, for the helpers beside the tests; sets up their tools."""

import os

# The simulator of Mosaic kernels blocks a thread of XLA's CPU client for each warpgroup.
os.environ.setdefault("NPROC", "8")

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)  # the same examples each time
settings.load_profile("suite")
