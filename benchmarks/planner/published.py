"""Prices of published runs: one JSON object per run is read as a planned step, and priced.

A run is read as the nearest strategy of Phalanx. Constants depend on its hardware and its software,
never on the single run. A value that a run does not state, such as the schedule or recomputation,
has the usual value of its software. Benchmarks balance the tokens of experts by force, so their
imbalance is 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.account.parameters import num_parameters
from phalanx.account.planned import DecoderModel, PlannedStep, decoder_step
from phalanx.account.rank_memory import StageMemory, heaviest, memory, of_libraries
from phalanx.errors import ConfigError
from phalanx.models.registry import shape_of
from phalanx.models.shape import ExpertShape, ModelShape
from phalanx.planner.hardware import CLUSTERS, FABRIC
from phalanx.planner.machine import Cluster, Level
from phalanx.planner.price import price
from phalanx.planner.software import SOFTWARE, TYPICAL, Software
from phalanx.strategy import AXES, POSITIONS, Recompute, Strategy

_PROGRAMS: Final = {
    "megatron-sc21": "megatron",
    "bigscience-bloom": "megatron-deepspeed",
    "vtrain-single": "megatron-deepspeed",
    "zero-bubble": "megatron-deepspeed",
    "llm-foundry": "llm-foundry",
    "ultrascale-playbook": "nanotron",
    "nanotron": "nanotron",
    "maxtext": "maxtext",
    "megatron-bridge": "megatron-core",
    "megatron-moe-zoo": "megatron-core",
    "nemo": "megatron-core",
    "torchtitan": "compiled",
    "deepspeed": "megatron-deepspeed",
    "megatron": "megatron",
}
"""Word in a run's group or source -> name of the software that ran it."""

_CLUSTERS: Final = {"ultrascale-playbook": "h100-p5"}
"""Group of a run -> cluster of the catalog on which it ran."""

_OF_THE_FIRST_STAGE: Final = ("nanotron",)
"""Software whose reported memory is the peak of PyTorch's allocator on rank 0."""

_SPEED_UP: Final = {"fp8": 1.8, "fp4": 2.7}
"""Word in a run's precision -> speed of its products relative to 16 bits."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run: a planned step with its cluster and its software.

    Attributes:
        lacks: why the step is only the nearest that Phalanx has; empty if it is the run's.
    """

    planned: PlannedStep[DecoderModel]
    cluster: Cluster
    software: Software
    lacks: str = ""


def read(row: Mapping[str, Any]) -> PublishedRun:
    """Read a published run.

    Raises:
        PhalanxError: Phalanx has no such strategy, or the run lacks a value that its cost needs.
    """
    model, parallel = row["model"], row["parallel"]
    for name in ("layers", "hidden", "heads"):
        if not model.get(name):
            raise ConfigError(
                f"run {row['id']}: model.{name} is {model.get(name)}; expected a number"
            )
    degrees = {f"parallel.{name}": parallel.get(name) for name in (*AXES, "ep", "vpp")}
    for name, value in {"num_gpus": row["num_gpus"], "seq_len": row["seq_len"], **degrees}.items():
        if value and not (1 <= value <= 2**40 and value % 1 == 0):
            raise ConfigError(f"run {row['id']}: {name} is {value}; expected a whole number from 1")
    if not row["num_gpus"]:
        raise ConfigError(f"run {row['id']}: num_gpus is 0; expected a whole number from 1")
    microbatch = row.get("micro_batch") or 1
    replicas = parallel.get("dp") or 1
    sequences = row.get("global_batch_seqs") or microbatch * replicas * (row.get("grad_accum") or 1)
    accumulation = max(1, round(sequences / (microbatch * replicas)))
    software = _of_precision(row, _software(row))
    shape, strategy = _shape(row), Strategy.parse(_strategy(row))
    if software.name == "nanotron" and 1 < strategy.pp.degree <= shape.num_layers:
        strategy = dataclasses.replace(strategy, cut=_cut(shape, strategy.pp.degree))
    planned = decoder_step(
        shape=shape,
        strategy=strategy,
        seq_len=row["seq_len"],
        microbatch=microbatch,
        accumulation=accumulation,
    )
    planned = dataclasses.replace(planned, model=dataclasses.replace(planned.model, imbalance=1.0))
    lacks = ""
    if shape.experts is not None and strategy.tp.degree > 1:
        # Megatron's ranks of tp route a part of the tokens each, to whole experts. Here they have
        # the same tokens, and each has a part of every expert.
        lacks = "ranks of tp have experts of their own"
    return PublishedRun(planned, _cluster(row, row["num_gpus"]), software, lacks)


def seconds(run: PublishedRun) -> float:
    """Return the predicted time of a step, seconds."""
    return price(run.planned, run.cluster, run.software).step_s


def held(run: PublishedRun) -> tuple[int, bool]:
    """Return the bytes that the run's software would report, and whether the run fits.

    On TPU, a run that does not fit counts with full recomputation, because its compiler recomputes
    more than requested.
    """
    room = run.cluster.device.usable_bytes
    stages = _memory(run, run.planned)
    if run.cluster.device.kind == "tpu" and heaviest(stages).total > room:
        full = dataclasses.replace(run.planned.strategy, recompute=Recompute("full"))
        recomputed = dataclasses.replace(run.planned, strategy=full)
        stages = _memory(run, recomputed)
    total = heaviest(stages).total
    if run.software.name in _OF_THE_FIRST_STAGE:
        return stages[0].total - of_libraries(run.planned.strategy), total <= room
    return total, total <= room


def _memory(run: PublishedRun, step: PlannedStep[DecoderModel]) -> list[StageMemory]:
    of = run.software
    kind = run.cluster.device.kind
    return memory(step, kind, kept=of.kept, logit_bytes=of.logit_bytes)


def measured_s(row: Mapping[str, Any], shape: ModelShape) -> float | None:
    """Return the measured seconds of a step: as published, or from tokens or FLOPs per second."""
    measured, derived = row["measured"], row.get("derived") or {}
    if step_s := measured.get("step_time_s") or derived.get("step_time_s"):
        return step_s
    tokens = row["global_batch_seqs"] * row["seq_len"]
    if rate := measured.get("tokens_per_s_per_gpu") or derived.get("tokens_per_s_per_gpu"):
        return tokens / rate / row["num_gpus"]
    if rate := measured.get("tflops_per_gpu"):
        return flops_of_token(shape, row["seq_len"]) * tokens / row["num_gpus"] / rate / 1e12
    return None


def flops_of_token(shape: ModelShape, seq_len: int) -> float:
    """Return the FLOPs of one token, 6 N + 12 L H T, by the convention of MaxText."""
    width = shape.num_heads * shape.head_dim
    return 6 * num_parameters(shape).matmul + 12 * shape.num_layers * width * seq_len


def _software(row: Mapping[str, Any]) -> Software:
    text = f"{row.get('group', '')} {row.get('source', '')}".lower()
    for word, name in _PROGRAMS.items():
        if word in text:
            return SOFTWARE[name]
    return SOFTWARE[TYPICAL]


def _of_precision(row: Mapping[str, Any], software: Software) -> Software:
    """Return the software with `speed_up` set for the run's precision."""
    precision = (row.get("precision") or "").lower()
    speed_up = next((value for word, value in _SPEED_UP.items() if word in precision), 1.0)
    return dataclasses.replace(software, speed_up=speed_up)


def _shape(row: Mapping[str, Any]) -> ModelShape:
    model, experts = row["model"], row["model"].get("moe")
    heads = model["heads"]
    ffn = model.get("ffn") or 4 * model["hidden"]
    head_dim = model.get("head_dim") or model["hidden"] // heads
    is_gpt = not (model.get("gated_mlp") or experts)
    choices: dict[str, Any] = {}
    if experts:
        if experts.get("attention") == "MLA":  # such runs do not state its widths
            latent = shape_of("deepseek-v3-671b").latent
            assert latent is not None
            choices["latent"], head_dim = latent, latent.plain_dim + latent.rope_dim
        of_expert = experts.get("moe_ffn") or ffn
        choices["experts"] = ExpertShape(
            num_experts=experts["experts"],
            top_k=experts["topk"],
            ffn=of_expert,
            first_dense=experts.get("dense_layers") or 0,
            shared_ffn=(experts.get("shared") or 0) * of_expert,
        )
    if is_gpt:
        choices = {"norm": "layer", "position": "learned", "mlp": "gelu", "tied": True}
        choices["bias"] = "llm-foundry" not in row.get("group", "")
    elif head_dim % 2:
        head_dim += 1
    return ModelShape(
        vocab_size=model.get("vocab") or 50_304,
        num_layers=model["layers"],
        hidden=model["hidden"],
        num_heads=heads,
        num_kv_heads=model.get("kv_heads") or heads,
        head_dim=head_dim,
        ffn=ffn,
        max_seq_len=row["seq_len"],
        **choices,
    )


def _strategy(row: Mapping[str, Any]) -> str:
    parallel = row["parallel"]
    degree = {name: parallel.get(name) or 1 for name in (*AXES, "vpp") if name != "fsdp"}
    stage = parallel.get("zero_stage") or (3 if parallel.get("fsdp") else 0)
    if stage == 2 and degree["pp"] > 1:  # such pipelines add up gradients and reduce once a step
        stage = 1
    parts: list[str] = []
    if degree["pp"] > 1:
        is_split = "ZB" in (parallel.get("schedule") or "")
        kind = f":interleaved/{degree['vpp']}" if degree["vpp"] > 1 else ":zb/1" if is_split else ""
        parts.append(f"pp{degree['pp']}{kind}")
    # Megatron's degree of ep counts ranks of dp and of tp. Here ep has ranks of dp alone, and tp
    # splits the experts of a rank, which then hold as many parameters.
    ep = math.gcd(degree["dp"], parallel.get("ep") or 1)
    if (data := degree["dp"] // ep) > 1:
        parts.append(f"fsdp{data}:zero{stage}" if stage else f"dp{data}")
    if degree[POSITIONS] > 1:
        parts.append(f"{POSITIONS}{degree[POSITIONS]}")
    if ep > 1:
        parts.append(f"ep{ep}")
    if degree["tp"] > 1:
        is_whole = parallel.get("sequence_parallel") is False
        parts.append(f"tp{degree['tp']}{':megatron' if is_whole else ''}")
    policy = (row.get("recompute") or "none").split(" ")[0]
    if policy in ("full", "selective"):
        parts.append(f"recompute:{policy}")
    return ",".join(parts) or "dp1"


def _cut(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Return the number of links of each stage in nanotron, which balances stages by cost.

    The cost of blocks and of the head is their number of parameters; the embedding costs nothing.
    """
    count, num_layers = num_parameters(shape), shape.num_layers
    head = shape.vocab_size * shape.hidden / (count.attention + count.mlp) * num_layers
    part = (num_layers + head) / num_stages
    ends = [0]
    for stage in range(1, num_stages):
        most = 1 + num_layers - (num_stages - 1 - stage)
        ends.append(min(most, max(ends[-1] + 1, 1 + math.ceil(stage * part))))
    return tuple(after - before for before, after in itertools.pairwise([*ends, num_layers + 2]))


def _cluster(row: Mapping[str, Any], num_devices: int) -> Cluster:
    """Return the catalog's cluster of the run's device, with the run's links unless it is a TPU."""
    hardware, known = row["hardware"], _CLUSTERS.get(row.get("group", ""))
    found = _nearest(hardware) if known is None else CLUSTERS[known]
    first, *others = found.levels
    inner = hardware.get("nvlink_domain") or hardware.get("gpus_per_node") or first.devices
    device = found.device
    if found.device.kind == "tpu":
        return dataclasses.replace(found, num_devices=max(num_devices, FABRIC))
    levels = [_with(first, inner, hardware.get("intra_gbps"))]
    levels += [_with(level, level.devices, hardware.get("inter_gbps_per_gpu")) for level in others]
    return dataclasses.replace(
        found, device=device, levels=tuple(levels), num_devices=max(num_devices, FABRIC)
    )


def _with(level: Level, devices: int, gigabytes_per_s: float | None) -> Level:
    link = level.link
    if gigabytes_per_s:
        link = dataclasses.replace(link, bandwidth=1e9 * gigabytes_per_s)
    return dataclasses.replace(level, devices=devices, link=link)


def _nearest(hardware: Mapping[str, Any]) -> Cluster:
    """Return the catalog's cluster whose device matches by name, else by the nearest peak."""
    text = "".join(c for c in (hardware.get("gpu") or "").lower() if c.isalnum())
    memory = hardware.get("memory_gb") or 0
    named = [
        cluster
        for name, cluster in CLUSTERS.items()
        if cluster.device.name == name and name.split("-")[-1 if "tpu" in name else 0] in text
    ]
    if named:
        longest = max(len(each.name.split("-")[0]) for each in named)
        named = [each for each in named if len(each.name.split("-")[0]) == longest]
        return min(named, key=lambda each: abs(each.device.memory_bytes / 1e9 - memory))
    peak = 1e12 * (hardware.get("peak_tflops_16bit") or 0)
    if not peak:
        raise ConfigError(f"the device {hardware.get('gpu')!r} is not in the catalogue")
    usual = [cluster for name, cluster in CLUSTERS.items() if cluster.device.name == name]
    return min(usual, key=lambda each: abs(math.log(each.device.flops / peak)))
