"""The examples in README and docs run as written, and what they assert holds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = {"transformers.md": "transformers", "torchtitan.md": "torchtitan"}  # Python 3.10 has no torchtitan
PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page, capsys):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
