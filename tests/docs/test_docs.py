"""The Python in the documents runs as it stands."""

import re
import runpy
from pathlib import Path

import pytest

from forked_torchrun import run_script

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(
        code,
        id=f"{path.name}-{number}",
        marks=[pytest.mark.slow] if "time.perf_counter" in code else [],  # it measures
    )
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_the_code_runs(code: str, tmp_path: Path) -> None:
    """As a script does; its ranks are forked from the server that the tests have started."""
    script = tmp_path / "example.py"
    script.write_text(code)
    if "phalanx.init(" in code:  # for as long as a process lasts
        done = run_script(str(script))
        assert done.returncode == 0, done.stderr
    else:
        runpy.run_path(str(script), run_name="__main__")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


PAGES = [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*/*/README.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(page), f"{path.name} links to {target}#{anchor}"
