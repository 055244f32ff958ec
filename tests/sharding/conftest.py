"""These tests take eight devices: `tests/test_sharding.py` runs them in a process of its own.

By hand: XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pytest tests/sharding
"""

import os

if "host_platform_device_count=8" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore_glob = ["test_*.py"]
