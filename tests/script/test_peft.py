"""Models of PEFT train as by plain PEFT on one process, in own loops and in the trainer.

`pytest -m slow -n 0 -s tests/script/test_peft.py` prints the largest differences.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.strategy import Strategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is no dependency: pip install peft"),
    # transformers' own, at every gradient checkpointing and at every look for it.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LENGTH, VOCABULARY, LIMIT = 10, 48, 1e-10
IDS = torch.randint(VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(1))
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rank-stabilised": {"use_rslora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
    "ia3": {},
    "several": {},
    "bfloat16 base": {},
}


def plain(kind: str = "lora") -> Any:
    """Return a Llama in float64, whose norms and loss do not round to float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, nn.RMSNorm(16, module.variance_epsilon))
    return model.to(torch.bfloat16 if kind == "bfloat16 base" else torch.float64)


def adapted(kind: str) -> Any:
    import peft

    base = plain(kind)
    if kind == "ia3":
        names = ["k_proj", "v_proj", "down_proj"]
        config: Any = peft.IA3Config(target_modules=names, feedforward_modules=["down_proj"])
    else:
        names = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False, **KINDS[kind])
    model: Any = peft.get_peft_model(base, config)
    if kind == "several":
        second = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
        model.add_adapter("second", second)
    return model if kind == "bfloat16 base" else model.double()


class NextId:
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        logits = model(input_ids=microbatch[0]).logits[:, :-1].flatten(0, 1)
        labels = microbatch[0][:, 1:].flatten()
        return nn.functional.cross_entropy(logits.double(), labels, reduction="sum")

    def num_valid(self, microbatch: Any) -> int:
        return microbatch[0].shape[0] * (LENGTH - 1)


class Trained(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    bases: dict[str, int]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(strategy: str, kind: str, folder: Path, stop: int | None = None) -> Trained:
    """Train an epoch, from the checkpoint in `folder` if there is one; save after `stop` steps."""
    run = phalanx.init(strategy)
    model = adapted(kind)
    loader: Any = DataLoader(TensorDataset(IDS), batch_size=6)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    run.resume(folder)
    objective, made = NextId(), Trained([], [], {})
    for batch in loader:
        total = objective.loss_sum(model, batch, 0)
        count = objective.num_valid(batch)
        made.losses.append(run.backward(sum_of_rows=total, count=count).item())
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        made.gradients.append({name: whole(grad) for name, grad in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
        if run.steps_done == (stop or 4):
            run.save(folder)
            break
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert not any(optimizer.state.get(p) or p.grad is not None for p in frozen)
    made.bases.update({str(p.dtype): p.dtype.itemsize for p in frozen})
    return made


def alone(kind: str) -> tuple[Trained, dict[str, Tensor]]:
    """Train by plain PEFT on one process; return the merged weights too."""
    model, objective, made = adapted(kind), NextId(), Trained([], [], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for ids in IDS.split(6):
        loss = objective.loss_sum(model, (ids,), 0) / objective.num_valid((ids,))
        loss.backward()
        made.losses.append(loss.item())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        made.gradients.append(gradients)
        optimizer.step()
        optimizer.zero_grad()
    return made, merged(model)


def merged(model: Any) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.merge_and_unload().state_dict().items()}


def loaded(folder: Path, kind: str) -> Any:
    import peft

    model: Any = peft.PeftModel.from_pretrained(plain(kind), folder / "adapter")
    return model if kind == "bfloat16 base" else model.double()


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n].double() - theirs[n].double()).abs().max()) for n in ours)


SPLITS = {
    "lora": [
        *("dp2", "dp3", "fsdp2", "fsdp3", "dp2,fsdp2", "tp2", "dp2,tp2"),
        *("fsdp2,tp2", "fsdp2,recompute:full", "fsdp2:zero1", "tp2:megatron"),
    ],
    "rank-stabilised": ["fsdp2", "tp2"],
    "modules_to_save": ["dp2", "fsdp3", "tp2"],
    "dora": ["dp2", "fsdp2"],
    "ia3": ["dp2", "fsdp3"],
    "several": ["fsdp2", "tp2"],
}


@pytest.mark.parametrize(
    ("kind", "strategy"), [(kind, text) for kind, texts in SPLITS.items() for text in texts]
)
def test_losses_gradients_and_merged_weights_are_those_of_plain_peft(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    expected, weights = alone(kind)
    for made in run_ranks(
        trained, Strategy.parse(strategy).num_ranks, strategy, kind, tmp_path, threads=1
    ):
        of_loss = max(abs(a - b) for a, b in zip(made.losses, expected.losses, strict=True))
        of_gradients = max(map(error, made.gradients, expected.gradients))
        of_weights = error(merged(loaded(tmp_path, kind)), weights)
        print(f"{kind} {strategy}: {of_loss:.1e} {of_gradients:.1e} {of_weights:.1e}")  # noqa: T201
        assert max(of_loss, of_gradients, of_weights) <= LIMIT


def job(kind: str) -> phalanx.Trainer:
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    return phalanx.Trainer(
        functools.partial(adapted, kind), NextId(), TensorDataset(IDS), optimizer=make,
        batch_size=6, accumulation=2, shuffle=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("lora", text) for text in ("dp2", "fsdp2", "pp2", "pp2,dp2", "pp2,fsdp2", "tp2")),
        ("dora", "pp2"),
        ("ia3", "pp2,dp2"),
        ("modules_to_save", "pp2"),
    ],
)
def test_the_trainer_too(kind: str, strategy: str, tmp_path: Path) -> None:
    verdict = job(kind).verify(strategy)
    print(f"{kind} {strategy}: {verdict}")  # noqa: T201
    assert verdict.is_equal, str(verdict)
    job(kind).train(strategy, phalanx.Options(out=tmp_path / "run"))
    assert error(merged(loaded(tmp_path / "run", kind)), alone(kind)[1]) <= LIMIT


def test_a_run_resumes_under_another_split_with_the_adapters_alone(tmp_path: Path) -> None:
    from safetensors import safe_open

    expected, _ = alone("lora")
    run_ranks(trained, 2, "fsdp2", "lora", tmp_path, 2, threads=1)
    files = [*tmp_path.glob("checkpoints/*/*.safetensors")]
    names = {name for file in files for name in safe_open(file, "pt").keys()}
    assert all("lora_" in name for name in names if not name.startswith("generators."))
    for strategy, num_ranks in (("dp3", 3), ("dp1", 1), ("tp2", 2)):
        for made in run_ranks(trained, num_ranks, strategy, "lora", tmp_path, 9, threads=1):
            assert made.losses == pytest.approx(expected.losses[2:], rel=1e-12)


@pytest.mark.parametrize("strategy", ["dp2", "fsdp2", "tp2"])
def test_a_base_in_bfloat16_keeps_its_type(strategy: str, tmp_path: Path) -> None:
    expected, _ = alone("bfloat16 base")
    for made in run_ranks(trained, 2, strategy, "bfloat16 base", tmp_path, threads=1):
        assert made.bases == {"torch.bfloat16": 2}
        assert made.losses == pytest.approx(expected.losses, rel=3e-2)


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        ("dora", "tp2", "tp splits only LoRA beside column and row maps, without DoRA"),
        ("ia3", "tp2", "with the parameter 'ia3_l.default'"),
        ("lora", "tp4:2d", "is a map of an adapter, which 2d cannot split; use tp4"),
    ],
)
def test_adapters_that_tp_cannot_split_are_refused(
    kind: str, strategy: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(StrategyError, match=words):
        run_ranks(trained, Strategy.parse(strategy).num_ranks, strategy, kind, tmp_path, threads=1)
