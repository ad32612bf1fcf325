"""Plain training scripts print on any ranks what they print on one process, or say why not."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from plain_adapters import OnRanks, Plain
from plain_scripts import SCRIPTS

from phalanx.errors import PhalanxError
from phalanx.launch.local import run_ranks
from phalanx.parallel import data, reduce

REFUSED = {
    ("fsdp2", "gradient penalty"): "create_graph",
    ("fsdp2", "gradient penalty and batch norm"): "create_graph",
    ("fsdp2", "GAN"): "is frozen, which shards do not follow",
    ("fsdp2", "unfrozen in the middle"): "is trained, which shards do not follow",
    ("fsdp2", "hooked gradients"): "has a hook by register_hook",
    ("fsdp2", "sparse embeddings"): "is sparse, and fsdp reduces dense ones",
    ("fsdp2", "learned scale"): "'logit_scale' of shape () has no rows",
    ("fsdp2", "average by hand"): "functional_call",
    ("fsdp2", "averaged model"): "cannot be copied; average its weights by run.average",
    ("fsdp2", "L-BFGS"): "LBFGS takes no shards",
    ("fsdp2", "Adafactor"): "Adafactor takes no shards",
}
"""What a strategy refuses, and a word of its message."""


def printed(strategy: str, names: Sequence[str]) -> dict[str, list[float] | str]:
    """Return what scripts print on this rank, or the message by which one is refused."""
    data.buckets = functools.partial(reduce.buckets, bucket_bytes=64)  # several a model
    found: dict[str, list[float] | str] = {}
    for name in names:
        on = OnRanks(strategy)
        try:
            SCRIPTS[name](on)
            found[name] = on.printed
        except PhalanxError as error:
            found[name] = str(error)
    return found


def on_one_process(name: str) -> list[float]:
    on = Plain()
    SCRIPTS[name](on)
    return on.printed


QUICK = (
    "GAN",
    "accuracy of the step",
    "gradient penalty and batch norm",
    "branches with batch norm",
)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("dp2", QUICK),
        pytest.param("dp2", tuple(SCRIPTS), marks=pytest.mark.slow),
        pytest.param("fsdp2:zero1", ("accuracy of the step",), marks=pytest.mark.slow),
        pytest.param("fsdp2:zero2", ("accuracy of the step",), marks=pytest.mark.slow),
        pytest.param("fsdp2", tuple(SCRIPTS), marks=pytest.mark.slow),
    ],
)
def test_plain_scripts_print_the_same(strategy: str, names: Sequence[str]) -> None:
    for found in run_ranks(printed, 2, strategy, names, threads=1):
        for name in names:
            if word := REFUSED.get((strategy, name)):
                assert word in found[name], name
            else:
                assert found[name] == pytest.approx(on_one_process(name), rel=1e-8), name
