"""Make the engine that some settings ask for of a model on disk."""

from __future__ import annotations

import torch

from phalanx.checkpoint.weights import load_decoder
from phalanx.data.tokenizer import count_ids
from phalanx.errors import ConfigError
from phalanx.infer.engine import Engine
from phalanx.infer.options import EngineConfig
from phalanx.infer.paged import KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.infer.served import Served
from phalanx.infer.texts import TextEngine
from phalanx.measure.environment import free_memory_bytes, has_fast_bfloat16
from phalanx.models.shape import ModelShape

CACHE_PART = 0.3
"""Most of the free memory that the cache takes unless its size is given."""


def torch_device(name: str) -> torch.device:
    """Return the device of a setting.

    Raises:
        ConfigError: there is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but torch finds no CUDA device; the nearest is cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the data type of a setting."""
    if name == "auto":
        name = "bfloat16" if has_fast_bfloat16(device.type) else "float32"
    return getattr(torch, name)


def engine_of(served: Served, config: EngineConfig) -> TextEngine:
    """Load a model into this process, and return its engine.

    Raises:
        ConfigError: there is no such device, or no memory for the cache.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch_device(config.device)
    dtype = torch_dtype(config.precision, device)
    model = load_decoder(served.weights, dtype, device)
    pool = BlockPool(
        _num_blocks(config, model.shape, dtype, device),
        config.block_size,
        finds_prefixes=config.prefix_cache,
    )
    cache = KVCache(cache_sizes(model.shape, pool), config.block_size, dtype, device)
    scheduler = Scheduler(
        pool,
        budget=config.budget,
        slots=config.slots,
        batching=config.batching,
        is_chunked=config.chunked_prefill,
    )
    engine = Engine(
        ModelRunner(model, cache),
        scheduler,
        max_seq_len=model.shape.max_seq_len,
        end_ids=served.end_ids,
        num_ids=count_ids(served.tokenizer),
    )
    return TextEngine(engine, served.tokenizer)


def cache_sizes(
    shape: ModelShape, pool: BlockPool, num_shards: int = 1
) -> tuple[int, int, int, int]:
    """Return layers, blocks, key-value heads of a rank and their width, for a `KVCache`."""
    return shape.num_layers, pool.num_blocks, shape.num_kv_heads // num_shards, shape.head_dim


def _num_blocks(
    config: EngineConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many blocks the cache has."""
    size = config.block_size
    if config.cache_tokens is not None:
        return -(-config.cache_tokens // size)
    longest = -(-shape.max_seq_len // size)
    block_bytes = 2 * dtype.itemsize * size * shape.num_layers * shape.num_kv_heads * shape.head_dim
    most = int(CACHE_PART * free_memory_bytes(device.type)) // block_bytes
    if most < 1:
        raise ConfigError(
            f"a block of the cache has {block_bytes:,} bytes, and {CACHE_PART:.0%} of the free "
            "memory is less; give a smaller block_size, or free some memory"
        )
    return min(config.slots * longest, most)
