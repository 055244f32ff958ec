"""What is wrong with a checkpoint, told in full."""

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message lists everything wrong with it."""


def misfit(folder: Path, problems: Sequence[str]) -> CheckpointError:
    """The error for weights that are not those of the configuration."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return CheckpointError(
        f"{folder} does not fit its configuration ({count}):\n  " + "\n  ".join(problems)
    )
