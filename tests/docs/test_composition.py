"""docs/composition.md: which ways to split the work go together, as the plans and tests have it.

`python tests/docs/test_composition.py > docs/composition.md` writes the page.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from pathlib import Path

from phalanx.errors import StrategyError
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import AXES, KINDS, Strategy

ROOT = Path(__file__).parents[2]

SHAPE = ModelShape(
    vocab_size=128, num_layers=4, hidden=64, num_heads=16, num_kv_heads=16, head_dim=4, ffn=128,
    max_seq_len=64,
)  # fmt: skip
"""Sizes that every kind can split."""

DEGREES = {"2d": 4, "2.5d": 8, "3d": 8}
"""Ranks of the kinds that cannot have two."""

OPTIONS = {"interleaved": 2, "zb": 1, "2.5d": 2, "every": 2}


def form(axis: str, kind: str) -> str:
    """Return the shortest text of a kind."""
    option = f"/{OPTIONS[kind]}" if kind in OPTIONS else ""
    degree = "" if axis == "recompute" else str(DEGREES.get(kind, 2))
    return f"{axis}{degree}:{kind}{option}"


FORMS = {
    axis: [form(axis, kind) for kind, it in kinds.items() if it.about is not None]
    for axis, kinds in KINDS.items()
}


def refusal(left: str, right: str) -> str | None:
    """Return why two kinds do not go together; None if they do."""
    try:
        strategy = Strategy.parse(f"{left},{right}")
    except StrategyError as error:
        return str(error)
    return refusal_of(strategy)


@functools.cache
def refusal_of(strategy: Strategy) -> str | None:
    try:
        plan_decoder(strategy, SHAPE)
    except StrategyError as error:
        return str(error)
    return None


def kinds_of(text: str) -> set[tuple[str, str]]:
    strategy = Strategy.parse(text)
    found = {(name, axis.kind) for name, axis in strategy.axes() if axis.degree > 1}
    return found | {("recompute", strategy.recompute.kind)} - {("recompute", "none")}


def verified() -> list[str]:
    """Return the strategies that tests compare with plain PyTorch."""
    files = ("test_parity.py", "test_compositions.py")
    source = "".join((ROOT / "tests/verify" / file).read_text() for file in files)
    pattern = f'"((?:{"|".join((*AXES, "recompute"))})' + r'[0-9:][^" {]*[^", {}])"'
    return sorted({str(Strategy.parse(text)) for text in re.findall(pattern, source)})


def page() -> str:
    reasons: list[str] = []
    rows: list[str] = []
    legal: set[frozenset[tuple[str, str]]] = set()
    for axis, forms in FORMS.items():
        for left in forms:
            cells: list[str] = []
            for other, rights in FORMS.items():
                found = {} if other == axis else {right: refusal(left, right) for right in rights}
                legal |= {
                    frozenset(kinds_of(left) | kinds_of(right))
                    for right, reason in found.items()
                    if reason is None
                }
                refused: list[str] = []
                for right, reason in found.items():
                    if reason is None:
                        continue
                    text = f"`{Strategy.parse(f'{left},{right}')}`: {reason.partition(': ')[2]}"
                    if text not in reasons:
                        reasons.append(text)
                    refused.append(f"`{right}` ({reasons.index(text) + 1})")
                words = "all but " + ", ".join(refused) if refused else "all"
                cells.append("" if other == axis else words)
            rows.append(f"| `{left}` | {' | '.join(cells)} |")
    of_tests = verified()
    compared = {
        frozenset(pair)
        for text in of_tests
        for pair in itertools.combinations(sorted(kinds_of(text)), 2)
    }
    several = [text for text in of_tests if len(kinds_of(text)) > 1]
    listed = "\n".join(f"- `{text}`" for text in several)
    numbered = "\n".join(f"{n}. {reason}." for n, reason in enumerate(reasons, start=1))
    head = f"| kind | {' | '.join(FORMS)} |\n|---|{'---|' * len(FORMS)}"
    return f"""# What goes together

Any of the axes `pp dp fsdp cp tp` and recomputation can be named in one strategy, in any order.
Ranks stand in the order in which they are named here, outer to inner, so that `tp` is on the fastest link.

A row is a kind, a column an axis: with which kinds of that axis it goes.

{head}
{chr(10).join(rows)}

Refused, with the message:

{numbered}

Sizes of the model may be refused too, such as heads that `tp` does not divide; the message names the nearest that fit.
Beside `fsdp`, `tp`, `cp` or recomputation the backward of `zb`, `zbv` and `dualpipev` is made in one pass, since their operators make both gradients at once.

Of the {len(legal)} pairs of kinds that are legal, tests compare {len(legal & compared)} with plain PyTorch, alone or among others.
Every composition that they compare, over several steps in float64, with the bytes that it sends (`pytest -m "slow or not slow" tests/verify/test_parity.py tests/verify/test_compositions.py`):

{listed}

This page is written by `python tests/docs/test_composition.py`.
"""  # noqa: E501


def test_the_page_is_what_plans_and_tests_say() -> None:
    assert (ROOT / "docs/composition.md").read_text() == page()


if __name__ == "__main__":
    sys.stdout.write(page())
