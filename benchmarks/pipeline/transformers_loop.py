"""The loop to compare with, written by hand: the transformers Llama in two stages under 1F1B.

Written as a careful user would with torch.distributed.pipelining: the layers of each stage in a
module of their own, Schedule1F1B, fused AdamW, SDPA attention, clipping by the norm over both
stages. The tokens are made beforehand, so loading costs nothing.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM


class Stage(nn.Module):
    """The embedding and the first layers, or the other layers and the head."""

    def __init__(self, model: LlamaForCausalLM, num_first: int, rank: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.layers = nn.ModuleList(layers[:num_first] if rank == 0 else layers[num_first:])
        self.norm = model.model.norm if rank == 1 else None
        self.head = model.lm_head if rank == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles, position_ids=positions)
        return x if self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def clip(stage: nn.Module) -> None:
    grads = [p.grad for p in stage.parameters()]
    total = nn.utils.get_total_norm(grads) ** 2
    dist.all_reduce(total)
    nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, total.sqrt())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {
        "steps": 8, "warmup": 2, "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408,
        "vocabulary": 8192, "seq-len": 256, "microbatch": 2, "microbatches": 8, "first-layers": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
    module = Stage(LlamaForCausalLM(config), args.first_layers, rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    shape = (args.microbatch * args.microbatches, args.seq_len)
    seconds = []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(args.vocabulary, shape)
        dist.barrier()
        begin_s = time.perf_counter()
        if rank == 0:
            schedule.step(tokens)
        else:
            losses: list[Tensor] = []
            schedule.step(target=tokens, losses=losses)
            torch.stack(losses).mean().item()
        clip(module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= args.warmup:
            seconds.append(time.perf_counter() - begin_s)
    if rank == 0:
        rates = [shape[0] * shape[1] / s for s in seconds]
        print(json.dumps({"tokens_per_s": statistics.median(rates)}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that succeeded


if __name__ == "__main__":
    main()
