"""What docs/strategies.md and README.md say of combined axes is what plans and tests say.

`python tests/docs/test_composition.py` prints the blocks as the code has them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from pathlib import Path

import pytest

from phalanx.errors import StrategyError
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import AXES, KINDS, Strategy
from phalanx.strategy.kinds import SERVED

ROOT = Path(__file__).parents[2]

SHAPE = ModelShape(
    vocab_size=128, num_layers=4, hidden=64, num_heads=16, num_kv_heads=16, head_dim=4, ffn=128,
    max_seq_len=64,
)  # fmt: skip
"""Sizes that every kind can split."""

EXPERTS = ExpertShape(num_experts=4, top_k=2, ffn=64)
"""The experts that ep splits."""

DEGREES = {"2d": 4, "2.5d": 8, "3d": 8}
"""Ranks of the kinds that cannot have two."""

OPTIONS = {"interleaved": 2, "zb": 1, "2.5d": 2, "every": 2}


def form(axis: str, kind: str) -> str:
    """Return the shortest text of a kind."""
    option = f"/{OPTIONS[kind]}" if kind in OPTIONS else ""
    degree = "" if axis == "recompute" else str(DEGREES.get(kind, 2))
    return f"{axis}{degree}:{kind}{option}"


FORMS = {
    axis: [form(axis, kind) for kind, it in kinds.items() if it.about and kind not in SERVED]
    for axis, kinds in KINDS.items()
}
"""A worker of a server is one process, and combines with no axis."""


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
        experts = EXPERTS if strategy.ep.degree > 1 else None
        plan_decoder(strategy, dataclasses.replace(SHAPE, experts=experts))
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


def blocks() -> dict[str, str]:
    """Return the table of pairs of axes, and the refusals."""
    of_tests = verified()
    compared = {
        frozenset(pair)
        for text in of_tests
        for pair in itertools.combinations(sorted(kinds_of(text)), 2)
    }
    reasons: dict[str, list[str]] = {}
    rows = [f"| | {' | '.join(FORMS)} |", f"|---|{'---:|' * len(FORMS)}"]
    for axis, forms in FORMS.items():
        cells: list[str] = []
        for other, rights in FORMS.items():
            legal: set[frozenset[tuple[str, str]]] = set()
            for left, right in itertools.product(forms, () if other == axis else rights):
                reason = refusal(left, right)
                if reason is None:
                    legal.add(frozenset(kinds_of(left) | kinds_of(right)))
                else:
                    why = reason.partition(": ")[2].partition("; write")[0]
                    refused = reasons.setdefault(why, [])
                    text = f"`{Strategy.parse(f'{left},{right}')}`"
                    refused.extend([] if text in refused else [text])
            cells.append(f"{len(legal & compared)} / {len(legal)}" if legal else "")
        rows.append(f"| **{axis}** | {' | '.join(cells)} |")
    return {
        "pairs": "\n".join(rows),
        "refusals": "\n".join(f"- {', '.join(of)}: {reason}." for reason, of in reasons.items()),
    }


@pytest.mark.parametrize(
    ("page", "names"),
    [("docs/strategies.md", ("refusals",)), ("README.md", ("pairs",))],
)
def test_the_page_is_what_plans_and_tests_say(page: str, names: tuple[str, ...]) -> None:
    text, found = (ROOT / page).read_text(), blocks()
    for name in names:
        assert found[name] in text, f"{page} should hold\n{found[name]}"


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(blocks().values()) + "\n")
