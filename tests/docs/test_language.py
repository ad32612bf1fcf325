"""One word for one thing: retired words stay out of the documents and of the code."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = (*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").glob("*.md")))

RETIRED = {
    r"that of": "repeat the noun",
    r"those of": "repeat the noun",
    r"what is": "name it",
    r"so many": "say how many, or the number of",
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"(tell|tells|told|telling)": "report, notify, say",
    r"((a|the|its|their|rank's|each) shares?|shares? of)": "shard of a tensor, part of others",
}
"""Words that the field does not use so -> the words to write."""

LONGEST = 160
"""Characters of a line of prose that a diff still shows; rows of tables have no line breaks."""


def found_in(text: str) -> Counter[str]:
    """Return how often each retired word stands in a text, over line breaks too."""
    flat = re.sub(r"\s*\n\s*#?\s*", " ", text)
    return Counter(
        {
            word: number
            for word in RETIRED
            if (number := len(re.findall(rf"(?i)(?<![\w`.-]){word}(?![\w(=-])", flat)))
        }
    )


def found_in_code() -> dict[str, Counter[str]]:
    """Return the retired words of each file of src that has some."""
    found = {path: found_in(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))}
    return {str(path.relative_to(ROOT)): words for path, words in found.items() if words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_retired_word(page: Path) -> None:
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    assert not found_in(prose), f"{page.name}: {found_in(prose)}; write {RETIRED}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_prose_fit_a_diff(page: Path) -> None:
    prose = re.sub(r"(?ms)^```.*?^```", lambda m: "\n" * m[0].count("\n"), page.read_text())
    lines = prose.splitlines()
    long = [
        n for n, line in enumerate(lines, 1) if len(line) > LONGEST and not line.startswith("|")
    ]
    assert not long, f"{page.name}: lines {long} have more than {LONGEST} characters"


def test_the_code_has_no_retired_word() -> None:
    assert not found_in_code(), f"{found_in_code()}; write {RETIRED}"


NAMED_TWICE = {
    *("account.py", "check.py", "compare.py", "convert.py", "cut.py", "layers.py"),
    *("layout.py", "loader.py", "loss.py", "optimizer.py", "order.py"),
    *("plan.py", "run.py", "session.py", "split.py", "summary.py", "flops.py", "watch.py"),
    *("Attention", "Block", "Dropout", "Head", "MLP", "Masks", "Norm"),
    *("Case", "Kind", "Trainer", "Watch"),
}
"""Files and classes of src whose name another has too: a list that only shrinks."""


def test_no_further_name_stands_for_two_files_or_classes() -> None:
    names: Counter[str] = Counter()
    for path in (ROOT / "src/phalanx").rglob("*.py"):
        names.update([path.name] if not path.name.startswith("__") else [])
        names.update(re.findall(r"(?m)^class (\w+)", path.read_text()))
    assert {name for name, number in names.items() if number > 1} <= NAMED_TWICE


def test_every_test_file_has_a_name_of_its_own() -> None:
    # The folders are no packages: pytest imports two files of one name as one module, and stops.
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_retired_words_are_found() -> None:
    text = "The rank is\n# told so many\nthings, and `tell` is a name; run.share(x) too."
    assert found_in(text) == {r"(tell|tells|told|telling)": 1, r"so many": 1}
