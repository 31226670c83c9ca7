"""Links between the pages of the repository lead somewhere, and the README's commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gangline.core.client.cli import COMMANDS

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """Names of a page's headings as links use them."""
    text = _FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ +(.+?) *#*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for match in _LINK.finditer(_FENCE.sub("", page.read_text())):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    """Shell parses each block; its `gangline` commands and `make` targets are there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    blocks = _SHELL.findall(page.read_text())
    assert blocks
    for block in blocks:
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["gangline"]:
                assert words[1] in COMMANDS, line
            if words[:1] == ["make"]:
                assert words[1] in targets, line


def test_decisions_are_listed() -> None:
    folder = ROOT / "docs" / "adr"
    listed = set(re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text()))
    assert {path.name for path in folder.glob("[0-9]*.md")} == listed
    for path in folder.glob("[0-9]*.md"):
        headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "Alternatives"], path.name
