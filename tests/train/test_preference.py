"""Runs on pairs of preferences by DPO: the loss of a plain decoder, and the one of TRL."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model_folder import CHATML, SHAPE, model_folder
from phalanx.checkpoint import manifest
from phalanx.checkpoint.adapters import FOLDER
from phalanx.checkpoint.weights import load_decoder, open_checkpoint
from phalanx.config import BatchConfig, CorpusConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.config.schema import DpoConfig
from phalanx.data.token_file import OPENS, TRAINED
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.convert import open_hugging_face
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ExpertShape
from phalanx.train.job.resolve import Job, resolve, words_of
from phalanx.train.preference import FILE
from phalanx.train.report.summary import Summary
from phalanx.train.run import train_session
from phalanx.train.text import TextSession

LENGTH = 120


def pairs(number: int) -> list[dict[str, Any]]:
    """Return rows of which some have a field prompt, and some are whole conversations."""
    rows: list[dict[str, Any]] = []
    for n in range(number):
        question = {"role": "user", "content": f"{n}?"}
        good, bad = ({"role": "assistant", "content": text} for text in (f"{n}.", "x" * (n % 5)))
        if n % 2:
            rows.append({"chosen": [question, good], "rejected": [question, bad]})
        else:
            rows.append({"prompt": [question], "chosen": [good], "rejected": [bad]})
    return rows


def pair_run(folder: Path, number: int = 16, **settings: Any) -> TrainConfig:
    """Write a model folder and pairs into `folder`; return the settings of a run on them."""
    text = "".join(json.dumps(row) + "\n" for row in pairs(number))
    (folder / "pairs.jsonl").write_text(text)
    config = TrainConfig(
        model=str(model_folder(folder / "tiny")),
        data=str(folder / "pairs.jsonl"),
        precision="float64",
        device="cpu",
        threads=1,
        steps=4,
        eval_every=0,
        out=str(folder / "run"),
        corpus=CorpusConfig(seq_len=LENGTH, cache=str(folder / "cache"), validation=0.1),
        batch=BatchConfig(global_size=4, microbatch=1),
        optimizer=OptimizerConfig(lr=0.01),
        dpo=DpoConfig(beta=0.3),
    )
    return dataclasses.replace(config, **settings)


def trained(job: Job) -> tuple[list[float], list[dict[str, float]]]:
    """Train on this rank; return the losses of the steps and the evaluations."""
    summary = train_session(TextSession(job))
    if not isinstance(summary, Summary):
        return [], []
    return summary.losses, [{"loss": e.loss, **e.metrics} for e in summary.evaluations]


@torch.no_grad()
def log_probability(model: Decoder, marked: np.ndarray[Any, Any]) -> float:
    ids, is_trained = torch.from_numpy(marked & (OPENS - 1)), (marked[1:] & TRAINED) > 0
    logps = F.log_softmax(model(ids[None])[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    return float(logps[torch.from_numpy(is_trained)].sum())


def loss_of_the_second_step(job: Job) -> float:
    """Compute each conversation of the second global batch alone, by the plain decoder."""
    before = load_decoder(open_hugging_face(Path(job.config.model or "")), torch.float64, "cpu")
    after = load_decoder(open_checkpoint(manifest.folder_of(job.out, 1)), torch.float64, "cpu")
    raw, size = np.asarray(job.tokens.train.map()).astype(np.int64), job.batch.global_size
    loss_sum, num_pairs = 0.0, 0
    for row in job.order.samples(size + np.arange(size)):
        inside = raw[row * LENGTH : (row + 1) * LENGTH]
        pieces = np.split(inside, np.flatnonzero(inside & OPENS)[1:])
        for pair in zip(pieces[::2], pieces[1::2], strict=False):
            ratios = [log_probability(after, x) - log_probability(before, x) for x in pair]
            loss_sum += float(np.log1p(np.exp(-0.3 * (ratios[0] - ratios[1]))))
            num_pairs += 1
    return loss_sum / num_pairs


def test_the_loss_is_of_pairs_against_the_initial_weights(tmp_path: Path) -> None:
    job = resolve(pair_run(tmp_path, strategy="dp1", steps=2, save="every=1"))
    assert "16 pairs, of the layout preference" in words_of(job)[1]
    losses, (first, last) = run_ranks(trained, 1, job, threads=1)[0]
    assert losses == pytest.approx([np.log(2), loss_of_the_second_step(job)], rel=1e-9)
    assert losses[1] != pytest.approx(losses[0], rel=1e-4)
    assert first["rewards/margins"] == first["rewards/accuracies"] == 0
    assert last["rewards/margins"] == pytest.approx(
        last["rewards/chosen"] - last["rewards/rejected"]
    )
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["unit"] == "pairs"
    (tmp_path / "run" / FILE).write_bytes(b"")
    job = resolve(dataclasses.replace(job.config, resume=str(job.out), steps=3))
    with pytest.raises(CheckpointError, match=r"reference.npy, .* is missing"):
        run_ranks(trained, 1, job, threads=1)
    corpus = dataclasses.replace(job.config.corpus, document_mask=False)
    experts = ExpertShape(num_experts=2, top_k=1, ffn=8, renormalizes=True)
    shape = dataclasses.replace(SHAPE, experts=experts)
    moe = str(model_folder(tmp_path / "moe", shape=shape))
    for changes, words in (
        ({"strategy": "cp2"}, "the nearest is dp2"),
        ({"strategy": "dp2:ps"}, "may join later"),
        ({"corpus": corpus}, "leave it on"),
        (
            {"model": moe, "shape": ShapeConfig(experts="capacity=1.5")},
            "capacity is 1.5, but .* their reference drops no token; the nearest is none",
        ),
    ):
        config = dataclasses.replace(job.config, resume=None, nproc=None, **changes)
        with pytest.raises(ConfigError, match=words):
            resolve(dataclasses.replace(config, out=None, batch=BatchConfig(global_size=4)))


@pytest.mark.slow
def test_losses_are_those_of_one_process_under_any_strategy(tmp_path: Path) -> None:
    config = pair_run(tmp_path, 24, strategy="dp1", eval_every=2)
    expected = run_ranks(trained, 1, resolve(config), threads=1)[0]
    for strategy in (
        "dp2",
        "fsdp2",
        "fsdp2:zero1",
        "fsdp2:zero2",
        "tp2",
        "pp2",
        "dp2,recompute:full",
    ):
        out = str(tmp_path / strategy)
        job = resolve(dataclasses.replace(config, strategy=strategy, out=out))
        losses, evaluations = run_ranks(trained, 2, job, threads=1)[0]
        assert losses == pytest.approx(expected[0], rel=1e-10), strategy
        for each, of_one in zip(evaluations, expected[1], strict=True):
            assert each == pytest.approx(of_one, rel=1e-8, abs=1e-10), strategy


@pytest.mark.slow
def test_a_resume_reads_the_reference_of_the_run(tmp_path: Path) -> None:
    config = pair_run(tmp_path, strategy="dp2", save="every=2")
    expected = run_ranks(trained, 2, resolve(config), threads=1)[0][0]
    middle = str(manifest.folder_of(tmp_path / "run", 2))
    (tmp_path / "tiny").rename(tmp_path / "gone")
    for strategy in ("fsdp2", "pp2"):
        more = {"resume": middle, "out": str(tmp_path / strategy), "strategy": strategy}
        job = resolve(dataclasses.replace(config, **more))
        losses = run_ranks(trained, 2, job, threads=1)[0][0]
        assert losses == pytest.approx(expected[2:], rel=1e-10)
        assert (tmp_path / strategy / FILE).read_bytes() == (tmp_path / "run" / FILE).read_bytes()


def logs_of_trl(folder: Path, adapters: Path | None, **settings: Any) -> list[dict[str, float]]:
    """Return what TRL's DPOTrainer logs of each step on all pairs at once."""
    import transformers
    import trl
    from datasets import Dataset

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype="float32")
    if adapters is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tiny/tokenizer.json"),
        chat_template=CHATML,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for row in rows:  # TRL asks for one layout
        if "prompt" not in row:
            row["prompt"] = row["chosen"][:1]
            row["chosen"], row["rejected"] = row["chosen"][1:], row["rejected"][1:]
    args = trl.DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(rows),
        beta=0.3,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=4,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = trl.DPOTrainer(
        model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [None, "r=4,alpha=8"])
def test_losses_and_measures_are_those_of_trl(tmp_path: Path, lora: str | None) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    config = pair_run(tmp_path, strategy="dp1", precision="float32", lora=lora)
    corpus = dataclasses.replace(config.corpus, validation=0.0)
    steady = OptimizerConfig(lr=0.01, warmup_steps=0, min_lr_ratio=1.0)
    config = dataclasses.replace(config, corpus=corpus, optimizer=steady)
    num_rows = len(resolve(config).samples)
    batch = BatchConfig(global_size=num_rows, microbatch=1)
    config = dataclasses.replace(config, batch=batch)
    adapters = None
    if lora is not None:
        still = dataclasses.replace(steady, lr=1e-30)
        first = dataclasses.replace(config, optimizer=still, steps=1, out=str(tmp_path / "first"))
        run_ranks(trained, 1, resolve(first), threads=1)
        adapters = tmp_path / "first" / FOLDER
    logs = logs_of_trl(tmp_path, adapters)
    losses, _ = run_ranks(trained, 1, resolve(config), threads=1)[0]
    assert losses == pytest.approx([log["loss"] for log in logs], rel=2e-5)
