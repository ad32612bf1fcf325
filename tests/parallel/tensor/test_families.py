"""Families of transformers' models under tp, against one process in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hub import NUM_WORDS, small
from marks import by_hand
from phalanx.comm.ledger import Entry
from phalanx.errors import ConfigError, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.parallel.tensor import transformers_models
from phalanx.parallel.tensor.apply import layout_of
from phalanx.strategy import Strategy
from phalanx.verify.harness import small_pieces, verify_on_ranks
from phalanx.verify.record import Case
from phalanx.verify.verdict import Verdict

transformers = pytest.importorskip("transformers")

NUM_ROWS, LENGTH = 7, 9  # no degree divides them; windows are shorter
NUM_PATCHES = 9


@dataclasses.dataclass(frozen=True)
class Objective:
    """Cross-entropy over what a model says of tokens or rows; `inputs` are its arguments."""

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")

    def loss_sum(self, model: nn.Module, microbatch: dict, step: int) -> Tensor:
        logits = model(**{name: microbatch[name] for name in self.inputs}).logits
        labels = microbatch["labels"] if logits.ndim == 3 else microbatch["row_labels"]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    def num_valid(self, microbatch: dict) -> int:
        return len(microbatch["row_labels"])


def batches() -> list[dict[str, Tensor]]:
    """Return one batch; test_transformers.py takes two steps."""
    draw = torch.Generator().manual_seed(1)
    shape = (NUM_ROWS, LENGTH)
    places = torch.arange(LENGTH)[None]
    lengths = torch.randint(3, LENGTH + 1, (NUM_ROWS, 1), generator=draw)
    is_padding = places >= lengths
    ids = torch.randint(1, NUM_WORDS, shape, generator=draw).masked_fill(is_padding, 0)
    labels = torch.randint(0, NUM_WORDS, shape, generator=draw)
    return [
        {
            "input_ids": ids,
            "attention_mask": (~is_padding).long(),
            "position_ids": torch.where(is_padding, places - lengths, places),
            "pixel_values": torch.randn(NUM_ROWS, 3, 12, 12, generator=draw, dtype=torch.float64),
            "labels": labels.masked_fill(is_padding, -100),
            "row_labels": torch.randint(0, 3, (NUM_ROWS,), generator=draw),
        }
    ]


class Around(nn.Module):
    """A user's own module, which gets the last hidden state of a base model whole."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.base = small(family, "")
        self.classes = nn.Linear(32, 3)

    def forward(self, **inputs: Tensor) -> Any:
        output = self.base(**inputs)
        rows = output.last_hidden_state.mean(1)
        pooled = getattr(output, "pooler_output", None)
        return SimpleNamespace(logits=self.classes(rows if pooled is None else rows + pooled))


FAMILIES = ("mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3", "vit")
CLASSES = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text", "phi3")
IMAGES = Objective(("pixel_values",))


def make_cases() -> dict[str, Case]:
    images = functools.partial(small, "vit", "ImageClassification")
    models: dict[str, tuple[Callable[[], nn.Module], Objective]] = {
        **{name: (functools.partial(small, name), Objective()) for name in FAMILIES},
        "vit": (images, IMAGES),
        "vit, eager": (functools.partial(images, attn_implementation="eager"), IMAGES),
        "mistral, several sequences in a row": (
            functools.partial(small, "mistral"),
            Objective(("input_ids", "position_ids")),
        ),
        "qwen3, tied": (
            functools.partial(small, "qwen3", tie_word_embeddings=True),
            Objective(("input_ids",)),
        ),
        **{
            f"{name}, classes": (
                functools.partial(small, name, "SequenceClassification"),
                Objective(),
            )
            for name in CLASSES
        },
    }
    cases = {name: Case(*model, batches(), 2) for name, model in models.items()}
    for name, objective in (("gemma3_text", Objective()), ("vit", IMAGES)):
        build = functools.partial(Around, name)
        roles = {"classes": "full"}
        cases[f"a module around {name}"] = Case(build, objective, batches(), 2, roles=roles)
    for name in ("olmo2", "gemma2"):
        build = functools.partial(small, name, has_own_norms=True)
        cases[f"{name}, its own norms"] = Case(build, Objective(), batches(), 2, "float32")
    return cases


def verdicts(jobs: dict[str, Sequence[str]]) -> list[tuple[str, Verdict]]:
    found: list[tuple[str, Verdict]] = []
    for text, names in jobs.items():
        cases = make_cases()
        strategy = Strategy.parse(text)
        for verdict in verify_on_ranks({name: cases[name] for name in names}, strategy):
            found.append((text, verdict))
    return found


OTHERS = [name for name in make_cases() if name not in FAMILIES]
SOME = ["mistral, several sequences in a row", "olmo2, classes", "a module around vit"]


# One start of the ranks for all: they read transformers, which takes them seconds.
@pytest.mark.parametrize(
    "jobs",
    [
        {"tp2": ["gemma3_text", "phi3", *SOME]},
        by_hand({"tp2": [name for name in FAMILIES if name not in ("gemma3_text", "phi3")]}),
        by_hand({"tp4:2d": ["olmo2", "phi3", "vit"]}),
        by_hand({"tp2": OTHERS, "tp2:megatron": list(make_cases())}),
        by_hand({"dp2": FAMILIES, "fsdp2": FAMILIES}),
        by_hand({"tp4:2d": list(make_cases()), "fsdp2,tp2": [n for n in FAMILIES if n != "phi3"]}),
        by_hand({"dp2,tp2": FAMILIES, "tp4": FAMILIES}),
        by_hand({"tp8:2.5d/2": FAMILIES, "tp8:3d": FAMILIES}),
    ],
    ids=" ".join,
)
def test_it_computes_what_one_process_computes(
    jobs: dict[str, Sequence[str]], subtests: pytest.Subtests
) -> None:
    num_ranks = Strategy.parse(next(iter(jobs))).num_ranks
    cases = make_cases()
    for text, verdict in run_ranks(verdicts, num_ranks, jobs, threads=1)[0]:
        with subtests.test(f"{text} {verdict.case}"):
            assert verdict.is_equal, str(verdict)
            strategy, case = Strategy.parse(text), cases[verdict.case]
            if strategy.tp.degree > 1 and strategy.fsdp.degree == 1:
                sent = {e for e in verdict.entries if e.phase not in ("count", "metrics")}
                with small_pieces():
                    assert sent == set(predicted(strategy, case))


def predicted(strategy: Strategy, case: Case) -> list[Entry]:
    share = len(range(0, NUM_ROWS, strategy.data_ranks))
    rows = [len(cut) for cut in torch.arange(share).tensor_split(case.accumulation)]
    length = NUM_PATCHES + 1 if case.objective is IMAGES else LENGTH
    model = case.build().to(getattr(torch, case.dtype))
    return Plan(strategy, model, roles=case.roles).traffic([(number, length) for number in rows])


def test_masks_by_type_of_layer_hold_as_they_are() -> None:
    model = small("gemma2", num_hidden_layers=2).double()
    ids = torch.arange(10).view(2, 5)
    causal = torch.ones(1, 1, 5, 5).tril().log().clamp(min=-1e30).double()
    masks = {"sliding_attention": causal, "full_attention": torch.zeros_like(causal)}
    expected = model(input_ids=ids, attention_mask=masks).logits
    transformers_models.bind(model, layout_of(Strategy.parse("tp2")), lambda _: True)
    assert torch.equal(model(input_ids=ids, attention_mask=masks).logits, expected)


def test_images_are_expected_where_a_model_takes_them() -> None:
    model = small("vit", "ImageClassification")
    transformers_models.bind(model, layout_of(Strategy.parse("tp2")), lambda _: True)
    with pytest.raises(ConfigError, match="expected pixel_values"):
        model()


@pytest.mark.parametrize(
    "text, family, task, options, words",
    [
        (
            "tp4",
            "phi3",
            "CausalLM",
            {"num_key_value_heads": 2},
            "'model.layers.0.self_attn.qkv_proj' has 2 heads, which is not a multiple of 4; "
            "the nearest is tp2",
        ),
        ("fsdp2,tp2", "phi3", "CausalLM", {}, "qkv_proj.weight' contains 3 maps, .* use dp2"),
        (
            "tp2",
            "gemma3_text",
            "CausalLM",
            {"use_bidirectional_attention": True},
            "Gemma3TextModel 'model': use_bidirectional_attention is on; expected off",
        ),
        (
            "tp2",
            "mistral",
            "CausalLM",
            {"is_causal": False},
            "MistralModel 'model': is_causal is off; expected on",
        ),
        (
            "tp2",
            "qwen3",
            "CausalLM",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention; expected full_attention and sliding_attention",
        ),
        (
            "tp2",
            "mistral",
            "QuestionAnswering",
            {},
            "parameter 'qa_outputs.weight' is in no module .* see docs/strategies.md",
        ),
        (
            "tp2",
            "gpt_neox",
            "CausalLM",
            {},
            "roles of the modules of GPTNeoXForCausalLM are not known; .* see docs/strategies.md",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    text: str, family: str, task: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        Plan(Strategy.parse(text), small(family, task, **options))
