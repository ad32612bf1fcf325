"""transformers' Llama, GPT-2 and BERT under each layout of tp, against one process in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hub import small
from marks import by_hand
from phalanx.errors import ConfigError, StrategyError
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.parallel.tensor import transformers_models
from phalanx.parallel.tensor.apply import layout_of
from phalanx.parallel.tensor.roles import bind_roles
from phalanx.strategy import Strategy
from phalanx.verify.harness import small_pieces, verify_on_ranks
from phalanx.verify.record import Case
from phalanx.verify.verdict import Verdict

transformers = pytest.importorskip("transformers")

NUM_ROWS, LENGTH = 7, 9  # no degree divides them
SIZES = {
    "vocab_size": 67,  # odd
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
IDS = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}


def llama(
    attn_implementation: str = "sdpa", is_tied: bool = False, has_own_norms: bool = False
) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES,
        **IDS,
        num_key_value_heads=4,
        tie_word_embeddings=is_tied,
        attn_implementation=attn_implementation,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        # LlamaRMSNorm computes in float32 whatever it is given, so no two orders of a sum agree to
        # 1e-10; torch's own is the same but for that.
        if type(module).__name__ == "LlamaRMSNorm" and not has_own_norms:
            model.set_submodule(name, nn.RMSNorm(32, module.variance_epsilon))
    return model


def gpt2(attn_implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=67,
        n_embd=32,
        n_layer=2,
        n_head=8,
        n_positions=16,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **IDS,
        attn_implementation=attn_implementation,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str, attn_implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(
        **SIZES, **dropout, num_labels=3, attn_implementation=attn_implementation
    )
    return getattr(transformers, kind)(config)


class Tagger(nn.Module):
    """A user's own module around BertModel, which gives it the last hidden state whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = bert("BertModel")
        self.tags = nn.Linear(32, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        output = self.encoder(ids, attention_mask=mask)
        return self.tags(output.last_hidden_state + output.pooler_output[:, None])


@dataclasses.dataclass(frozen=True)
class Objective:
    """Sums over tokens, rows, or both; `inputs` are the arguments of the model."""

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    tokens: str | None = "logits"
    rows: str | None = None

    def loss_sum(self, model: nn.Module, microbatch: dict[str, Tensor], step: int) -> Tensor:
        output = model(**{name: microbatch[name] for name in self.inputs})
        loss = torch.zeros((), dtype=torch.float64)
        if self.tokens is not None:
            logits, labels = output[self.tokens].flatten(0, 1), microbatch["labels"].flatten()
            loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        if self.rows is not None:
            logits = output[self.rows]
            labels = microbatch["row_labels"] % logits.shape[1]
            loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        return loss

    def num_valid(self, microbatch: dict[str, Tensor]) -> int:
        num_valid = int((microbatch["labels"] != -100).sum()) if self.tokens else 0
        return num_valid + (len(microbatch["row_labels"]) if self.rows else 0)


class Tags:
    def loss_sum(self, model: nn.Module, microbatch: dict[str, Tensor], step: int) -> Tensor:
        logits = model(microbatch["input_ids"], microbatch["attention_mask"])
        labels = microbatch["labels"].flatten() % 5
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")

    def num_valid(self, microbatch: dict[str, Tensor]) -> int:
        return microbatch["labels"].numel()


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    shape = (NUM_ROWS, LENGTH)
    places = torch.arange(LENGTH)[None]
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        lengths = torch.randint(3, LENGTH + 1, (NUM_ROWS, 1), generator=draw)
        labels = torch.randint(0, 67, shape, generator=draw)
        found.append(
            {
                "input_ids": torch.randint(0, 67, shape, generator=draw),  # padding's 0 among them
                "attention_mask": (places < lengths).long(),
                "token_type_ids": (places > lengths // 2).long(),
                "position_ids": torch.where(places < lengths, places, places - lengths),
                "labels": labels.masked_fill(places >= lengths, -100),
                "row_labels": torch.randint(0, 3, (NUM_ROWS,), generator=draw),
            }
        )
    return found


def make_cases() -> dict[str, Case]:
    typed = Objective(("input_ids", "attention_mask", "token_type_ids"), None, "logits")
    both = dataclasses.replace(typed, tokens="prediction_logits", rows="seq_relationship_logits")
    positioned = Objective(("input_ids", "position_ids"))
    models: dict[str, tuple[Callable[[], nn.Module], Objective | Tags]] = {
        "llama": (llama, Objective(("input_ids",))),
        "llama, tied": (functools.partial(llama, is_tied=True), Objective()),
        "llama, several sequences in a row": (llama, positioned),
        "gpt2": (gpt2, Objective()),
        "bert, masked": (functools.partial(bert, "BertForMaskedLM"), Objective()),
        "bert, both heads": (functools.partial(bert, "BertForPreTraining", "eager"), both),
        "bert, classes": (functools.partial(bert, "BertForSequenceClassification"), typed),
        "a module around bert": (Tagger, Tags()),
    }
    cases = {name: Case(*model, batches(), 2) for name, model in models.items()}
    cases["a module around bert"] = dataclasses.replace(
        cases["a module around bert"], roles={"tags": "full"}
    )
    own_norms = functools.partial(llama, has_own_norms=True)
    cases["llama, its own norms"] = Case(own_norms, Objective(), batches(), 2, "float32")
    return cases


def run_split(text: str, names: list[str]) -> list[Verdict]:
    cases = make_cases()
    return verify_on_ranks({name: cases[name] for name in names}, Strategy.parse(text))


FAMILIES = ["llama", "gpt2", "bert, both heads"]
TWICE = ["llama, tied", "bert, masked", "bert, classes", "llama, its own norms"]
"""What another strategy has too, or another model of the library."""


# One start of the ranks for all models: they read transformers, which takes them seconds. FSDP2
# wants one mesh a process, so there it is one model.
@pytest.mark.parametrize(
    "text, names",
    [
        ("tp2", [name for name in make_cases() if name not in TWICE]),
        by_hand("tp2", TWICE),
        by_hand("tp4:2d", FAMILIES),
        by_hand("tp4:2d", [name for name in make_cases() if name not in FAMILIES]),
        by_hand("tp8:2.5d/2", FAMILIES),
        by_hand("tp8:3d", FAMILIES),
        by_hand("dp2,tp2", ["gpt2"]),
        by_hand("dp2,tp2", ["bert, both heads"]),
        by_hand("fsdp2,tp2", ["gpt2"]),
        by_hand("fsdp2,tp2", ["bert, both heads"]),
        by_hand("tp2,recompute:full", ["gpt2", "bert, masked"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0] if len(value) == 1 else "",
)
def test_it_computes_what_one_process_computes(text: str, names: list[str]) -> None:
    strategy = Strategy.parse(text)
    cases = make_cases()
    for verdict in run_ranks(run_split, strategy.num_ranks, text, names)[0]:
        name, entries = verdict.case, verdict.entries
        case = cases[name]
        assert verdict.is_equal, f"{name}: {verdict}"
        share = len(range(0, NUM_ROWS, strategy.data_ranks))
        rows = [len(cut) for cut in torch.arange(share).tensor_split(case.accumulation)]
        model = case.build().to(getattr(torch, case.dtype))
        plan = Plan(strategy, model, roles=case.roles)
        with small_pieces():
            predicted = plan.traffic([(num_rows, LENGTH) for num_rows in rows])
        if strategy.fsdp.degree == 1:
            sent = {e for e in entries if e.phase not in ("count", "metrics")}
            assert sent == set(predicted), name


MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "all": {"attention_mask": torch.ones(2, 5)},
    "right": {"attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])},
    "left": {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])},
    "sequences": {"position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])},
    "sequences, with a cache": {"position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])},
    "positions": {"position_ids": torch.tensor([[3, 4, 5, 6, 7]])},
    "both": {
        "position_ids": torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]),
        "attention_mask": torch.ones(2, 5),
    },
    "made": {"attention_mask": torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)},
}


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": functools.partial(bert, "BertForMaskedLM"),
    **{
        family: functools.partial(small, family, sliding_window=3)
        for family in ("mistral", "qwen2", "gemma3_text", "phi3")
    },
}


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "sdpa") for family in MAKERS),
        ("bert", "eager"),
        *(by_hand(family, "eager") for family in MAKERS if family != "bert"),
    ],
)
def test_masks_and_positions_are_those_it_makes_itself(
    family: str, attention: str, subtests: pytest.Subtests
) -> None:
    """Bit for bit, without a split."""
    model: Any = MAKERS[family](attn_implementation=attention)
    ids = torch.arange(10).view(2, 5)
    masks = {name: dict(arguments) for name, arguments in MASKS.items()}
    if attention == "eager":
        allowed = masks["made"]["attention_mask"]
        masks["made"] = {"attention_mask": torch.zeros(allowed.shape).masked_fill(~allowed, -1e30)}

    def logits(name: str) -> Tensor:
        model.config.use_cache = "cache" in name
        return model(input_ids=ids, **masks[name]).logits

    expected = {name: logits(name) for name in masks}
    transformers_models.bind(model, layout_of(Strategy.parse("tp2")), lambda _: True)
    for name in masks:
        with subtests.test(name):
            assert torch.equal(logits(name), expected[name])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"logits_to_keep": 1}, "logits_to_keep is 1, .* expected 0"),
        ({"use_cache": True}, "use_cache is on"),
        ({"output_hidden_states": True}, "output_hidden_states is on"),
        ({"token_type_ids": torch.zeros(2, 5)}, "token_type_ids cannot be given"),
        ({"attention_mask": torch.ones(2, 5, 5)}, r"of shape \(2, 5, 5\); expected \[rows, pos"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 32)}, "expected input_ids"),
    ],
)
def test_arguments_that_a_part_cannot_follow_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    model = gpt2()
    transformers_models.bind(model, layout_of(Strategy.parse("tp2")), lambda _: True)
    with pytest.raises(ConfigError, match=words):
        model(**{"input_ids": torch.zeros(2, 5, dtype=torch.long), **arguments})


def test_dropout_is_refused_with_the_names_of_its_settings() -> None:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=67, **IDS)
    )
    with pytest.raises(
        StrategyError,
        match=r"'transformer.drop.p' = 0.1, .* and 1 more.*config: .*embd_pdrop.*attn_pdrop",
    ):
        bind_roles(model)
    model: Any = llama()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(StrategyError, match=r"self_attn.attention_dropout' = 0.5"):
        bind_roles(model)


@pytest.mark.parametrize(
    "setting, value, words",
    [
        ("_attn_implementation", "flex_attention", "expected one of sdpa, eager"),
        ("chunk_size_feed_forward", 2, "chunk_size_feed_forward is 2"),
        ("add_cross_attention", True, "add_cross_attention is on and has no"),
    ],
)
def test_settings_that_have_no_layout_are_refused(setting: str, value: object, words: str) -> None:
    model = bert("BertModel")
    setattr(model.config, setting, value)
    with pytest.raises(StrategyError, match=words):
        bind_roles(model)


@pytest.mark.parametrize(
    "text, words",
    [
        ("tp3", r"multiple of 3.*; the nearest is tp2"),
        ("fsdp2,tp4:2d", "'transformer.h.0.attn.c_attn.weight' contains 3 maps.*use dp2"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Plan(Strategy.parse(text), gpt2())
