"""How many lines of a plain script change to make it distributed: `python lines_changed.py`.

A line counts that is in the one script and not in the other, as `diff` has it; where a run of lines
is replaced, the longer side counts.
"""

import difflib
from pathlib import Path

HERE = Path(__file__).parent


def lines_changed(before: Path, after: Path) -> int:
    """Return the lines that are added, removed or replaced."""
    texts = [path.read_text().splitlines() for path in (before, after)]
    blocks = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal")


def table() -> list[tuple[str, str, int]]:
    """Return example, script and number of lines for each script beside a plain one."""
    return [
        (plain.parent.name, path.stem, lines_changed(plain, path))
        for plain in sorted(HERE.glob("*/plain.py"))
        for path in sorted(plain.parent.glob("*.py"))
        if path.stem.startswith(("distributed", "with_"))
    ]


if __name__ == "__main__":
    for example, script, number in table():
        print(f"{example:<16} {script:<18} {number:>3}")
