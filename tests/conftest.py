"""Puts this folder on the import path, for the helpers beside the tests; settles Hypothesis."""

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)  # the same examples each time
settings.load_profile("suite")
