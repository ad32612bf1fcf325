"""The experts of transformers in a loop of one's own: on ranks the numbers of one process.

`pytest -m slow -n 0 -s tests/script/test_transformers_experts.py` prints the largest differences.
"""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.cli.main import main
from phalanx.errors import StrategyError
from phalanx.launch.local import run_ranks
from phalanx.parallel.plan import Plan
from phalanx.parallel.skeleton import experts_of
from phalanx.strategy import Strategy

sys.path.insert(0, str(Path(__file__).parents[1] / "hugging_face"))

LIMIT = 1e-10
LENGTH = 8
IDS = torch.randint(97, (21, LENGTH), generator=torch.Generator().manual_seed(1))
"""Batches of 6, 6, 6 and 3 rows: of the last one, a fourth rank has no rows."""

FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3", "gpt-oss")
TWO = ("dp2", "fsdp2", "fsdp2:zero1", "fsdp2:zero2", "ep2")
FOUR = ("dp2,fsdp2", "dp2,ep2", "fsdp2,ep2", "fsdp2:zero1,ep2", "fsdp2:zero2,ep2")


def gpt_oss() -> Any:
    from small_models import SIZES
    from transformers import GptOssConfig, GptOssForCausalLM

    own = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    return GptOssForCausalLM(GptOssConfig(**{**SIZES, **own}))


def model_of(family: str, *, is_idle: bool = False) -> Any:
    """Return a small model in float64; with `is_idle`, the second half of its experts is idle."""
    from small_models import MODELS

    torch.manual_seed(0)
    model: Any = gpt_oss() if family == "gpt-oss" else MODELS[family]()
    model.set_experts_implementation("eager")  # transformers' grouped products have no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if is_idle:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[: len(buffer) // 2] = 1e3
    return model.double().train()


class Job(NamedTuple):
    """What a loop trains, and how.

    Attributes:
        stop: number of steps after which the loop saves and ends.
    """

    family: str = "qwen3-moe"
    is_idle: bool = False
    accumulation: int = 1
    aux_loss: float = 0.0
    recomputes: bool = False
    batch_size: int = 6
    stop: int = 4

    def parts(self) -> tuple[Any, torch.optim.Optimizer, DataLoader[Any]]:
        model = model_of(self.family, is_idle=self.is_idle)
        model.router_aux_loss_coef = self.aux_loss
        if self.recomputes:
            model.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, DataLoader(TensorDataset(IDS), self.batch_size)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Any]]
    weights: dict[str, Any]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def balance(model: Any, router_logits: tuple[Tensor, ...]) -> Tensor:
    """Return transformers' own auxiliary loss of the rows whose logits these are."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config
    return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok)


def alone(job: Job) -> Trained:
    """Train by plain transformers on one process."""
    from small_models import in_float64

    made = Trained([], [], [], {})
    with in_float64():
        model, optimizer, loader = job.parts()
        batches = [ids for (ids,) in loader]
        for at in range(0, len(batches), job.accumulation):
            step = batches[at : at + job.accumulation]
            loss: Any = 0.0
            for ids in step:
                options = {"output_router_logits": True} if job.aux_loss else {}
                loss += model(input_ids=ids, labels=ids, **options).loss / job.accumulation
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            made.losses.append(loss.item())
            made.norms.append(norm.item())
            of = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            made.gradients.append(of)
            optimizer.step()
            optimizer.zero_grad()
    made.weights.update({n: t.detach() for n, t in model.state_dict().items()})
    return made


def trained(strategy: str, job: Job, folder: Path | None = None) -> Trained:
    """Train the same by ranks; from the checkpoint in `folder`, if there is one."""
    from small_models import in_float64

    made = Trained([], [], [], {})
    with in_float64():
        run = phalanx.init(strategy, accumulation=job.accumulation)
        model, optimizer, loader = run.prepare(*job.parts())
        if folder is not None:
            run.resume(folder)
        for (ids,) in loader:
            if job.aux_loss:
                out = model(input_ids=ids, output_router_logits=True)
                logits, labels = run.gather(out.logits, ids)
                of_tokens = model.loss_function(logits, labels, model.config.vocab_size)
                router_logits = run.gather(out.router_logits, per_row=LENGTH)
                loss = of_tokens + job.aux_loss * balance(model, router_logits)
                run.backward(loss / job.accumulation)
            else:
                out = model(input_ids=ids, labels=ids)
                loss, count = out.loss / job.accumulation, ids[:, 1:].numel()
                run.backward(mean_of_rows=loss, count=count)
            if not run.is_step_end:
                continue
            made.losses.append(float(run.loss_of_step))
            made.norms.append(float(run.clip(0.5)))
            named = model.named_parameters()
            # As lists: a tensor of patched types cannot be sent to another process.
            of = {n: whole(p.grad).tolist() for n, p in named if p.grad is not None}
            made.gradients.append(of)
            optimizer.step()
            optimizer.zero_grad()
            if run.steps_done == job.stop:
                break
        if folder is not None:
            run.save(folder)
            state = run.state_dict()
            model.save_pretrained(folder / "hf", state_dict=state, is_main_process=run.is_first)
        made.weights.update({name: t.tolist() for name, t in run.state_dict().items()})
    return made


def error(ours: dict[str, Any], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    pairs = [(torch.tensor(ours[n], dtype=torch.float64), theirs[n].double()) for n in ours]
    return max(float((a - b).abs().max()) for a, b in pairs)


def compare(made: Trained, expected: Trained, what: str) -> None:
    numbers = [*made.losses, *made.norms], [*expected.losses, *expected.norms]
    of_numbers = max(abs(a - b) for a, b in zip(*numbers, strict=True))
    of_gradients = max(map(error, made.gradients, expected.gradients))
    of_weights = error(made.weights, expected.weights)
    print(f"{what}: {of_numbers:.1e} {of_gradients:.1e} {of_weights:.1e}")  # noqa: T201
    assert max(of_numbers, of_gradients, of_weights) <= LIMIT, what


def all_trained(cases: list[tuple[str, Job]]) -> list[Trained]:
    return [trained(*case) for case in cases]


def equal_to_one_process(cases: list[tuple[str, Job]]) -> None:
    """Run cases of as many ranks on the ranks of one job."""
    num_ranks = Strategy.parse(cases[0][0]).num_ranks
    expected = {job: alone(job) for _, job in cases}
    for found in run_ranks(all_trained, num_ranks, cases, threads=1):
        for (strategy, job), made in zip(cases, found, strict=True):
            compare(made, expected[job], f"{strategy} {job}")


IDLE = Job("deepseek-v3", is_idle=True)


def test_experts_train_as_on_one_process() -> None:
    """Of the model whose experts are half idle, ep has a rank that no token visits.

    Of the last batch of ten, the second rank has no rows.
    """
    balanced = Job(aux_loss=0.5, batch_size=10)
    equal_to_one_process([("ep2", Job()), ("ep2", IDLE), ("fsdp2", IDLE), ("ep2", balanced)])


def test_half_of_the_experts_is_idle() -> None:
    stacks = [g for name, g in alone(IDLE).gradients[0].items() if ".experts." in name]
    assert stacks and all(g[:4].any() and not g[4:].any() for g in stacks)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategies", [TWO, FOUR])
def test_families_train_as_on_one_process(family: str, strategies: tuple[str, ...]) -> None:
    equal_to_one_process([(strategy, Job(family)) for strategy in strategies])


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [TWO, FOUR])
@pytest.mark.parametrize(
    "job",
    [Job(accumulation=2), Job(recomputes=True), IDLE, IDLE._replace(recomputes=True)],
)
def test_accumulation_recomputation_and_idle_experts(strategies: tuple[str, ...], job: Job) -> None:
    equal_to_one_process([(strategy, job) for strategy in strategies])


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [TWO, FOUR])
def test_an_auxiliary_loss_of_gathered_logits_is_of_the_whole_batch(
    strategies: tuple[str, ...],
) -> None:
    equal_to_one_process([(strategy, Job(aux_loss=0.5)) for strategy in strategies])


@pytest.mark.slow
def test_a_run_resumes_under_other_splits_and_saves_the_files_of_transformers(
    tmp_path: Path,
) -> None:
    from small_models import in_float64

    expected = alone(Job())
    run_ranks(trained, 2, "ep2", Job(stop=2), tmp_path / "first", threads=1)
    for strategy in ("fsdp2,ep2", "dp1", "fsdp2", "ep2"):
        folder = tmp_path / strategy
        shutil.copytree(tmp_path / "first", folder)
        num_ranks = Strategy.parse(strategy).num_ranks
        for made in run_ranks(trained, num_ranks, strategy, Job(), folder, threads=1):
            rest = Trained(expected.losses[2:], expected.norms[2:], expected.gradients[2:], {})
            compare(made, rest._replace(weights=expected.weights), f"resumed by {strategy}")
        with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
            assert "model.layers.1.mlp.experts.5.down_proj.weight" in file.keys()
        with in_float64():
            saved = type(model_of("qwen3-moe")).from_pretrained(folder / "hf")
        for name, tensor in saved.state_dict().items():
            torch.testing.assert_close(tensor.double(), expected.weights[name])


class NextId:
    def loss_sum(self, model: Any, microbatch: Any, step: int) -> Tensor:
        logits = model(input_ids=microbatch[0]).logits[:, :-1].flatten(0, 1)
        labels = microbatch[0][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def num_valid(self, microbatch: Any) -> int:
        return microbatch[0].shape[0] * (LENGTH - 1)


def job() -> phalanx.Trainer:
    return phalanx.Trainer(
        functools.partial(model_of, "qwen3-moe"), NextId(), TensorDataset(IDS), batch_size=6
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ep2", "fsdp2,ep2", "ep2,recompute:full"])
def test_the_trainer_too(strategy: str, tmp_path: Path) -> None:
    verdict = job().verify(strategy)
    assert verdict.is_equal, str(verdict)
    job().train(strategy, phalanx.Options(out=tmp_path))


def grouped(strategy: str) -> list[float]:
    """Return the losses of float32 steps by the products that transformers chooses."""
    run = phalanx.init(strategy)
    model = model_of("deepseek-v3", is_idle=True).float()
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = run.prepare(
        model, optimizer, DataLoader(TensorDataset(IDS), batch_size=6)
    )
    losses: list[float] = []
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(run.backward(mean_of_rows=loss, count=ids[:, 1:].numel()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_grouped_products_of_transformers_compute_the_own_experts() -> None:
    alone, *_ = run_ranks(grouped, 1, "dp1", threads=1)
    for losses in run_ranks(grouped, 2, "ep2", threads=1):
        assert losses == pytest.approx(alone, rel=1e-5)


SCRIPT = """
import phalanx, torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

run = phalanx.init()
torch.manual_seed(0)
ids = torch.randint(97, (32, 8))
config = Qwen3MoeConfig(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    router_aux_loss_coef=0.5, output_router_logits=IS_BALANCED,
)
model = Qwen3MoeForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(ids), batch_size=8)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for (x,) in loader:
    run.backward(mean_of_rows=model(input_ids=x, labels=x).loss, count=x[:, 1:].numel())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_balanced", [False, True])
def test_a_balancing_loss_of_own_rows_ends_the_job(
    is_balanced: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("script.py").write_text(SCRIPT.replace("IS_BALANCED", str(is_balanced)))
    code = main(["run", "script.py", "--strategy", "ep2"])
    words = ("computes what one process computes", "ep2 differs from one process")
    assert (code, words[is_balanced] in capfd.readouterr().err) == (int(is_balanced), True)


def refusal(model: Any, strategy: str) -> str:
    with pytest.raises(StrategyError) as error:
        Plan(Strategy.parse(strategy), model)
    return str(error.value)


def test_refusals_name_the_module() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    with torch.device("meta"):
        llama4 = Llama4ForCausalLM(
            Llama4TextConfig(
                vocab_size=16, hidden_size=16, intermediate_size=8, intermediate_size_mlp=8,
                num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
                num_local_experts=4,
            )
        )  # fmt: skip
    assert "'model.layers.0.feed_forward.experts' of the model is a Llama4TextExperts" in refusal(
        llama4, "ep2"
    )
    model = model_of("mixtral")
    assert "4 experts, which is not a multiple of 3; the nearest is ep2" in refusal(model, "ep3")
    experts = model.model.layers[0].mlp.experts
    identity = torch.nn.Identity()
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", identity)
    assert [*experts_of(model)] == ["model.layers.1.mlp.experts"]


# transformers' own, at every look for gradient checkpointing.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_experts_are_refused() -> None:
    peft: Any = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    model = peft.get_peft_model(model_of("mixtral"), config)
    assert "has an adapter of PEFT, which ep does not split" in refusal(model, "ep2")
    Plan(Strategy.parse("fsdp2"), model)
