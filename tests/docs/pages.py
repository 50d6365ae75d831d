"""The pages of the documentation, and what stands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("recipes", "evals", "experiments")),
]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def lines(page, language):
    """The commands of the blocks in this language: without prompts, comments and line breaks."""
    found = [line for block in blocks(page, language) for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ").split(" #")[0].strip() for line in found if line.strip()]


def links(page):
    """Targets of links and pictures, without code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))
