"""The loops to compare with, by hand around the Llama or Mixtral of transformers: DDP, FSDP2, TP.

Written as a careful user would: fused AdamW over float32 weights, SDPA attention, clipping. DDP
runs under bfloat16 autocast, with gradients as views of their buckets; FSDP2 shards each layer and
the rest, gathers in bfloat16 and reduces in float32; tensor parallelism is ColwiseParallel and
RowwiseParallel of torch.distributed.tensor on the maps of attention and MLP, and ColwiseParallel on
the head with the loss in parallel; its DTensors and its plain tensors are clipped each by their own
norm. With --experts each MLP is that many experts of half its size, two a token, and the loss
contains the balancing loss. The tokens are made beforehand, so loading costs nothing.
"""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from by_hand import join, leave, llama, mixtral, read_arguments

LAYER = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def wrap(model: PreTrainedModel, kind: str, precision: str) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tp":
        for layer in model.model.layers:
            parallelize_module(layer, mesh, LAYER)
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return parallelize_module(model, mesh, {"lm_head": head})
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, kind: str) -> torch.Tensor:
    if kind != "tp":
        return model(input_ids=tokens, labels=tokens).loss
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", choices=["ddp", "fsdp", "tp"], required=True)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--implementation", default="eager", help="of the experts")
    args = read_arguments(parser, {"experts": 0})
    join()
    model = mixtral(args, args.implementation) if args.experts else llama(args)
    model = wrap(model, args.wrap, args.precision)
    # Neither the fused kernel nor clipping takes a mix of DTensors and plain tensors.
    by_kind = {True: [], False: []}
    for parameter in model.parameters():
        by_kind[type(parameter.data) is torch.Tensor].append(parameter)
    groups = [{"params": each} for each in by_kind.values() if each]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    num_data_ranks = 1 if args.wrap == "tp" else dist.get_world_size()
    shape = (args.microbatch, args.seq_len)
    seconds = []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(args.vocabulary, shape)
        begin_s = time.perf_counter()
        is_cast = args.wrap != "fsdp" and args.precision == "bfloat16"
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast),
            loss_parallel() if args.wrap == "tp" else nullcontext(),
        ):
            loss = loss_of(model, tokens, args.wrap)
            loss.backward()
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - begin_s)
    leave(num_data_ranks * args.microbatch * args.seq_len, seconds)


if __name__ == "__main__":
    main()
