"""Build an engine from a model on disk and an `EngineConfig`, on one process or the ranks of a job.

On several ranks the first one schedules, samples and responds, and all compute. Before each step
the first rank broadcasts the step as plain numbers, or a checkpoint to load. Every rank stores its
heads of the key-value cache, with the same block numbers on all ranks, and its shards of the
weights in the layout of training. Ranks of ep have the same tokens and heads, and other experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import NUM_TRIES
from phalanx.checkpoint.weights import load_decoder
from phalanx.comm.comm import Ranks
from phalanx.comm.together import broadcast_object, gather_objects
from phalanx.errors import CheckpointError, ConfigError, StrategyError
from phalanx.infer.engine import Engine
from phalanx.infer.options import EngineConfig
from phalanx.infer.paged import FlatStep, KVCache
from phalanx.infer.pool import BlockPool
from phalanx.infer.quantize import quantize_linears
from phalanx.infer.runner import ModelRunner
from phalanx.infer.scheduler import Scheduler
from phalanx.infer.served import Served, fill_from, open_served
from phalanx.infer.speculation import Ngrams
from phalanx.launch.heartbeat import PULSE
from phalanx.launch.local import run_ranks
from phalanx.launch.rank_env import is_under_torchrun, read_rank_env
from phalanx.measure.environment import free_memory_bytes, has_fast_bfloat16
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import plan_decoder
from phalanx.parallel.tensor.apply import layout_of
from phalanx.strategy import Strategy

STORED: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Setting `cache` -> dtype of a quantized key-value cache."""

CACHE_PART = 0.3
"""Largest fraction of free memory for the key-value cache if `cache_tokens` is not set."""

KINDS: Final = ("1d", "megatron")
"""Kinds of tp layouts in which each rank has all tokens of its heads."""

IDLE_S: Final = 10.0**6
"""Timeout of collectives, seconds: the other ranks wait in one until a request arrives."""

Work = Callable[[Served, Engine], Any]


def with_engine(folder: Path, config: EngineConfig, work: Work) -> Any:
    """Call `work` with the engine of a model, in this process or on the first of several ranks.

    A signal ends several ranks at once, unless `work` calls `PULSE.heed`.

    Args:
        folder: see `open_served`.
        config: settings of the engine; its strategy may split by tp and ep only.
        work: function that can be imported by name, because it may run in another process.

    Returns:
        The result of `work`.

    Raises:
        StrategyError: the strategy has an axis or a layout that is not supported.
        ConfigError: this process is a rank of a job with another number of ranks.
        PhalanxError: the folder or the settings are invalid, or `work` failed.
    """
    strategy = Strategy.parse(config.strategy)
    others = [
        name for name, axis in strategy.axes() if axis.degree > 1 and name not in ("ep", "tp")
    ]
    if others or (strategy.tp.degree > 1 and strategy.tp.kind not in KINDS):
        degree = max(strategy.tp.degree, 2)
        raise StrategyError(
            f"strategy is {strategy}; generation splits a model only by tp, in the layouts "
            f"{' and '.join(KINDS)}, and its experts by ep; the nearest are tp{degree} and "
            f"tp{degree}:megatron. A checkpoint can be read whichever strategy wrote it"
        )
    Ngrams.parse(config.speculative)  # raises before the weights are read
    served = open_served(folder, config.lora_modules)
    if strategy.num_ranks == 1 and not (is_under_torchrun() and read_rank_env().num_ranks > 1):
        return work(served, engine_of(served, config))
    if config.weights == "int8":
        raise ConfigError(
            f"weights is int8, which needs a single process, but strategy is {strategy}; the "
            "nearest is weights full"
        )
    plan_decoder(strategy, served.weights.shape)  # raises before any process starts
    first, *_ = run_ranks(
        *(_run, strategy.num_ranks, strategy, folder, config, work),
        device=torch_device(config.device).type,
        threads=config.threads,
        timeout_s=IDLE_S,
    )
    return first


def engine_of(served: Served, config: EngineConfig) -> Engine:
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
    num_blocks = num_blocks_of(config, model, Strategy())
    pool = BlockPool(num_blocks, config.block_size, has_prefix_cache=config.prefix_cache)
    runner = ModelRunner(model, cache_of(config, model, pool), adapters=served.adapters)
    return assemble(served, config, runner, pool)


def _run(strategy: Strategy, folder: Path, config: EngineConfig, work: Work) -> Any:
    """Build the model and cache of this rank; the first rank calls `work`, the others follow it."""
    device = torch_device(config.device)
    served = _open_together(folder, config.lora_modules)
    dtype = torch_dtype(config.precision, device)
    comm = Ranks(strategy, device.type)
    plan = plan_decoder(strategy, served.weights.shape, dtype, dtype, same_rows=True)
    plan.build(comm, fill_from(served.weights))
    served.weights.close()
    model = plan.model.eval()
    num_blocks = min(gather_objects(num_blocks_of(config, model, strategy)))  # free memory differs
    pool = BlockPool(num_blocks, config.block_size, has_prefix_cache=config.prefix_cache)
    cache = cache_of(config, model, pool, strategy.tp.degree)
    layout = layout_of(strategy, comm)
    runner = ModelRunner(model, cache, layout, served.adapters)
    if comm.is_first:
        leading = _BroadcastingRunner(runner)
        try:
            return work(served, assemble(served, config, leading, pool))
        finally:
            leading.end()
    PULSE.heed()  # the first rank decides on a signal, and broadcasts None at the end
    while True:
        with PULSE.waiting("waiting for requests"):  # an idle server is not stalled
            order = broadcast_object(None)
        if order is None:
            return None
        if isinstance(order, Path):
            with suppress(CheckpointError):  # the first rank raises it too
                runner.load(order)
        else:
            runner(order)


def _open_together(folder: Path, lora_modules: Sequence[str]) -> Served:
    """Open the same checkpoint on each rank; a run may save another while they look for the latest.

    Raises:
        CheckpointError: the run saved during each of NUM_TRIES tries.
    """
    opened: set[str] = set()
    for _ in range(NUM_TRIES):
        served = open_served(folder, lora_modules)
        opened = {str(each) for each in gather_objects(served.weights.folder)}
        if len(opened) == 1:
            return served
    raise CheckpointError(
        f"the ranks found different checkpoints, {', '.join(sorted(opened))}, because the run "
        "saves too often; name one that the run keeps"
    )


class _BroadcastingRunner:
    """Logits of the first rank: broadcasts each step or load, and then runs it here too.

    The engine's thread calls it, and `end` is called by the thread that ran `work`, which may have
    ended before the engine. The lock keeps their broadcasts apart.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, step: FlatStep) -> Tensor:
        with self._lock:
            broadcast_object(step)
            try:
                return self._runner(step)
            except BaseException as error:
                self._failure = error
                raise

    def load(self, folder: Path) -> None:
        with self._lock:
            broadcast_object(folder)
            self._runner.load(folder)

    def end(self) -> None:
        """Stop the other ranks, after the current step or load.

        If a step has failed here, they are blocked in its collectives. Then raise the error of that
        step, so that the launcher terminates them.
        """
        # The engine's thread may be in a step: then this waits for the step's end.
        self._lock.acquire()  # and never released: no rank would follow a further step
        if self._failure is not None:
            raise self._failure
        broadcast_object(None)


def assemble(
    served: Served,
    config: EngineConfig,
    runner: ModelRunner | _BroadcastingRunner,
    pool: BlockPool,
) -> Engine:
    """Return an engine that runs its steps by `runner` and allocates blocks from `pool`."""
    ngrams = Ngrams.parse(config.speculative)
    return Engine(
        runner,
        Scheduler(
            pool,
            budget=config.budget,
            slots=config.slots,
            is_chunked=config.chunked_prefill,
            guess=ngrams and ngrams.draft,
        ),
        max_seq_len=max_len_of(config, served.weights.shape),
        end_ids=served.end_ids,
        tokenizer=served.tokenizer,
        load=runner.load,
    )


def max_len_of(config: EngineConfig, shape: ModelShape) -> int:
    """Return the most tokens of a sequence.

    Raises:
        ConfigError: `max_model_len` exceeds the positions of the model.
    """
    if (most := config.max_model_len) is not None and most > shape.max_seq_len:
        raise ConfigError(
            f"max_model_len is {most:,}; expected at most {shape.max_seq_len:,}, the positions of "
            "the model"
        )
    return most or shape.max_seq_len


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


def cache_of(config: EngineConfig, model: Decoder, pool: BlockPool, num_shards: int = 1) -> KVCache:
    """Return an empty key-value cache on the device of `model`, with the heads of one rank."""
    weight = next(model.parameters())
    stored = None if config.cache == "full" else STORED[config.cache]
    return KVCache(model.shape, pool, weight.dtype, weight.device, num_shards, stored)


def num_blocks_of(config: EngineConfig, model: Decoder, strategy: Strategy) -> int:
    """Return the number of cache blocks; each rank of tp stores its heads of every block.

    Raises:
        ConfigError: `cache_tokens` positions, or a single block, do not fit into free memory.
    """
    size, shape, weight = config.block_size, model.shape, next(model.parameters())
    longest = -(-max_len_of(config, shape) // size)
    num_groups = shape.num_kv_heads // strategy.tp.degree
    head_bytes = weight.dtype.itemsize * shape.head_dim
    if config.cache != "full":
        head_bytes = shape.head_dim + torch.float32.itemsize
    token_bytes = 2 * shape.num_layers * num_groups * head_bytes
    # The ranks of a host share its memory; each GPU has its own.
    num_sharing = strategy.num_ranks if weight.device.type == "cpu" else 1
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
