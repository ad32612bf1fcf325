"""Adapters of the decoder beside plain PEFT on one process: steps, saves, folders, bytes."""

import dataclasses
import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from phalanx.checkpoint import manifest
from phalanx.checkpoint.weights import load_decoder
from phalanx.comm.comm import Ranks
from phalanx.config import BatchConfig, OptimizerConfig, ShapeConfig, TrainConfig
from phalanx.data.samples import Batch
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.convert import convert, open_weights, read_adapters
from phalanx.hugging_face.names import table
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.initial import fill_initial
from phalanx.models.loss import IGNORE
from phalanx.models.shape import Lora, ModelShape
from phalanx.parallel.plan import plan_decoder, shard_of
from phalanx.strategy import Strategy
from phalanx.train.objective import NextToken
from phalanx.train.optimizer import build_optimizer, learning_rate
from phalanx.train.run import train
from phalanx.train.step import Step
from phalanx.verify.batches import split
from phalanx.verify.harness import verify_case
from phalanx.verify.record import Case, CaseRun
from phalanx.verify.snapshot import full_tensors, gradients_of
from small_run import losses, small_run, tokenizer_of

SHAPE = ModelShape(
    vocab_size=67,
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn=48,
    max_seq_len=64,
    lora=Lora.parse("r=3,alpha=5,targets=q_proj+v_proj+o_proj+up_proj+down_proj", "swiglu"),
)
OPTIMIZER = OptimizerConfig(lr=0.01, warmup_steps=1)
STRATEGIES = (
    *("dp2", "fsdp2:zero1", "fsdp2:zero2", "fsdp2", "tp2", "tp2:megatron", "cp2", "cp2:ulysses"),
    *("pp2", "pp2:zbv", "dp2,recompute:full", "fsdp2,recompute:selective", "dp3"),
    *("dp2,fsdp2", "fsdp2,tp2", "pp2,tp2"),
)
LIMIT = 1e-10
WITH_EXPERTS = ("mixtral", "qwen2_moe")


def decoder(shape: ModelShape = SHAPE) -> Decoder:
    """Return a decoder in float64 whose adapters are not zero."""
    model = Decoder(shape).to(torch.float64)
    model.initialize(3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batches(num_steps: int = 3, num_rows: int = 12, length: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    made: list[Batch] = []
    for step in range(num_steps):
        tokens = torch.randint(SHAPE.vocab_size, (num_rows, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.arange(length) < torch.arange(num_rows)[:, None]] = IGNORE
        made.append(
            Batch(
                tokens_BT=tokens[:, :-1].contiguous(),
                labels_BT=labels,
                positions_BT=torch.arange(length).repeat(num_rows, 1),
                documents_BT=torch.zeros(num_rows, length, dtype=torch.int64),
                rows_B=torch.arange(num_rows) + step * num_rows,
            )
        )
    return made


def case() -> Case:
    return Case(decoder, NextToken(0, 0.0), batches(), accumulation=2, optimizer=OPTIMIZER)


Steps = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]
"""Loss of each step, gradients of each step, and the weights at the end."""


def steps_of(text: str) -> tuple[Steps, str, list[Any]]:
    """Take the steps under a strategy; return also the verdict beside one process, and bytes."""
    strategy = Strategy.parse(text)
    comm, losses, gradients = Ranks(strategy), list[float](), list[dict[str, Tensor]]()
    with CaseRun(case(), strategy, comm) as run:
        for batch in batches():
            own = split(batch, comm.coord("data"), comm.size("data"), 2)
            norms = run.step.compute_gradients(own)
            gradients.append(full_tensors(gradients_of(run.step.model), comm))
            losses.append(run.step.apply_gradients(*norms).loss)
        weights = {name: p.detach() for name, p in run.step.model.named_parameters()}
        steps = losses, gradients, full_tensors(weights, comm)
    verdict = verify_case(case(), strategy, comm)
    return steps, str(verdict.first), [each for each in verdict.sent if each.is_exact]


def exact_norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def exact_rotation(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = (position_ids[..., None] * frequency).repeat(1, 1, 2)
    return angle.cos().to(x), angle.sin().to(x)


def peft_model(shape: ModelShape, model: Decoder) -> tuple[Any, dict[str, str]]:
    """Return PEFT over transformers' Llama with our weights, and our names of its parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        from peft import LoraConfig, get_peft_model

        from hugging_face.small_models import llama

        lora = shape.lora
        assert lora is not None
        theirs: Any = llama(vocab_size=shape.vocab_size, rms_norm_eps=shape.norm_eps).double()
        # transformers computes norms and rotary angles in float32, whatever the weights are.
        for norm in (each for each in theirs.modules() if type(each).__name__ == "LlamaRMSNorm"):
            norm.forward = functools.partial(exact_norm, norm)
        theirs.model.rotary_emb.forward = exact_rotation
        names = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        settings = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": names}
        adapted = get_peft_model(theirs, LoraConfig(**settings), autocast_adapter_dtype=False)
    named = dict(adapted.named_parameters())
    ours, of = dict(model.named_parameters()), dict[str, str]()
    for link in table(dataclasses.replace(shape, lora=None), "llama"):
        module, _, kind = f"base_model.model.{link.theirs}".rpartition(".")
        (name,) = link.ours
        for base in (f"{module}.{kind}", f"{module}.base_layer.{kind}"):
            of |= {base: name} if base in named else {}
        for letter in "AB":
            if (each := f"{module}.lora_{letter}.default.weight") in named:
                of[each] = f"{name.removesuffix('.weight')}.lora_{letter}.weight"
    assert set(of) == set(named)
    with torch.no_grad():
        for theirs_name, name in of.items():
            named[theirs_name].copy_(ours[name])
    return adapted, of


def steps_of_peft() -> Steps:
    """Take the same steps by PEFT, transformers and torch alone; return them by our names."""
    adapted, names = peft_model(SHAPE, decoder())
    trained = {names[n]: p for n, p in adapted.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=OPTIMIZER.weight_decay
    )
    losses, gradients, data = list[float](), list[dict[str, Tensor]](), batches()
    for step, batch in enumerate(data):
        logits = adapted(batch.tokens_BT).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, batch.labels_BT.flatten(), ignore_index=IGNORE)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in trained.items()})
        torch.nn.utils.clip_grad_norm_(trained.values(), OPTIMIZER.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(OPTIMIZER, step, len(data))
        optimizer.step()
        optimizer.zero_grad()
    merged = adapted.merge_and_unload().state_dict()
    return losses, gradients, {name: tensor.detach() for name, tensor in merged.items()}


@functools.cache
def reference() -> Steps:
    return steps_of_peft()


def largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("text", STRATEGIES)
def test_steps_are_those_of_peft_on_one_process(text: str, record_property: Any) -> None:
    losses, gradients, merged = reference()
    num_ranks = Strategy.parse(text).num_ranks
    (ours, first, sent), *_ = run_ranks(steps_of, num_ranks, text)
    worst = [max(abs(a - b) for a, b in zip(ours[0], losses, strict=True))]
    worst.append(max(map(largest, ours[1], gradients)))
    lora, weights = SHAPE.lora, ours[2]
    assert lora is not None
    whole: dict[str, Tensor] = {}
    for link in table(dataclasses.replace(SHAPE, lora=None), "llama"):
        module, weight = link.ours[0].removesuffix(".weight"), weights[link.ours[0]]
        if f"{module}.lora_A.weight" in weights:
            b, a = (weights[f"{module}.lora_{letter}.weight"] for letter in "BA")
            weight = weight + lora.scaling * b @ a
        whole[link.theirs] = weight
    worst.append(largest(whole, {name: merged[name] for name in whole}))
    record_property("differences", f"{text}: losses, gradients, merged weights {worst}")
    assert max(worst) <= LIMIT
    if text != "pp2:zbv":  # whose first rank has no adapter, and so no moments to compare
        assert first == "None"
    assert [str(each) for each in sent if each.counted != each.predicted] == []


def bytes_of(text: str, precision: str) -> tuple[list[int], list[int], bool]:
    """Return bytes of weights, gradients and moments after a step, and as the plan counts them."""
    strategy, compute = Strategy.parse(text), getattr(torch, precision)
    comm = Ranks(strategy)
    plan = plan_decoder(strategy, SHAPE, torch.float32, compute, comm.coord("pp"))
    runner = plan.build(comm, functools.partial(fill_initial, SHAPE, 0))
    optimizer = build_optimizer(plan.model, OPTIMIZER)
    step = Step(
        plan.model, optimizer, NextToken(0, 0.0), OPTIMIZER, comm=comm, num_steps=3, run=runner
    )
    own = split(batches()[0], comm.coord("data"), comm.size("data"), 2)
    norms = step.compute_gradients(own)
    gradients = [p.grad for p in plan.model.parameters() if p.grad is not None]
    is_trained = all(
        (p.grad is not None) == (".lora_" in name) for name, p in plan.model.named_parameters()
    )
    held = sum(shard_of(each)[0].nbytes for each in gradients)
    step.apply_gradients(*norms)
    moments = [x for each in optimizer.state.values() for x in each.values() if x.ndim]
    measured = [
        sum(shard_of(x)[0].nbytes for x in plan.model.parameters()),
        held,
        sum(shard_of(x)[0].nbytes for x in moments),
    ]
    of = plan.holds(2)
    return measured, [of.parameter_bytes, of.gradient_bytes, of.optimizer_bytes], is_trained


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("text", ["dp2", "fsdp2", "fsdp2:zero2", "tp2", "fsdp2,tp2"])
def test_frozen_weights_cost_no_gradient_and_no_moment(text: str, precision: str) -> None:
    ranks = run_ranks(bytes_of, Strategy.parse(text).num_ranks, text, precision)
    measured, counted, _ = ranks[0]  # the plan describes the first rank, which has no padding
    assert measured == counted
    assert all(is_trained for *_, is_trained in ranks)


def run_of(folder: Path, **settings: Any) -> TrainConfig:
    more = {"model": str(folder / "base"), "lora": "r=4,alpha=8", "shape": ShapeConfig()}
    small = small_run(folder, **{**more, "steps": 4, "optimizer": OPTIMIZER, **settings})
    return dataclasses.replace(small, batch=BatchConfig(global_size=12), save="every=2")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", *WITH_EXPERTS])
def test_a_run_is_resumed_on_other_ranks_and_loaded_by_peft(tmp_path: Path, family: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        from hugging_face import small_models

        theirs: Any = getattr(small_models, family)(vocab_size=300, rms_norm_eps=1e-5)
        theirs.save_pretrained(tmp_path / "base")
        (tmp_path / "base" / "tokenizer.json").write_text(tokenizer_of(300))
        shape = ShapeConfig(experts="aux_loss=0.01" if family in WITH_EXPERTS else None)
        train(run_of(tmp_path, strategy="fsdp2", shape=shape))
        assert read_adapters(tmp_path / "run", open_weights(tmp_path / "base"))
        half = str(manifest.folder_of(tmp_path / "run", 2))
        for text in ("dp3", "dp1", "tp2", *(("ep2",) if family in WITH_EXPERTS else ())):
            out = str(tmp_path / text)
            train(
                run_of(
                    tmp_path, strategy=text, resume=half, out=out, lora="r=4,alpha=8", model=None
                )
            )
            pairs = zip(losses(tmp_path / "run")[2:], losses(out), strict=True)
            assert max(abs(a - b) for a, b in pairs) <= LIMIT
        with torch.no_grad():
            wide: Any = {"dtype": torch.float64, "experts_implementation": "eager"}
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **wide)
            tokens = torch.arange(40).reshape(2, 20) * 7 % 300
            before = base(tokens).logits
            adapted = PeftModel.from_pretrained(
                base, tmp_path / "run" / "adapter", autocast_adapter_dtype=False
            )
            expected = adapted(tokens).logits
            assert float((expected - before).abs().max()) > 1e-3
            # transformers' norms and angles are in float32: its own merged model is the reference.
            ours = load_decoder(open_weights(tmp_path / "run"), torch.float64, "cpu")(tokens)
            assert float((ours - expected).abs().max()) < 1e-6
            convert(tmp_path / "run", tmp_path / "merged")
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **wide)
            assert float((merged(tokens).logits - expected).abs().max()) < 1e-6
            # PEFT's folder is read as it was written, over the base that it names.
            again = load_decoder(open_weights(tmp_path / "run" / "adapter"), torch.float64, "cpu")
            assert float((again(tokens) - ours).abs().max()) < 1e-12
        # The base has moved.
        (tmp_path / "new").mkdir()
        (tmp_path / "base").rename(tmp_path / "new" / "base")
        options: Any = {"resume": half, "out": str(tmp_path / "moved"), "strategy": "dp1"}
        with pytest.raises(CheckpointError, match=r"give it by --model PATH/base"):
            train(run_of(tmp_path, **options, model=None))
        train(run_of(tmp_path, **options, model=str(tmp_path / "new" / "base")))
        assert losses(tmp_path / "moved") == losses(tmp_path / "dp1")


@pytest.mark.slow
def test_adapters_of_shared_experts_are_merged_as_peft_does(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        from peft import LoraConfig, get_peft_model

        from hugging_face.small_models import qwen2_moe

        base: Any = qwen2_moe()
        base.save_pretrained(tmp_path / "base")
        config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        adapted: Any = get_peft_model(base, config)
        adapted.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for module in ("shared_expert.down_proj", "shared_expert_gate", "shared_expert.up_proj"):
        assert f"base_model.model.model.layers.1.mlp.{module}.lora_A.weight" in names
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        weights = open_weights(tmp_path / "adapter", base=tmp_path / "base")
        ours = load_decoder(weights, torch.float32, "cpu")(tokens)
        expected = adapted.eval()(tokens).logits
    assert float((ours - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(
    "text, words",
    [
        *((text, f"lora is '{text}'; expected r=RANK and") for text in ("r=0", "r=4,beta=1", "4")),
        ("r=4,targets=q_porj", "lora: the model has no target 'q_porj' (did you mean 'q_proj'"),
        ("r=4,targets=qkv_proj", "each of its parts gets an adapter: q_proj+k_proj+v_proj"),
        ("r=4,targets=gate_proj", "lora: the model has no target 'gate_proj'"),
    ],
)
def test_a_setting_that_names_no_adapters_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Lora.parse(text, "gelu")
    assert words in str(refused.value)


def test_the_setting_names_rank_scaling_and_targets() -> None:
    lora = Lora.parse("r=4,rslora,targets=v_proj+c_proj", "gelu")
    assert lora.targets == ("attention.v", "attention.output", "mlp.down")
    assert lora.scaling == 8 / math.sqrt(4)
    assert len(Lora.parse("r=1", "swiglu").targets) == 7 and Lora.parse("r=4", "gelu").scaling == 2
