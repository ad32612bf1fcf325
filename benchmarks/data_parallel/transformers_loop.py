"""The loops to compare with, written by hand around the transformers Llama: DDP and FSDP2.

Written as a careful user would: fused AdamW over float32 weights, SDPA attention, clipping. DDP
runs under bfloat16 autocast, with gradients as views of their buckets; FSDP2 shards each layer and
the rest, gathers in bfloat16 and reduces in float32. The tokens are made beforehand, so loading
costs nothing.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def wrap(model: LlamaForCausalLM, kind: str, precision: str) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    for name, default in {
        "steps": 12, "warmup": 3, "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408,
        "vocabulary": 8192, "seq-len": 256, "microbatch": 8,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = wrap(LlamaForCausalLM(config), args.wrap, args.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    shape = (args.microbatch, args.seq_len)
    seconds = []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(args.vocabulary, shape)
        begin_s = time.perf_counter()
        is_cast = args.wrap == "ddp" and args.precision == "bfloat16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - begin_s)
    if dist.get_rank() == 0:
        num_tokens = dist.get_world_size() * args.microbatch * args.seq_len
        rates = [num_tokens / s for s in seconds]
        num_parameters = sum(p.numel() for p in model.parameters())
        print(
            json.dumps(
                {"tokens_per_s": statistics.median(rates), "num_parameters": num_parameters}
            ),
            flush=True,
        )
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that succeeded


if __name__ == "__main__":
    main()
