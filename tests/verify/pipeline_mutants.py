"""Faults of pipelines, planted in the ranks of a job as those of mutants.py are."""

from __future__ import annotations

from typing import Any

import mutants
import torch.distributed as dist
from mutants import Mutant

from phalanx.comm import comm
from phalanx.data.samples import Batch
from phalanx.models import decoder
from phalanx.models.random import layer_keys
from phalanx.parallel import reduce
from phalanx.parallel.pipeline import runtime
from phalanx.parallel.pipeline.schedule import Action
from phalanx.parallel.pipeline.split import PipelineSplit, TiedReducer
from phalanx.parallel.pipeline.stage import DecoderStages
from phalanx.parallel.sharded import ShardedReducer


def _unsummed_copies(right: Any) -> Any:
    return lambda self, phase: self._inner and self._inner.finish(phase)


def _norm_of_one_stage(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, name: str, *rest: Any) -> Any:
        return tensor if name == "pp" else right(self, tensor, name, *rest)

    return wrong


def _copies_that_count(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        runner = right(self, *args)
        runner.replicas = frozenset()
        return runner

    return wrong


def _drops_a_microbatch(right: Any) -> Any:
    """What rank 1 has made of the first microbatch is lost."""

    def wrong(self: Any, action: Action) -> None:
        right(self, action)
        if dist.get_rank() == 1 and action.microbatch == 0:
            for weight in self.runner.weights[action.stage]:
                weight.grad = None

    return wrong


def _first_two_together(right: Any) -> Any:
    def wrong(self: Any, action: Action) -> None:
        if action.op == "RECV_B" or action.microbatch > 1:
            right(self, action)
        elif action.microbatch == 0:
            right(self, action)
            right(self, action._replace(microbatch=1))

    return wrong


def _of_the_other(right: Any) -> Any:
    def wrong(self: Any, receive: Action) -> Any:
        if receive.op == "RECV_F" and receive.microbatch < 2:
            receive = receive._replace(microbatch=1 - receive.microbatch)
        return right(self, receive)

    return wrong


SWAPPED_ACTIVATIONS: list[Any] = [
    (runtime._Step, "receive", _first_two_together),
    (runtime._Step, "take", _of_the_other),
]
"""The second microbatch goes on with what the first has sent, and the first with its."""


def _swapped_gradients(right: Any) -> Any:
    def wrong(self: Any, receive: Action) -> Any:
        received = right(self, receive)
        return received.flip(0) if receive.op == "RECV_B" else received

    return wrong


def _skips_last_block(right: Any) -> Any:
    def wrong(self: Any, stage: int, received: Any, forward: Any) -> Any:
        def fewer() -> Any:
            blocks = self._model.stage.blocks
            if len(blocks) > 1:
                self._model.stage = self._model.stage._replace(blocks=blocks[:-1])
            return forward()

        return right(self, stage, received, fewer)

    return wrong


def _keys_by_stage(right: Any) -> Any:
    def wrong(blocks: Any, x: Any, angles: Any, documents: Any, keys: Any, *_: Any) -> Any:
        for index, block in enumerate(blocks):
            of_block = None if keys is None else layer_keys(keys, index)
            x = block(x, angles[block.has_window], documents, of_block)
        return x

    return wrong


def _loss_of_each_stage(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, name: str, *rest: Any) -> Any:
        done = right(self, tensor, name, *rest)
        return done * self.size("pp") if name == "loss" else done

    return wrong


def _loss_of_last_stage(right: Any) -> Any:
    """The ranks of the other stages never hear of it."""

    def wrong(self: Any, tensor: Any, name: str, *rest: Any) -> Any:
        return tensor if name == "loss" else right(self, tensor, name, *rest)

    return wrong


def _times_microbatches(right: Any) -> Any:
    def wrong(self: Any, microbatches: Any, forward: Any, scale: Any, *rest: Any) -> None:
        def scaled(summed: Any) -> Any:
            return scale(summed) * len(microbatches)

        right(self, microbatches, forward, scaled, *rest)

    return wrong


def _mean_of_means(right: Any) -> Any:
    def wrong(self: Any, microbatches: Any, forward: Any, scale: Any, *rest: Any) -> None:
        counts = [int((microbatch.labels_BT >= 0).sum()) for microbatch in microbatches]
        mean = sum(counts) / len(counts)

        def weighed(microbatch: Batch) -> Any:
            made = forward(microbatch)
            count = int((microbatch.labels_BT >= 0).sum())
            return made if made.ndim else made * mean / count

        right(self, microbatches, weighed, scale, *rest)

    return wrong


def _one_buffer(right: Any) -> Any:
    """What comes is written over what came before."""

    def wrong(self: Any, buffer: Any, *rest: Any) -> Any:
        held = vars(self).setdefault("held", {})
        return right(self, held.setdefault((buffer.shape, buffer.dtype), buffer).detach(), *rest)

    return wrong


def _without_weights_of_one(right: Any) -> Any:
    def wrong(self: Any, action: Action) -> None:
        if (action.op, action.microbatch) == ("W", 1):
            self.weight_work.pop((action.stage, action.microbatch))
        else:
            right(self, action)

    return wrong


def _unrefused(right: Any) -> Any:
    """Drop the unreduced gradients, which `finish` would refuse."""

    def finish(self: ShardedReducer, *args: Any) -> None:
        for gathered in self._gathered:
            gathered.grad = None
        right(self, *args)

    return finish


def _last_unreduced(right: Any) -> Any:
    """FSDP2 keeps what it should reduce of the last microbatch."""

    def wrong(self: Any, last: Any, reached: Any = None) -> None:
        right(self, last, reached)
        if last:
            for module in self._parameters_of:
                module.set_requires_gradient_sync(False, recurse=False)

    return wrong


OF_STAGES: dict[str, dict[str, Mutant]] = {
    "pp2": {
        "a tied copy whose gradient is not summed": (
            "llama", [(TiedReducer, "finish", _unsummed_copies)],
            "embedding", "in the sum over ranks or microbatches",
        ),
        "the norm of one stage": (
            "gpt2", [(comm.Comm, "all_reduce", _norm_of_one_stage)],
            None, "norm over shards and stages",
        ),
        "a norm that counts the tied copy twice": (
            "llama", [(PipelineSplit, "runner", _copies_that_count)],
            None, "norm over shards and stages",
        ),
        "a microbatch's gradients lost in one stage": (
            "llama", [(runtime._Step, "backward", _drops_a_microbatch)],
            "norm", "in the sum over ranks or microbatches",
        ),
        "an activation for another microbatch": (
            "llama", SWAPPED_ACTIVATIONS,
            "", "blocks.2 (Block) differs though all earlier tensors agree; received from an",
        ),
        "a gradient of other rows": (
            "gpt2", [(runtime._Step, "take", _swapped_gradients)],
            "", "to the output of blocks.1 (Block); received from another stage",
        ),
        "a stage without its last block": (
            "llama", [(DecoderStages, "run", _skips_last_block)], "blocks.1", "never called",
        ),
        "dropout of a block by its number in the stage": (
            "gpt2", [(decoder, "_run_blocks", _keys_by_stage)],
            "", "its input to blocks.2 (Block) differs though all earlier tensors agree: its int",
        ),
        "a loss that counts once a stage": (
            "llama", [(comm.Comm, "all_reduce", _loss_of_each_stage)],
            None, "the loss is 2 times what it should be",
        ),
        "a loss that stays with the last stage": (
            "llama", [(comm.Comm, "all_reduce", _loss_of_last_stage)],
            None, "the loss is 0 on rank 0",
        ),
        "gradients times the microbatches": (
            "gpt2", [(runtime.Pipeline, "__call__", _times_microbatches)],
            None, "gradient of output.weight is 3 times what it should be",
        ),
        "a mean of means": (
            "llama", [(runtime.Pipeline, "__call__", _mean_of_means)],
            None, "backward passes a different gradient to the output of the model",
        ),
    },
    "pp2:gpipe": {
        "one buffer for all that is received": (
            "gpt2", [(comm.Comm, "recv_start", _one_buffer)],
            "blocks.2.attention_norm", "so a tensor saved for backward is overwritten",
        ),
    },
    "pp2:zb/1": {
        "gradients of weights that one microbatch never makes": (
            "llama", [(runtime._Step, "backward", _without_weights_of_one)],
            "norm", "the gradient of norm.weight differs though every module's outputs",
        ),
    },
}  # fmt: skip

OF_STAGES_SPLIT: dict[str, dict[str, Mutant]] = {
    "pp2,fsdp2": {
        "shares of the last microbatch that are not reduced": (
            "llama", [
                (ShardedReducer, "before_backward", _last_unreduced),
                (ShardedReducer, "finish", _unrefused),
            ],
            "norm", "in the sum over ranks or microbatches",
        ),
    },
    "pp2,tp2": {
        "an activation for another microbatch, under tp": (
            "gpt2", SWAPPED_ACTIVATIONS,
            "", "blocks.2 (Block) differs though all earlier tensors agree; received from an",
        ),
        "norms of a stage whose gradients stay a rank's own": (
            "gpt2", [(reduce, "partial_axes", lambda right: lambda parameter: ())],
            "norm", "differs from its replica",
        ),
    },
    "pp2,dp2": {
        "gradients of a stage that stay a data rank's own": (
            "llama", [(comm.Comm, "all_reduce_start", mutants._unreduced)],
            "norm", "in the sum over ranks or microbatches",
        ),
    },
}  # fmt: skip
