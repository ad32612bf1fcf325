"""Plain training scripts print on any ranks what they print on one process, or say why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from plain_adapters import OnRanks, Plain
from plain_jobs import JOBS
from plain_scripts import SCRIPTS

import phalanx
from phalanx.errors import PhalanxError
from phalanx.launch.attach import as_mistake
from phalanx.launch.local import run_ranks
from phalanx.parallel import data, reduce
from phalanx.script.session import train_module
from phalanx.strategy import Strategy

REFUSED = {
    ("fsdp2", "gradient penalty"): "create_graph",
    ("fsdp2", "gradient penalty and batch norm"): "create_graph",
    ("fsdp2", "GAN"): "is frozen, which shards do not support",
    ("fsdp2", "unfrozen in the middle"): "is trained, which shards do not support",
    ("fsdp2", "hooked gradients"): "has a hook by register_hook",
    ("fsdp2", "sparse embeddings"): "is sparse, and fsdp reduces only dense gradients",
    ("fsdp2", "learned scale"): "'logit_scale' of shape () has no rows",
    ("fsdp2", "average by hand"): "functional_call",
    ("fsdp2", "averaged model"): "cannot be copied; average its weights by run.average",
    ("fsdp2", "L-BFGS"): "LBFGS does not support sharded parameters",
    ("fsdp2", "Adafactor"): "Adafactor does not support sharded parameters",
    ("fsdp2", "sharpness-aware"): "SAM does not support sharded parameters",
    ("fsdp2", "shared modules"): "are one parameter that belongs to two groups, which are",
    ("fsdp2", "noisy gradients"): "torch.distributed.tensor.distribute_tensor(whole, p.dev",
}
"""What a strategy refuses, and a word of its message."""


LIMITS = {"autocast": 5e-3}
"""Relative errors of what is computed in bfloat16; all else is in float64."""


def printed(strategy: str, names: Sequence[str]) -> dict[str, list[float] | str]:
    """Return what scripts print on this rank, or the message by which one is refused."""
    data.buckets = lambda sizes, bucket_bytes: reduce.buckets(sizes, 64)  # several a model
    found: dict[str, list[float] | str] = {}
    for name in names:
        on = OnRanks(strategy)
        try:
            SCRIPTS[name](on)
            found[name] = on.printed
        except (PhalanxError, RuntimeError) as error:
            said = as_mistake(error)  # as whoever ends the job reads torch's own
            if not isinstance(said, PhalanxError):
                raise
            found[name] = str(said)
    return found


def on_one_process(name: str) -> list[float]:
    on = Plain()
    SCRIPTS[name](on)
    return on.printed


QUICK = (
    "GAN",
    "diffusion",
    "accuracy of the step",
    "gradient penalty and batch norm",
    "branches with batch norm",
)


LONG = (pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("dp2", QUICK),
        pytest.param("dp2", tuple(SCRIPTS), marks=LONG),
        pytest.param("fsdp2:zero1", ("accuracy of the step",), marks=pytest.mark.slow),
        pytest.param("fsdp2:zero2", ("accuracy of the step",), marks=pytest.mark.slow),
        pytest.param("fsdp2", tuple(SCRIPTS), marks=LONG),
    ],
)
def test_plain_scripts_print_the_same(strategy: str, names: Sequence[str]) -> None:
    for found in run_ranks(printed, 2, strategy, names, threads=1):
        for name in names:
            if word := REFUSED.get((strategy, name)):
                assert word in found[name], name
            else:
                limit = LIMITS.get(name, 1e-8)
                assert found[name] == pytest.approx(on_one_process(name), rel=limit), name


def test_the_document_has_the_counts() -> None:
    text = (Path(__file__).parents[2] / "docs/your_model.md").read_text()
    num_refused = sum(strategy == "fsdp2" for strategy, _ in REFUSED)
    assert f"{len(SCRIPTS)} plain scripts in" in text
    assert f"| `dp2` | {len(SCRIPTS)} | none |" in text
    assert f"| `fsdp2` | {len(SCRIPTS) - num_refused} |" in text
    num_equal = len(JOBS) - len(NOT_BY_THE_TRAINER)
    assert f"| `pp2`, by the trainer | {num_equal} of {len(JOBS)} |" in text
    assert f"The other {len(SCRIPTS) - len(JOBS)} are loops of their own" in text


NOT_BY_THE_TRAINER = {
    "plateau": "a step of ReduceLROnPlateau needs metrics",
    "siamese": "after the module that receives it",
    "tasks in turns": "a forward of TwoHeads did not reach stage 1",
    "two tasks": "Heads has 0 lists of blocks",
    "weighted classes": "the count is a tensor of shape",
    "autoencoder with skip": "Autoencoder has 0 lists of blocks",
    "learned scale": "Scaled has 0 lists of blocks",
    "U-Net": "UNet has 0 lists of blocks",
    "ViT": "in no link of its chain",
    "detection": "the tensors of a batch have",
    "named outputs": "Named has 0 lists of blocks",
    "recurrent with masks": "Recurrent has 0 lists of blocks",
    "translation": "Translator has 2 lists of blocks",
    "bag of words": "the tensors of a batch have",
    "L-BFGS": "a step of LBFGS needs a closure",
    "Adafactor": "Adafactor keeps a row_var",
}
"""Jobs that the trainer, or a pipeline, refuses, and a word of its message."""


def losses(names: Sequence[str], folder: Path) -> dict[str, list[float]]:
    strategy = Strategy.parse("pp2")
    return {
        name: train_module(JOBS[name](), strategy, phalanx.Options(out=folder / str(number))).losses
        for number, name in enumerate(names)
    }


@pytest.mark.slow
def test_the_trainer_has_the_losses_of_the_plain_scripts(tmp_path: Path) -> None:
    names = [name for name in JOBS if name not in NOT_BY_THE_TRAINER]
    found = run_ranks(losses, 2, names, tmp_path, threads=1)[0]
    for name in names:
        on = Plain()
        SCRIPTS[name](on)
        limit = LIMITS.get(name, 1e-8)
        expected = on.losses[: len(found[name])]
        assert found[name] == pytest.approx(expected, rel=limit), name


@pytest.mark.parametrize("name", NOT_BY_THE_TRAINER)
def test_the_trainer_says_why_it_takes_no_job(name: str, tmp_path: Path) -> None:
    with pytest.raises(PhalanxError) as raised:
        JOBS[name]().train("pp2", phalanx.Options(out=tmp_path, threads=1))
    assert NOT_BY_THE_TRAINER[name] in str(raised.value)
