"""The loop to compare with, written by hand: the transformers Llama in two stages under 1F1B.

Written as a careful user would with torch.distributed.pipelining: the layers of each stage in a
module of their own, Schedule1F1B, fused AdamW over float32 weights, bfloat16 by autocast, SDPA
attention, clipping by the norm over both stages. The tokens are made beforehand, so loading costs
nothing.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from by_hand import join, leave, llama, read_arguments


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    sizes = {"steps": 8, "warmup": 2, "microbatch": 2, "microbatches": 8, "first-layers": 4}
    args = read_arguments(parser, sizes)
    join()
    rank = dist.get_rank()
    module = Stage(llama(args), args.first_layers, rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    shape = (args.microbatch * args.microbatches, args.seq_len)
    seconds = []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(args.vocabulary, shape)
        dist.barrier()
        begin_s = time.perf_counter()
        is_cast = args.precision == "bfloat16"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
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
    leave(shape[0] * shape[1], seconds)


if __name__ == "__main__":
    main()
