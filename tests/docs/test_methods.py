"""The tables of methods in README.md and docs/strategies.md: what runs today, and what proves it.

`python tests/docs/test_methods.py` prints both as the code has them.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.strategy import AXES, KINDS, Strategy
from phalanx.strategy.kinds import SERVED

ROOT = Path(__file__).parents[2]

METHODS = {
    "dp2": ("data parallel, gradients all-reduced in buckets (DDP)", "data"),
    "dp2:naive": ("data parallel, one all-reduce a parameter", "data"),
    "fsdp2:zero1": ("ZeRO 1: optimizer state sharded", "sharded"),
    "fsdp2:zero2": ("ZeRO 2: and gradients", "sharded"),
    "fsdp2": ("ZeRO 3, FSDP: and parameters", "sharded"),
    "dp2,fsdp2": ("HSDP: shards within a group, replicas across", "sharded"),
    "tp2": ("tensor parallel with sequence parallelism (Megatron-LM)", "tensor/one_d"),
    "tp2:megatron": ("tensor parallel, all-reduce form (Megatron-LM)", "tensor/megatron"),
    "tp4:2d": ("tensor parallel on a square, SUMMA (Optimus)", "tensor/two_d"),
    "tp8:2.5d/2": ("tensor parallel, squares in layers (Tesseract)", "tensor/two_and_a_half_d"),
    "tp8:3d": ("tensor parallel on a cube", "tensor/three_d"),
    "recompute:full": ("activations of each block recomputed", "recompute"),
    "recompute:every/2": ("of each segment of 2 blocks", "recompute"),
    "recompute:sqrt": ("of segments of sqrt(L) blocks (Chen et al.)", "recompute"),
    "recompute:selective": ("all but matrix products and attention", "recompute"),
    "pp2:naive": ("model parallel: stages that wait for each other", "pipeline/schedule"),
    "pp2:gpipe": ("pipeline, all forwards first (GPipe)", "pipeline/schedule"),
    "pp2": ("pipeline, one forward one backward (1F1B)", "pipeline/schedule"),
    "pp2:interleaved/2": ("pipeline, several stages a rank", "pipeline/schedule"),
    "pp2:zb/1": ("pipeline, zero bubble", "pipeline/schedule"),
    "pp2:zbv": ("pipeline, zero bubble in V form", "pipeline/schedule"),
    "pp2:dualpipev": ("pipeline, DualPipe in V form", "pipeline/schedule"),
    "cp2": ("context parallel, ring attention", "context/ring"),
    "cp2:ulysses": ("context parallel, all-to-all over heads (Ulysses)", "context/ulysses"),
    "ep2": ("expert parallel, tokens travel to their experts (GShard)", "expert_split"),
}
"""Strategy -> what a practitioner calls it, and its file below src/phalanx/parallel."""

SPLITS = {
    "dp": "the samples",
    "fsdp": "the samples, and the storage of each layer",
    "tp": "every layer",
    "recompute": "nothing: backward recomputes activations (activation checkpointing)",
    "pp": "the model, by layers",
    "cp": "each sample, by positions",
    "ep": "the samples, and the experts of each layer",
}
"""Axis -> what it splits, in the order of the table."""

COMMANDS = {
    "pp": "phalanx show {kind}",
}
"""Axis -> what shows a method best, where it is not `phalanx verify`."""


def table() -> str:
    rows = ["| name in the field | run this |", "|---|---|"]
    for text, (method, _) in METHODS.items():
        axis, kind = sorted(kinds_of(text))[-1]
        run = COMMANDS.get(axis, f"phalanx verify {text}").format(kind=kind)
        rows.append(f"| {method} | `{run}` |")
    return "\n".join(rows)


def overview() -> str:
    rows = ["| an axis splits | strategies |", "|---|---|"]
    for axis, what in SPLITS.items():
        texts = [text for text in METHODS if {name for name, _ in kinds_of(text)} == {axis}]
        rows.append(f"| {what} | {', '.join(f'`{text}`' for text in texts)} |")
    return "\n".join(rows)


def kinds_of(text: str) -> set[tuple[str, str]]:
    strategy = Strategy.parse(text)
    found = {(name, axis.kind) for name, axis in strategy.axes() if axis.degree > 1}
    return found | {("recompute", strategy.recompute.kind)} - {("recompute", "none")}


@pytest.mark.parametrize(
    ("page", "shown"), [("README.md", overview), ("docs/strategies.md", table)]
)
def test_a_page_shows_the_methods(page: str, shown: Callable[[], str]) -> None:
    assert shown() in (ROOT / page).read_text(), f"{page} should hold\n{shown()}"


def test_the_table_has_every_kind_that_is_built_and_its_file() -> None:
    built = {(name, kind) for name, kinds in KINDS.items() for kind in kinds if kinds[kind].about}
    built -= {("dp", kind) for kind in SERVED}  # on a page of their own
    assert set[tuple[str, str]]().union(*map(kinds_of, METHODS)) == built
    page = (ROOT / "docs/strategies.md").read_text()
    for _, file in METHODS.values():
        assert (ROOT / f"src/phalanx/parallel/{file}.py").is_file()
        folder, slash, _ = file.partition("/")
        assert f"`{folder}{slash or '.py'}" in page


def test_every_built_kind_is_proved_against_one_process() -> None:
    files = ("test_parity.py", "test_compositions.py")
    source = "".join((ROOT / "tests/verify" / file).read_text() for file in files)
    proved: set[tuple[str, str]] = set()
    names = "|".join((*AXES, "recompute"))
    for text in re.findall(f'"((?:{names})' + r'[0-9:][^" {]*[^", {}])"', source):
        proved |= kinds_of(text)
    built = {kind for text in METHODS for kind in kinds_of(text)}
    assert built <= proved, f"tests/verify has no case of {built - proved}"


if __name__ == "__main__":
    sys.stdout.write(f"{overview()}\n\n{table()}\n")
