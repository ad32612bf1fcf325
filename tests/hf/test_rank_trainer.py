"""The trainers of phalanx.hf: on ranks the numbers of transformers' and TRL's on one process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "hugging_face"))

MOST = 1e-5
"""Largest relative difference of a logged number, of float32."""


def test_nothing_is_imported_before_a_name_is_used() -> None:
    check = (
        "import sys, phalanx.hf; dir(phalanx.hf)\n"
        "assert not {'torch', 'transformers', 'accelerate', 'trl'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_private_names_of_transformers() -> None:
    pytest.importorskip("accelerate")
    import inspect

    import transformers
    from transformers import Trainer

    from phalanx.hf import RankTrainer
    from phalanx.hf.rank_trainer import SUPPORTED

    assert transformers.__version__.rsplit(".", 1)[0] in SUPPORTED
    own = {name for name in vars(RankTrainer) if hasattr(Trainer, name) and name[:2] != "__"}
    for name in (
        "_get_num_items_in_batch",
        "_has_mixed_mesh_grads",
        "_load_best_model",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_save",
        "_save_optimizer_and_scheduler",
        "_save_rng_state",
    ):
        assert name in own
        theirs = inspect.signature(getattr(Trainer, name)).parameters
        assert [*theirs] == [*inspect.signature(getattr(RankTrainer, name)).parameters], name
    loop = inspect.getsource(Trainer)
    for call in (
        "self.gather_function(losses.repeat(batch_size))",
        "self.accelerator.prepare(self.model, self.optimizer)",
        "self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)",
        "self.accelerator.backward(loss, **kwargs)",
        "self.accelerator.gradient_state._set_sync_gradients(do_sync_step)",
    ):
        assert call in loop


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp2", "fsdp2", "tp2", "ep2"])
def test_jobs_log_the_numbers_of_one_process(strategy: str) -> None:
    pytest.importorskip("trl")
    trainers = pytest.importorskip("trainers")
    names = [*trainers.OF_EXPERTS] if strategy == "ep2" else [*trainers.JOBS]
    plain = trainers.logs_of("plain", names)
    ranks = trainers.logs_of(strategy, names)
    gaps = {name: trainers.difference(plain[name], ranks[name]) for name in names}
    assert {name: gap for name, gap in gaps.items() if gap > MOST} == {}


def warnings_of_a_trainer(folder: Path, is_balanced: bool) -> list[str]:
    from transformers import TrainingArguments

    import trainers
    from phalanx.hf import Trainer

    model = trainers.mixture()
    model.config.output_router_logits = is_balanced
    with warnings.catch_warnings(record=True) as found:
        Trainer(model, TrainingArguments(str(folder), use_cpu=True, report_to=[]), strategy="dp2")
    return [str(each.message) for each in found if "balancing loss" in str(each.message)]


@pytest.mark.slow
def test_a_balancing_loss_of_own_rows_is_named(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from phalanx.launch.local import run_ranks

    first, second = run_ranks(warnings_of_a_trainer, 2, tmp_path, True)
    assert len(first) == 1 and not second
    assert run_ranks(warnings_of_a_trainer, 2, tmp_path, False) == [[], []]
