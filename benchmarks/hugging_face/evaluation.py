"""lm-evaluation-harness against `phalanx serve`, beside its own `hf` backend, on one random model.

Four tasks with local data, as a user writes them: multiple choice, perplexity (rolling
log-likelihood) and generation over `local-completions`, and generation over
`local-chat-completions`. `--batch` is the number of prompts that a request has.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_DOCS: Final = 40
LENGTH: Final = 256
"""Positions of the model; all requests have fewer tokens."""

TASKS: Final = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}\n",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "chrf"}],
    },
}
TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS: Final = (
    "the square of seven is forty nine and a river carries stones to sea while early birds "
    "measure winter light over quiet roofs of an old town near mountains"
).split()


def documents() -> list[dict[str, Any]]:
    """Return made-up questions with four choices, and a text each."""
    draw = torch.Generator().manual_seed(0)

    def phrase(num: int) -> str:
        picks = torch.randint(len(WORDS), (num,), generator=draw).tolist()
        return " ".join(WORDS[pick] for pick in picks)

    return [
        {
            "question": f"{phrase(8)}?",
            "choices": [phrase(1 + number % 3) for number in range(4)],
            "answer": int(torch.randint(4, (), generator=draw)),
            "text": f"{phrase(20)}.",
        }
        for _ in range(NUM_DOCS)
    ]


def write(folder: Path) -> Path:
    """Write a small random Llama with a tokenizer and a chat template, data and tasks."""
    docs = documents()
    (folder / "docs.jsonl").write_text("".join(f"{json.dumps(doc)}\n" for doc in docs))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "test_split": "test"}
        source["dataset_kwargs"] = {"data_files": {"test": str(folder / "docs.jsonl")}}
        # YAML contains JSON.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([doc["text"] for doc in docs], trainer)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 13,  # rows that no token uses, as published models
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(shape)
    with torch.no_grad():  # probable enough to be counted, and never the most probable
        model.lm_head.weight[-13:] = 0.0
    model.save_pretrained(folder / "model")
    theirs.save_pretrained(folder / "model")
    return folder / "model"


@contextmanager
def serving(model: Path, *words: str) -> Generator[str]:
    """Serve a model in another process while the block runs; yield the address."""
    command = [sys.executable, "-u", "-m", "phalanx", "serve", str(model), "--port=0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = None
        while address is None:
            line = process.stdout.readline()
            assert line, "the server has ended"
            address = re.search(r"http://[\d.:]+", line)
        yield address[0]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def scores(kind: str, arguments: dict[str, Any], names: list[str], folder: Path, chat: bool) -> Any:
    """Return metric by task and name, and the answers to each request of each document."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    done: Any = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=names,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=chat,
        device="cpu",
    )
    metrics = {
        f"{task} {name.removesuffix(',none')}": value
        for task, values in done["results"].items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    }
    samples = {name: [each["resps"] for each in done["samples"][name]] for name in names}
    return metrics, samples


def compare(folder: Path, batch: int = 8) -> list[dict[str, Any]]:
    """Return a row for each metric: with lm-eval's own backend, over the server, and how near."""
    model = write(folder)
    rows: list[dict[str, Any]] = []
    with serving(model, "--precision=float32", "--threads=1", "--served-model-name=small") as at:
        for kind, path, names in (
            ("local-completions", "completions", list(TASKS)),
            ("local-chat-completions", "chat/completions", ["local_generation"]),
        ):
            is_chat = "chat" in kind
            ours = {"model": "small", "tokenizer": str(model), "base_url": f"{at}/v1/{path}"}
            ours |= {"max_length": LENGTH, "batch_size": 1 if is_chat else batch}
            # lm-eval's windows over an API are two tokens shorter than its own backend's.
            theirs = {"pretrained": str(model), "dtype": "float32", "max_length": LENGTH - 2}
            found, our_samples = scores(kind, ours, names, folder, is_chat)
            expected, their_samples = scores("hf", theirs, names, folder, is_chat)
            for metric, value in expected.items():
                task = metric.split()[0]
                pairs = list(zip(_flat(our_samples[task]), _flat(their_samples[task]), strict=True))
                gaps = [abs(a - b) for a, b in pairs if isinstance(a, float)]
                rows.append(
                    {
                        "over": kind,
                        "metric": metric,
                        "hf": value,
                        "served": found[metric],
                        "requests": len(gaps) or len(pairs),
                        "equal": sum(a == b for a, b in pairs if not isinstance(a, float)),
                        "largest_gap": max(gaps, default=0.0),
                    }
                )
    return rows


def _flat(values: Any) -> list[Any]:
    """Return the texts, booleans and numbers of nested answers; also numbers in texts."""
    if isinstance(values, list | tuple):
        return [each for value in values for each in _flat(value)]
    if isinstance(values, str) and re.fullmatch(r"-?\d+\.\d+(e-?\d+)?|True|False", values):
        return [values == "True" if values[-1] == "e" else float(values)]
    return [values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), options.batch)
    print("| over | metric | hf | served | requests | largest gap of a log-likelihood |")
    print("|---|---|---:|---:|---:|---:|")
    for row in rows:
        cells = (f"{row[name]:.6f}" for name in ("hf", "served"))
        print(
            f"| {row['over']} | {row['metric']} | {' | '.join(cells)} | {row['requests']} "
            f"| {row['largest_gap']:.1e} |"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
