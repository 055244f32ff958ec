"""The examples of the documentation, run as they stand there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
EXAMPLES = {
    file.name: "\n".join(re.findall(r"^```python\n(.*?)^```", file.read_text(), re.S | re.M))
    for file in sorted(DOCS.glob("*.md"))
}


@pytest.mark.parametrize("page", [name for name, code in EXAMPLES.items() if code])
def test_the_examples_of_a_page_run(page):
    names: dict = {}
    exec(compile(EXAMPLES[page], page, "exec"), names)
    if page == "drafters.md":
        plain, fast = names["plain"], names["fast"]
        assert fast.tokens == plain.tokens
        assert fast.stats.accepted > 0
