"""`phalanx bench cut`: each layer is timed, and the strategy that it prints can be run."""

import json

import pytest

from phalanx.cli.main import main
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.strategy import Strategy

SMALL = [
    *("--shape.num-layers=3", "--shape.hidden=16", "--shape.ffn=24", "--shape.num-heads=2"),
    *("--shape.num-kv-heads=2", "--shape.head-dim=8", "--shape.vocab-size=64", "--seq-len=8"),
    *("--shape.dropout=0.1", "--rounds=1", "--microbatch=1"),
]


def test_the_layers_are_timed_and_the_cut_is_one_that_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "cut", "pp2:zbv", "--json", *SMALL]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert len(found["forward_s"]) == len(found["backward_s"]) == 5
    assert min(found["forward_s"] + found["backward_s"]) > 0
    for text in found["cuts"].values():
        assert sum(Strategy.parse(text).cut) == 5
        assert len(Strategy.parse(text).cut) == 4
    assert shown[-1] == f"phalanx train --strategy {found['cuts']['times']}"
    assert any("norm and head" in line for line in shown)
    plan_decoder(Strategy.parse(found["cuts"]["times"]), ModelShape(**found["shape"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dp2"], "strategy is 'dp2'; expected one with pp"),
        (["pp2,cut:2+3"], "expected one with pp, such as pp2, and without a cut"),
        (["pp2,tp2"], "can have only pp, dp and fsdp; the nearest is pp2"),
        (["pp8", *SMALL], "makes 8 stages, but the model is a chain of 5 layers"),
    ],
)
def test_what_cannot_be_cut_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cut", *words]) == 2
    assert message in capsys.readouterr().err
