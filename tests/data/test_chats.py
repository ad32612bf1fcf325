"""The tokens of chats that are trained on: those that transformers marks, and TRL trains."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, conversations, merging_tokenizer, template_of
from transformers import PreTrainedTokenizerFast

from phalanx.config import CorpusConfig
from phalanx.data import chats
from phalanx.data.chats import ChatFormat, prepare_chats
from phalanx.data.samples import Samples
from phalanx.data.token_file import OPENS, TRAINED
from phalanx.data.tokens import HeldOut, TokenFiles, hold_out, prepare
from phalanx.errors import DataError
from phalanx.models.loss import IGNORE

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
BATCH = ("input_ids", "labels", "attention_mask")
Trained = tuple[tuple[int, ...], tuple[bool, ...]]


def prepared(
    folder: Path, rows: list[dict[str, Any]], template: str, seq_len: int = 1024, **settings: Any
) -> TokenFiles:
    """Write rows and a tokenizer into `folder`, and prepare them."""
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    merging_tokenizer().save(str(folder / "tokenizer.json"))
    layout = settings.pop("layout", "messages")
    more = {"validation": 0.0, "seq_len": seq_len, "cache": str(folder / "cache"), **settings}
    return prepare_chats(
        str(folder / "chats.jsonl"),
        CorpusConfig(**more),
        layout,
        ChatFormat(template, NAMES),
        model_vocab_size=700,
        tokenizer=str(folder / "tokenizer.json"),
    )


def trained_in(files: TokenFiles) -> Counter[Trained]:
    """Return the conversations of a training file: their ids, and which are trained on."""
    raw = np.asarray(files.train.map())
    pieces = np.split(raw, np.flatnonzero(raw & OPENS)[1:])
    return Counter(
        (tuple((piece & (OPENS - 1)).tolist()), tuple(((piece & TRAINED) > 0).tolist()))
        for piece in pieces
        if np.any(piece & (OPENS - 1))  # else padding, of token 0
    )


def trained_by_transformers(rows: list[dict[str, Any]], template: str) -> Counter[Trained]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging_tokenizer(), **NAMES)
    masks = Counter[Trained]()
    for row in rows:
        made: Any = tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        masks[tuple(made["input_ids"]), tuple(map(bool, made["assistant_masks"]))] += 1
    return masks


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3"])
def test_the_tokens_that_trl_trains_are_trained(tmp_path: Path, family: str) -> None:
    rows = conversations(30, has_tools=family == "chatml")
    expected = trained_by_transformers(rows, template_of(family, has_marks=True))
    marked = prepared(tmp_path / "marked", rows, template_of(family, has_marks=True))
    assert trained_in(marked) == expected
    num_trained = sum(sum(mask) * count for (_, mask), count in expected.items())
    assert marked.chat is not None and marked.chat["num_trained"] == num_trained
    plain = template_of(family, has_marks=False)
    if family == "phi3":  # prints the end of the text after a last turn alone
        with pytest.raises(DataError, match=r"chats.jsonl:\d+: the chat template renders turn \d"):
            prepared(tmp_path / "plain", rows, plain)
        return
    assert trained_in(prepared(tmp_path / "plain", rows, plain)) == expected


def test_rows_of_whole_conversations_do_not_see_each_other(tmp_path: Path) -> None:
    rows = conversations(30, has_tools=False)
    template = template_of("llama3", has_marks=False)
    alone = trained_in(prepared(tmp_path / "alone", rows, template))
    longest = max(len(ids) for ids, _ in alone)
    files = prepared(tmp_path / "packed", rows, template, seq_len=longest)
    assert trained_in(files) == alone and files.chat is not None and files.chat["num_cut"] == 0
    samples, found = Samples(files.train, longest), Counter[Trained]()
    batch = samples.batch(np.arange(len(samples)), np.arange(len(samples)))
    assert batch.documents_BT is not None
    for tokens_T, labels_T, documents_T, positions_T in zip(
        batch.tokens_BT, batch.labels_BT, batch.documents_BT, batch.positions_BT, strict=True
    ):
        for document in documents_T.unique():
            inside = documents_T == document
            ids, labels = tokens_T[inside], labels_T[inside]
            assert positions_T[inside].tolist() == list(range(len(ids)))
            is_label = labels != IGNORE
            assert not is_label[-1]  # else it is of the next conversation
            assert labels[:-1][is_label[:-1]].tolist() == ids[1:][is_label[:-1]].tolist()
            if ids.any():
                found[tuple(ids.tolist()), (False, *is_label[:-1].tolist())] += 1
    assert found == alone
    assert files.chat["num_tokens"] > 0.8 * (files.train.num_tokens - 1)


def test_a_long_conversation_is_cut_and_counted(tmp_path: Path) -> None:
    row = {"prompt": "q", "completion": "a" * 100}
    late = {"prompt": "x" * 400, "completion": "y"}
    template = template_of("chatml", has_marks=False)
    files = prepared(tmp_path, [row, late], template, 24, layout="prompt-completion")
    assert files.chat is not None and files.train.num_tokens == 25
    assert (files.chat["num_cut"], files.chat["num_left_out"]) == (2, 1)
    im_end = merging_tokenizer().token_to_id("<|im_end|>")
    assert (files.chat["num_endless"], files.chat["end_ids"]) == (0, [im_end])


def test_whole_conversations_are_held_out(tmp_path: Path) -> None:
    rows = conversations(30, has_tools=False)
    template = template_of("gemma", has_marks=False)
    files = prepared(tmp_path, rows, template, validation=0.2)
    held_out = TokenFiles(files.folder, files.validation, files.train, 0, 0, "", "")
    parts = trained_in(files), trained_in(held_out)
    assert 3 <= parts[1].total() <= 9
    assert parts[0] + parts[1] == trained_in(prepared(tmp_path / "all", rows, template))


def test_chats_that_change_while_they_are_encoded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(*args: Any, **options: Any) -> HeldOut:
        with (tmp_path / "chats.jsonl").open("a") as file:
            file.write(json.dumps(rows[0]) + "\n")
        return hold_out(*args, **options)

    rows = conversations(3, has_tools=False)
    monkeypatch.setattr(chats, "hold_out", grow)
    with pytest.raises(DataError, match="the corpus changed while it was read"):
        prepared(tmp_path, rows, template_of("gemma", has_marks=False))


def test_a_mixture_refuses_chats_by_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "b.jsonl").write_text(json.dumps(conversations(1, has_tools=False)[0]))
    corpus = CorpusConfig(cache=str(tmp_path / "cache"))
    data = f"1*{tmp_path}/a.txt,1*{tmp_path}/b.jsonl"
    with pytest.raises(DataError, match=r"b.jsonl has rows of chats, which a mixture cannot"):
        prepare(data, corpus, model_vocab_size=300)


def test_a_row_of_another_layout_is_refused_by_its_line(tmp_path: Path) -> None:
    rows = [*conversations(3, has_tools=False), {"instruction": "q", "output": "a"}]
    with pytest.raises(DataError, match=r"chats.jsonl:4: .* is of the layout alpaca"):
        prepared(tmp_path, rows, template_of("zephyr", has_marks=False))


@pytest.mark.slow  # imports trl
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3"])
def test_sfttrainer_trains_the_same_tokens(tmp_path: Path, family: str) -> None:
    rows = conversations(30, has_tools=False)
    template = template_of(family, has_marks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of trl, peft and accelerate, at import and at use
        from datasets import Dataset
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl import SFTConfig, SFTTrainer

        sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
        heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging_tokenizer(), **NAMES)
        tokenizer.chat_template, tokenizer.pad_token = template, "</s>"
        trainer = SFTTrainer(
            LlamaForCausalLM(LlamaConfig(vocab_size=700, num_key_value_heads=1, **sizes, **heads)),
            SFTConfig(
                str(tmp_path / "trl"),
                assistant_only_loss=True,
                max_length=None,
                report_to="none",
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    expected = Counter[Trained]()
    for ids, labels, mask in zip(*(batch[n] for n in BATCH), strict=True):
        inside = mask.bool()
        trained = (labels[inside] != IGNORE).tolist()
        expected[tuple(ids[inside].tolist()), tuple(trained)] += 1
    assert trained_in(prepared(tmp_path, rows, template)) == expected
