"""Measure how far trainers of transformers and TRL on two ranks are from one process.

    python benchmarks/hugging_face/trainers.py

runs 12 jobs by the plain class on one process, by its class of phalanx.hf under dp2, fsdp2 and tp2,
and by the plain class under torchrun with the same global batch. It prints, for each job, the
largest relative difference of any number that the trainers log from the number on one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

STRATEGIES = ("dp2", "fsdp2", "tp2")
RESULTS = Path(__file__).parent / "results" / "trainers.json"
NOT_COMPARED = ("runtime", "per_second", "preparation_time", "flos")
WORDS = 60


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Random token rows of different lengths; of classes, their label is a sum of tokens."""

    def __init__(self, num_rows: int, seed: int = 0, *, classes: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(5, 20, (num_rows,), generator=draw).tolist()
        self.rows = [torch.randint(3, WORDS, (length,), generator=draw) for length in lengths]
        self.classes = classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        row = {"input_ids": self.rows[at]}
        return row | ({"labels": int(self.rows[at].sum()) % self.classes} if self.classes else {})


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {"input_ids": pad(rows, batch_first=True)}
    batch["attention_mask"] = pad([torch.ones_like(row) for row in rows], batch_first=True)
    if "labels" in samples[0]:
        return batch | {"labels": torch.tensor([sample["labels"] for sample in samples])}
    labels = [torch.cat([torch.tensor([-100, -100]), row[2:]]) for row in rows]
    return batch | {"labels": pad(labels, batch_first=True, padding_value=-100)}


def decoder(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + 4, **sizes, num_attention_heads=4, num_key_value_heads=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def classifier() -> Any:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = decoder().config
    config.num_labels = 3
    return LlamaForSequenceClassification(config)


def mixture() -> Any:
    """Return a model with experts in float64, in which rounding changes no selection."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=WORDS + 4, **sizes, num_attention_heads=4, num_key_value_heads=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ).double()  # fmt: skip
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(WORDS)), "?"]
    split = Tokenizer(models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="?"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def said(row: torch.Tensor) -> str:
    return " ".join(f"w{int(token) - 3}" for token in row)


class Side:
    """One side of the comparison: which classes, and how the batch is written for them."""

    def __init__(self, strategy: str, out: Path) -> None:
        self.is_plain = strategy in ("plain", "torchrun")
        self.more = {} if self.is_plain or strategy == "one" else {"strategy": strategy}
        self.share = int(os.environ["WORLD_SIZE"]) if strategy == "torchrun" else 1
        self.out, self.strategy = out, strategy

    def kind(self, name: str) -> Any:
        import phalanx.hf

        if not self.is_plain:
            return getattr(phalanx.hf, name)
        return getattr(__import__("transformers" if name == "Trainer" else "trl"), name)

    def args(self, name: str, kind: str = "TrainingArguments", **own: Any) -> Any:
        made = getattr(__import__("transformers" if kind[0] == "T" else "trl"), kind)
        batch = own.pop("batch", 8) // self.share
        plain: dict[str, Any] = {
            "output_dir": str(self.out / name), "per_device_train_batch_size": batch,
            "per_device_eval_batch_size": batch, "gradient_accumulation_steps": 2,
            "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
            "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "bf16": False,
            "gradient_checkpointing": False, "optim": "adamw_torch",
        }  # fmt: skip
        return made(**{**plain, **own})

    def trainer(self, name: str, model: Any, args: Any, **own: Any) -> Any:
        if self.strategy[:2] == "tp" and args.gradient_checkpointing:  # tp recomputes itself
            args.gradient_checkpointing = args.activation_checkpointing = False
            own["strategy"] = f"{self.strategy},recompute:full"
        return self.kind(name)(model, args=args, **{**self.more, **own})


def plain_job(
    name: str, num_rows: int = 32, make: Callable[[], Any] = decoder, **own: Any
) -> Callable[[Side], Any]:
    def job(side: Side) -> Any:
        trainer = side.trainer(
            "Trainer", make(), side.args(name, **own), data_collator=padded,
            train_dataset=Texts(num_rows), eval_dataset=Texts(11, 1),
        )  # fmt: skip
        trainer.train()
        return trainer.state.log_history

    return job


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean())}


def evaluation(side: Side) -> Any:
    """Evaluate before and after training, and predict; a batch of evaluation has one row left."""
    trainer = side.trainer(
        "Trainer", classifier(), side.args("evaluation"), data_collator=padded,
        train_dataset=Texts(29, classes=3), eval_dataset=Texts(17, 1, classes=3),
        compute_metrics=accuracy,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    found = trainer.predict(Texts(9, 2, classes=3))
    logits = {f"logit {at}": float(x) for at, x in enumerate(found.predictions.ravel())}
    return [before, *trainer.state.log_history, trainer.evaluate(), found.metrics, logits]


def resume(side: Side, make: Callable[[], Any] = decoder) -> Any:
    """Stop after 3 of 4 steps of two passes, and resume in a new trainer."""

    def trainer(**own: Any) -> Any:
        args = side.args("resume", save_strategy="steps", save_steps=1, seed=1, **own)
        return side.trainer("Trainer", make(), args, data_collator=padded, train_dataset=Texts(27))

    trainer(max_steps=3).train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(side.out / "resume" / "checkpoint-3"))
    return resumed.state.log_history


def early_stopping(side: Side) -> Any:
    """Stop when the loss gets worse, load the best weights, and evaluate them."""
    from transformers import EarlyStoppingCallback

    args = side.args(
        "early", num_train_epochs=6, learning_rate=0.1, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer = side.trainer(
        "Trainer", decoder().double(), args, data_collator=padded, train_dataset=Texts(27),
        eval_dataset=Texts(11, 1), callbacks=[EarlyStoppingCallback(1)],
    )  # fmt: skip
    trainer.train()
    return [*trainer.state.log_history, trainer.evaluate()]


def sft(side: Side, name: str, rows: int, **own: Any) -> Any:
    from datasets import Dataset

    data = Dataset.from_list([{"text": said(row)} for row in Texts(rows).rows])
    more = {key: own.pop(key) for key in ("peft_config",) if key in own}
    trainer = side.trainer(
        "SFTTrainer", decoder(), side.args(name, "SFTConfig", **own), train_dataset=data,
        eval_dataset=data.select(range(11)), processing_class=tokenizer(), **more,
    )  # fmt: skip
    trainer.train()
    return [*trainer.state.log_history, trainer.evaluate()]


def packing(side: Side) -> Any:
    """Pack rows; the last batch of the second pass has one packed row."""
    return sft(side, "packing", 25, packing=True, max_length=32, batch=4)


def lora(side: Side) -> Any:
    from peft import LoraConfig

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return sft(side, "lora", 27, peft_config=config)


def dpo(side: Side) -> Any:
    from datasets import Dataset

    rows = [[said(part) for part in row.tensor_split(3)] for row in Texts(27).rows]
    data = Dataset.from_list(
        [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in rows]
    )
    trainer = side.trainer(
        "DPOTrainer", decoder(), side.args("dpo", "DPOConfig"), ref_model=decoder(1),
        train_dataset=data, eval_dataset=data.select(range(11)), processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return [*trainer.state.log_history, trainer.evaluate()]


def loss_function(side: Side) -> Any:
    """Give a loss with weights of the classes; the last batch has one row, for two ranks."""
    weight = torch.tensor([1.0, 2.0, 5.0])

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)

    trainer = side.trainer(
        "Trainer", classifier(), side.args("loss", gradient_accumulation_steps=1),
        data_collator=padded, train_dataset=Texts(25, classes=3), compute_loss_func=loss,
        eval_dataset=Texts(11, 1, classes=3),
    )  # fmt: skip
    trainer.train()
    return [*trainer.state.log_history, trainer.evaluate()]


JOBS: dict[str, Callable[[Side], Any]] = {
    "accumulation": plain_job("accumulation"),
    "uneven last batch": plain_job("uneven", 27, eval_strategy="epoch"),
    "label smoothing": plain_job("smoothing", 27, label_smoothing_factor=0.1),
    "gradient checkpointing": plain_job("checkpointing", 27, gradient_checkpointing=True),
    "evaluate, predict, metrics": evaluation,
    "save, resume": resume,
    "early stopping, best model": early_stopping,
    "loss function, one row left": loss_function,
    "SFT, padding": lambda side: sft(side, "padding", 27),
    "SFT, packing, one row left": packing,
    "SFT, LoRA": lora,
    "DPO, reference model": dpo,
}
OF_EXPERTS: dict[str, Callable[[Side], Any]] = {
    "experts": plain_job("experts", 27, mixture, eval_strategy="epoch"),
    "experts, checkpointing": plain_job("again", 27, mixture, gradient_checkpointing=True),
    "experts, resume": lambda side: resume(side, mixture),
}
"""Jobs for ep, which tp does not split."""


def run_jobs(strategy: str, out: Path, names: list[str]) -> None:
    """Run jobs on this process, and write what they log to `out`."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = (JOBS | OF_EXPERTS)[name](Side(strategy, out))
        except Exception as error:  # the class refuses the job, or fails
            found[name] = f"{type(error).__name__}: {error}"
        if os.environ.get("RANK", "0") == "0":
            (out / "log.json").write_text(json.dumps(found))


def difference(of_one: list[Any], of_ranks: list[Any] | str) -> float:
    """Return the largest relative difference of any number in two logs; infinite if none fits."""
    if isinstance(of_ranks, str) or len(of_one) != len(of_ranks):
        return math.inf
    worst = 0.0
    for one, other in zip(of_one, of_ranks, strict=True):
        for key, value in one.items():
            if isinstance(value, int | float) and not any(word in key for word in NOT_COMPARED):
                gap = abs(value - other.get(key, math.inf))
                worst = max(worst, gap / max(abs(value), 0.1))
    return worst


def command_of(strategy: str, out: Path, names: list[str]) -> list[str]:
    """Return the command that runs jobs by a strategy, "plain", "one" or "torchrun"."""
    words = [__file__, "--side", strategy, "--out", str(out), "--jobs", ",".join(names)]
    python = [sys.executable]
    if strategy == "torchrun":
        return [*python, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    if strategy in ("plain", "one"):
        return [*python, *words]
    return [
        *python,
        "-m",
        "phalanx",
        "run",
        words[0],
        "--nproc",
        "2",
        "--no-proof",
        "--",
        *words[1:],
    ]


def logs_of(strategy: str, names: list[str]) -> dict[str, Any]:
    """Run jobs in new processes, and return what they log."""
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            command_of(strategy, Path(out), names), capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((Path(out) / "log.json").read_text())
            if done.returncode == 0:
                return found
        raise SystemExit(f"{strategy}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", help="run the jobs here, by this strategy")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", default=",".join(JOBS), help="names, separated by commas")
    parser.add_argument("--strategies", default=",".join(("one", *STRATEGIES, "torchrun")))
    given = parser.parse_args()
    names = [name for name in JOBS | OF_EXPERTS if name in given.jobs]
    if given.side:
        run_jobs(given.side, given.out, names)
        return
    plain = logs_of("plain", names)
    table: dict[str, dict[str, float]] = {name: {} for name in names}
    for strategy in given.strategies.split(","):
        logs = logs_of(strategy, names)
        for name in names:
            table[name][strategy] = difference(plain[name], logs.get(name, "not run"))
    for name, row in table.items():
        print(f"{name:30}", *(f"{key} {value:.1e}  " for key, value in row.items()))
    if names == [*JOBS]:
        RESULTS.parent.mkdir(exist_ok=True)
        rows = {n: {s: f"{v:.1e}" for s, v in row.items()} for n, row in table.items()}
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "jobs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
