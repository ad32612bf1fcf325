"""A run on chats, from a Hugging Face folder to the folder that is served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_folder import CHATML, model_folder
from phalanx.checkpoint import manifest
from phalanx.checkpoint.weights import load_decoder
from phalanx.config import BatchConfig, CorpusConfig, TrainConfig
from phalanx.data.token_file import OPENS, TRAINED
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.hugging_face.convert import convert, open_hugging_face
from phalanx.infer.chat import Chat
from phalanx.infer.protocol import ChatBody
from phalanx.infer.served import open_served
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import Job, resolve, words_of
from phalanx.train.report.summary import Summary
from phalanx.train.run import train_session
from phalanx.train.text import TextSession

QUESTIONS = [f"What is the square of {n}?" for n in range(24)]


def chat_run(folder: Path, **settings: Any) -> TrainConfig:
    """Write a model folder and chats into `folder`; return the settings of a run on them."""
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": n}]}
        for question in QUESTIONS
        for n in (question[22:-1],)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(
        model=str(model_folder(folder / "tiny")),
        data=str(folder / "chats.jsonl"),
        precision="float64",
        device="cpu",
        threads=1,
        steps=4,
        eval_every=0,
        out=str(folder / "run"),
        corpus=CorpusConfig(seq_len=120, cache=str(folder / "cache"), validation=0.1),
        batch=BatchConfig(global_size=4, microbatch=1),
    )
    return dataclasses.replace(config, **settings)


def trained(job: Job) -> list[float]:
    """Train on this rank; return the losses of the steps, on the first rank."""
    summary = train_session(TextSession(job))
    assert isinstance(summary, Summary)
    return summary.losses


@torch.no_grad()
def loss_of_the_first_step(job: Job) -> float:
    """Compute each conversation of the first global batch alone, by the plain decoder."""
    model = load_decoder(open_hugging_face(Path(job.config.model or "")), torch.float64, "cpu")
    raw, length = np.asarray(job.tokens.train.map()).astype(np.int64), job.config.corpus.seq_len
    loss_sum, num_valid = 0.0, 0
    for row in job.order.samples(np.arange(job.batch.global_size)):
        inside = raw[row * length : (row + 1) * length]
        for piece in np.split(inside, np.flatnonzero(inside & OPENS)[1:]):
            ids, is_trained = torch.from_numpy(piece & (OPENS - 1)), (piece[1:] & TRAINED) > 0
            logits = model(ids[None])[0, :-1][torch.from_numpy(is_trained)]
            labels = ids[1:][torch.from_numpy(is_trained)]
            loss_sum += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            num_valid += len(labels)
    return loss_sum / num_valid


@pytest.mark.slow
def test_the_loss_is_of_the_answers_alone_under_any_strategy(tmp_path: Path) -> None:
    config = chat_run(tmp_path, strategy="dp2")
    job = resolve(config)
    expected = run_ranks(trained, 2, job, threads=1)[0]
    assert expected[0] == pytest.approx(loss_of_the_first_step(job), rel=1e-9)
    assert '"bits_per_byte":' not in (tmp_path / "run/metrics.jsonl").read_text()
    for strategy in ("fsdp2", "tp2", "pp2"):
        out = str(tmp_path / strategy)
        job = resolve(dataclasses.replace(config, strategy=strategy, out=out))
        assert run_ranks(trained, 2, job, threads=1)[0] == pytest.approx(expected, rel=1e-9)
    part = resolve(dataclasses.replace(config, save="every=2", out=str(tmp_path / "part")))
    run_ranks(trained, 2, part, threads=1)
    middle = str(manifest.folder_of(part.out, 2))
    resumed: dict[str, Any] = {"resume": middle, "out": str(tmp_path / "rest"), "strategy": "fsdp2"}
    (tmp_path / "tiny").rename(tmp_path / "gone")  # the run has all that it needs
    job = resolve(dataclasses.replace(config, **resumed))
    assert run_ranks(trained, 2, job, threads=1)[0] == pytest.approx(expected[2:], rel=1e-9)
    corpus = dataclasses.replace(config.corpus, seq_len=100)
    with pytest.raises(CheckpointError, match=r"corpus.seq_len is not the one that this run"):
        resolve(
            dataclasses.replace(
                config, **resumed | {"out": str(tmp_path / "new"), "corpus": corpus}
            )
        )


def test_the_folder_of_the_run_chats(tmp_path: Path) -> None:
    config = chat_run(tmp_path, strategy="dp1", steps=1)
    job = resolve(config)
    assert "24 conversations, of the layout messages" in words_of(job)[1]
    run_ranks(trained, 1, job, threads=1)
    run, origin = open_served(tmp_path / "run"), open_served(tmp_path / "tiny")
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    assert run.chat_templates == {"default": CHATML} == origin.chat_templates
    assert Chat(run).encode(body) == Chat(origin).encode(body)
    assert (run.begin_ids, run.end_ids) == (None, (258,))
    convert(tmp_path / "run", tmp_path / "exported")
    exported = open_served(tmp_path / "exported")
    assert Chat(exported).encode(body) == Chat(origin).encode(body)
    assert (exported.begin_ids, exported.end_ids) == (None, (258,))


def test_chats_without_a_template_or_a_tokenizer_are_refused(tmp_path: Path) -> None:
    config = chat_run(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    given = resolve(dataclasses.replace(config, chat_template=str(template)))
    assert given.tokens.chat is not None and given.tokens.chat["end_ids"] == [258, 256]
    model_folder(tmp_path / "base", None)
    for words, changes in {
        "base has no chat template; give one by": {"model": str(tmp_path / "base")},
        "model demo has no tokenizer": {"model": "demo"},
        "which is not a file": {"chat_template": "none.jinja"},
    }.items():
        with pytest.raises(ConfigError, match=words):
            resolve(dataclasses.replace(config, **changes))
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(DataError, match=r"notes.txt is text, but other files"):
        resolve(dataclasses.replace(config, data=str(tmp_path / "*.[jt]*")))
    text = dataclasses.replace(config, data=str(tmp_path / "notes.txt"))
    with pytest.raises(ConfigError, match="the data are text, not chats"):
        resolve(dataclasses.replace(text, chat_template=str(template)))
