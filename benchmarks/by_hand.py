"""What loops written by hand share: transformers models in our sizes, and their last line."""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def read_arguments(parser: argparse.ArgumentParser, sizes: Mapping[str, int]) -> argparse.Namespace:
    """Read the sizes of the model and of a step; `sizes` has further ones, or other defaults."""
    defaults = {
        "steps": 12, "warmup": 3, "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408,
        "vocabulary": 8192, "seq-len": 256, "microbatch": 8,
    }  # fmt: skip
    for name, default in {**defaults, **sizes}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def join() -> None:
    """Join the job that torchrun has started, with one thread a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)


def llama(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return the model, float32."""
    return LlamaForCausalLM(LlamaConfig(intermediate_size=args.ffn, **_sizes(args)))


def mixtral(args: argparse.Namespace, implementation: str) -> MixtralForCausalLM:
    """Return a model with experts, two of them a token, float32.

    Args:
        args: with `experts`, their number; each has half of `ffn`, so a token meets the same
            products as in `llama`.
        implementation: how transformers applies the experts: eager, batched_mm or grouped_mm.
    """
    config = MixtralConfig(
        intermediate_size=args.ffn // 2,
        num_local_experts=args.experts,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        experts_implementation=implementation,
        **_sizes(args),
    )
    return MixtralForCausalLM(config)


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "max_position_embeddings": args.seq_len,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def leave(num_tokens: int, seconds: Sequence[float]) -> None:
    """Print the median rate of steps of so many tokens, and end the process."""
    if dist.get_rank() == 0:
        rates = [num_tokens / s for s in seconds]
        print(json.dumps({"tokens_per_s": statistics.median(rates)}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that succeeded
