"""What a benchmark may write to stderr."""

import re


def only_progress(text: str) -> bool:
    """Whether there is a line, and every one of them begins with seconds as `report.say` does."""
    lines = text.splitlines()
    return bool(lines) and all(re.match(r" *\d+\.\d s  \S", line) for line in lines)
