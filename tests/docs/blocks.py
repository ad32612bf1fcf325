"""The fenced blocks of README.md and docs, and the commands in them.

A fence is one of these; `not run: REASON` after the language says why no test runs it:

    ```sh        commands, one a line
    ```console   commands after `$ `, and what they print
    ```python    a whole script
    ```toml      the file of settings, which test_reference.py reads
    ```yaml      the file of a system, which test_two_machines.py reads
    ```order X   an order that tests/parallel/test_fsdp_order.py reads from a run
    ```text X    a message, a formula, a tree or the file X of a system: nothing to run
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

LANGUAGES: Final = ("sh", "console", "python", "toml", "yaml", "order", "text")
NOT_RUN: Final = "not run: "


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the number of the line of its fence."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}-{self.line}"

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith(NOT_RUN)

    def commands(self) -> list[str]:
        """Return the commands of a block of a shell, without comments, continued lines joined."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        bare = (re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines)
        return [line for line in bare if line]


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    start, fence, body = 0, None, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("```"):
            body.append(line)
        elif fence is None:
            start, fence, body = number, line[3:], []
        else:
            language, _, mark = fence.partition(" ")
            found.append(Block(page.name, start, language, mark, "\n".join(body) + "\n"))
            fence = None
    assert fence is None, f"{page.name}: the fence of line {start} is not closed"
    return found


BLOCKS: Final = tuple(block for page in PAGES for block in blocks_of(page))
