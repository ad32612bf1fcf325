"""Build an engine from a model on disk and an `EngineConfig`."""

from __future__ import annotations

from typing import Final

import torch

from phalanx.checkpoint.weights import load_decoder
from phalanx.data.tokenizer import count_ids
from phalanx.errors import ConfigError
from phalanx.infer.engine import Engine, LiveLogits
from phalanx.infer.options import EngineConfig
from phalanx.infer.paged import KVCache, QuantizedCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.quantize import quantize_linears
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.infer.served import Served
from phalanx.infer.texts import TextEngine
from phalanx.measure.environment import free_memory_bytes, has_fast_bfloat16
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape

STORED: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Setting `cache` -> dtype of a quantized key-value cache."""

CACHE_PART = 0.3
"""Largest fraction of free memory for the key-value cache if `cache_tokens` is not set."""


def torch_device(name: str) -> torch.device:
    """Return the torch device that the setting `device` names; "auto" prefers CUDA.

    Raises:
        ConfigError: there is no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but torch finds no CUDA device; the nearest is cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that the setting `precision` names.

    "auto" is bfloat16 where the device computes it fast, else float32.
    """
    if name == "auto":
        name = "bfloat16" if has_fast_bfloat16(device.type) else "float32"
    return getattr(torch, name)


def engine_of(served: Served, config: EngineConfig) -> TextEngine:
    """Load a model into this process, and return its engine.

    Raises:
        ConfigError: the device does not exist, or the cache does not fit into memory.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch_device(config.device)
    model = load_decoder(served.weights, torch_dtype(config.precision, device), device)
    served.weights.close()
    if config.weights == "int8":
        quantize_linears(model)
    pool = pool_of(config, num_blocks_of(config, model))
    return assemble(served, config, ModelRunner(model, cache_of(config, model, pool)), pool)


def assemble(
    served: Served, config: EngineConfig, logits: LiveLogits, pool: BlockPool
) -> TextEngine:
    """Return an engine that computes logits with `logits` and allocates blocks from `pool`."""
    scheduler = Scheduler(
        pool,
        budget=config.budget,
        slots=config.slots,
        batching=config.batching,
        is_chunked=config.chunked_prefill,
    )
    engine = Engine(
        logits,
        scheduler,
        max_seq_len=served.weights.shape.max_seq_len,
        end_ids=served.end_ids,
        num_ids=count_ids(served.tokenizer),
    )
    return TextEngine(engine, served.tokenizer, logits.load)


def pool_of(config: EngineConfig, num_blocks: int) -> BlockPool:
    """Return the block pool of a key-value cache with `num_blocks` blocks."""
    return BlockPool(num_blocks, config.block_size, has_prefix_cache=config.prefix_cache)


def cache_of(config: EngineConfig, model: Decoder, pool: BlockPool, num_shards: int = 1) -> KVCache:
    """Return an empty key-value cache on the device of `model`, with the heads of one rank."""
    weight = next(model.parameters())
    sizes = cache_sizes(model.shape, pool, num_shards)
    if config.cache == "full":
        return KVCache(sizes, config.block_size, weight.dtype, weight.device)
    stored = STORED[config.cache]
    return QuantizedCache(sizes, config.block_size, weight.dtype, weight.device, stored)


def cache_sizes(
    shape: ModelShape, pool: BlockPool, num_shards: int = 1
) -> tuple[int, int, int, int]:
    """Return (layers, blocks, key-value heads of a rank, head width), for a `KVCache`."""
    return shape.num_layers, pool.num_blocks, shape.num_kv_heads // num_shards, shape.head_dim


def num_blocks_of(config: EngineConfig, model: Decoder, num_shards: int = 1) -> int:
    """Return the number of cache blocks; each rank stores 1 / `num_shards` of every block.

    Raises:
        ConfigError: `cache_tokens` positions, or a single block, do not fit into free memory.
    """
    size, shape, weight = config.block_size, model.shape, next(model.parameters())
    longest = -(-shape.max_seq_len // size)
    num_groups = shape.num_kv_heads // num_shards
    head_bytes = weight.dtype.itemsize * shape.head_dim
    if config.cache != "full":
        head_bytes = shape.head_dim + torch.float32.itemsize
    token_bytes = 2 * shape.num_layers * num_groups * head_bytes
    # The ranks of a host share its memory; each GPU has its own.
    num_sharing = num_shards if weight.device.type == "cpu" else 1
    free_bytes = free_memory_bytes(weight.device) // num_sharing
    if config.cache_tokens is not None:
        num_blocks = -(-config.cache_tokens // size)
        if num_blocks * size * token_bytes > free_bytes:
            nearest = free_bytes // (size * token_bytes) * size
            raise ConfigError(
                f"cache_tokens is {config.cache_tokens:,}, and each takes {token_bytes:,} bytes, "
                f"but only {free_bytes:,} bytes are free; the nearest is {nearest:,}"
            )
        return num_blocks
    most = int(CACHE_PART * free_bytes) // (size * token_bytes)
    if most < 1:
        raise ConfigError(
            f"a block of the cache takes {size * token_bytes:,} bytes, more than {CACHE_PART:.0%} "
            "of the free memory; set a smaller block_size, or free some memory"
        )
    return min(config.slots * longest, most)
