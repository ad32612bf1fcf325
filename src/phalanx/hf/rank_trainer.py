"""`transformers.Trainer` on many ranks: the same arguments and one more, the strategy.

The trainer's loop, callbacks, logs and files are its own. What depends on the number of processes
passes through its accelerator (accelerator.py); the rest of this module are the places where a
trainer reads or writes something of one rank itself:

    training_step, prediction_step     the loss of own rows becomes the loss of the whole batch
    _get_num_items_in_batch            counts the labels of all ranks
    _save, _load_...                   whole weights and states, in transformers' own files

`per_device_train_batch_size` is the batch of all devices together, so the numbers are the ones of
one process, and a script needs no other settings on more devices.

The names with an underscore are private to transformers; tests/hf/test_rank_trainer.py pins them.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from transformers.trainer import Trainer as PlainTrainer
from typing_extensions import override

import phalanx
from phalanx.comm.comm import fill_shard
from phalanx.comm.together import barrier
from phalanx.data.rows import map_tensors
from phalanx.errors import ConfigError, ScriptError
from phalanx.hf.accelerator import WHOLE, RankAccelerator, Rows, appear_alone
from phalanx.launch.attach import leave_at_end
from phalanx.launch.rank_env import is_under_torchrun
from phalanx.script.optimizer import split_state
from phalanx.script.run import Run
from phalanx.strategy import Strategy

SUPPORTED: Final = ("5.23",)
"""Versions of transformers whose trainer the tests ran."""

_OTHER_WAYS: Final = ("deepspeed", "fsdp", "parallelism_config", "auto_find_batch_size")


class _BatchLoss(Tensor):
    """Loss of a whole batch, which `repeat` repeats for this rank's rows of it.

    The evaluation loop repeats a loss batch_size times and drops the last ones of a smaller batch.
    """

    num_rows = 0

    @override
    def repeat(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor).expand(self.num_rows)


class RankTrainer(PlainTrainer):
    """Mixin that trains by a strategy, for `transformers.Trainer` and its subclasses.

        class MyTrainer(RankTrainer, trl.SFTTrainer): ...

    Args:
        strategy: parallelism strategy, such as "fsdp2"; if None, the strategy of `phalanx run`, or
            dp over all ranks.

    Raises:
        ConfigError: the installed transformers is not in `SUPPORTED`, the arguments ask for another
            way to distribute, or as for `phalanx.init`.
    """

    def __init__(self, *args: Any, strategy: str | Strategy | None = None, **kwargs: Any) -> None:
        version = transformers.__version__
        if version.rsplit(".", 1)[0] not in SUPPORTED:
            raise ConfigError(
                f"phalanx.hf: transformers is {version}; expected {' or '.join(SUPPORTED)}.x, on "
                "whose trainer phalanx.hf was tested"
            )
        self._strategy = strategy
        self._num_counted: Any = None
        self._divides_by_items: bool | None = None
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is not None and self.ranks.num_data_ranks > 1:
            compute: Any = self.compute_loss_func

            def of_all_rows(outputs: Any, labels: Any, **kwargs: Any) -> Tensor:
                own: Any = (outputs, labels)
                if not self.ranks.rows.own:
                    own = map_tensors(own, lambda t: t[:0] if t.ndim else t)
                return compute(*self.ranks.run.gather(*own), **kwargs)

            self.compute_loss_func = of_all_rows
        is_balanced = getattr(getattr(self.model, "config", None), "output_router_logits", False)
        if is_balanced and self.ranks.num_data_ranks > 1 and self.ranks.run.is_first:
            warnings.warn(
                "phalanx.hf: output_router_logits of the model's config is True, so its loss has a "
                "balancing loss of each rank's own rows, not of the batch; set it to False, or "
                "gather out.router_logits in a loop of your own, see docs/your_model.md",
                stacklevel=2,
            )

    @property
    def ranks(self) -> RankAccelerator:
        """The accelerator, which shares the work among the ranks."""
        return cast(RankAccelerator, self.accelerator)

    @override
    def create_accelerator_and_postprocess(self) -> None:
        asked = [name for name in _OTHER_WAYS if getattr(self.args, name, None)]
        if asked:
            raise ConfigError(
                f"phalanx.hf: the training arguments have {' and '.join(asked)}; leave them out, "
                "because the strategy says how to distribute"
            )
        if is_under_torchrun():
            leave_at_end()  # TrainingArguments may have joined the job
        run = self.new_run()
        if run.strategy.tp.degree > 1 and self.args.gradient_checkpointing:
            raise ConfigError(
                f"phalanx.hf: gradient_checkpointing is True under '{run.strategy}'; a block that "
                "tp splits is computed again by the strategy: set gradient_checkpointing=False, "
                f"and strategy='{run.strategy},recompute:full'"
            )
        appear_alone(run)
        super().create_accelerator_and_postprocess()
        RankAccelerator.adopt(self, run)
        self.gather_function = self.accelerator.gather_for_metrics

    def new_run(self) -> Run:
        """Join the job as a run that trains a model."""
        args = self.args
        return phalanx.init(
            self._strategy,
            accumulation=args.gradient_accumulation_steps,
            seed=args.seed,
            device="cpu" if args.use_cpu else "auto",
        )

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        appear_alone(self.ranks.run)  # other TrainingArguments may have been made since
        return super().train(*args, **kwargs)

    @override
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        appear_alone(self.ranks.run)
        return super().evaluation_loop(*args, **kwargs)

    # A step.

    @override
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        ranks = self.ranks
        count: Any = super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(count, Tensor):
            # A copy of the batch, as in an evaluation, has no positions.
            known = [b if b.total else ranks.rows for b in batch_samples]
            if spare := [b for b in known if not b.own]:
                count -= cast(Any, super()._get_num_items_in_batch(spare, device))
            count = ranks.run.sum(count).to(count)
        self._num_counted = count
        return count

    @override
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._share(model, inputs, num_items_in_batch)
        super().training_step(model, inputs, num_items_in_batch)
        return self.ranks.loss

    @override
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        rows = self._rows_of(inputs)
        self._num_counted = None
        loss, *others = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            self._share(model, rows, self._num_counted)
            loss = self.ranks.whole_loss(loss).as_subclass(_BatchLoss)
            loss.num_rows = len(rows.own)
        return (loss, *others)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """Compute log probabilities of the reference model, see trl.DPOTrainer."""
        self._rows_of(inputs)
        return cast(Any, super()).compute_ref_log_probs(model, inputs)

    def _rows_of(self, inputs: Any) -> Rows:
        if not isinstance(inputs, Rows) or not inputs.total:
            raise ScriptError(
                "the batch is not from a DataLoader that the trainer's accelerator has prepared, "
                "so each rank would compute all of its rows; return "
                "self.accelerator.prepare(loader) from get_train_dataloader or get_eval_dataloader"
            )
        self.ranks.rows = inputs
        return inputs

    def _share(self, model: Any, inputs: Any, num_items: Any) -> None:
        """Set the weight of this rank's rows in the loss of a batch.

        The loss of own rows is     divided by              so the loss of the whole batch is
        a sum                       `num_items` of all      the sum over the ranks
        a mean                      its labels or rows      the mean weighted by their number
        """
        ranks, rows = self.ranks, self._rows_of(inputs)
        if self.compute_loss_func is not None:  # of gathered rows
            ranks.share = WHOLE
        elif num_items is not None and self._is_sum(model, rows, num_items):
            ranks.share = float(bool(rows.own)), 1 / ranks.num_data_ranks
        else:
            labels, count = rows.get("labels"), len(rows.own)
            if count and isinstance(labels, Tensor) and not labels.is_floating_point():
                labels = labels[..., 1:] if self._loss_shifts_labels else labels
                count = rows.get("shift_labels", labels).ne(-100).sum()
            ranks.share = count, count

    def _is_sum(self, model: Any, rows: Rows, num_items: Any) -> bool:
        """Return whether the loss is a sum that is divided by `num_items`; all ranks call this."""
        stated = getattr(self, "loss_is_scaled_for_ga", None)
        owner = next(c for c in type(self).__mro__ if "compute_loss" in vars(c))
        is_known = owner.__module__.partition(".")[0] in ("transformers", "trl")
        if stated is None and not is_known and self.ranks.num_data_ranks > 1:
            raise ScriptError(
                f"{owner.__name__}.compute_loss returns a loss of this rank's rows; set "
                "loss_is_scaled_for_ga = False in the class if it is their mean, or True if it is "
                "their sum divided by num_items_in_batch"
            )
        if stated is not None or not self.model_accepts_loss_kwargs or self.label_smoother:
            return bool(self.model_accepts_loss_kwargs if stated is None else stated)
        if self._divides_by_items is None:
            self._divides_by_items = self._loss_shifts_labels
            # Other losses may ignore the number, as of transformers' classifiers of sequences.
            if not self._loss_shifts_labels and self.ranks.num_data_ranks > 1:
                self._divides_by_items = self._halves(model, rows, num_items)
        return self._divides_by_items

    def _halves(self, model: Any, rows: Rows, num_items: Any) -> bool:
        """Return whether the loss of rows is half as large for twice the `num_items`."""
        was_training = model.training
        model.eval()  # no dropout, no statistics
        with torch.no_grad(), self.compute_loss_context_manager():
            sums: list[Tensor] = []
            for number in (num_items, 2 * num_items):
                own = self._prepare_inputs({**rows})
                loss: Any = self.compute_loss(model, own, num_items_in_batch=number)
                sums.append(self.ranks.run.sum(loss.nan_to_num()))
        model.train(was_training)
        return bool(sums[1] < 0.75 * sums[0])

    @override
    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False  # so that accelerator.clip_grad_norm_ is called

    @override
    def floating_point_ops(self, inputs: Any) -> int:
        return super().floating_point_ops(inputs) if self._rows_of(inputs).own else 0

    @override
    def store_flos(self) -> None:
        self.current_flos = float(self.ranks.run.sum(self.current_flos))
        super().store_flos()

    # Files, which only the first rank writes.

    @override
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and self.ranks.trained is not None:
            state_dict = self.ranks.run.state_dict()
        super()._save(output_dir, state_dict)
        barrier()  # other ranks look for the folder of the best model

    @override
    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer
        state = optimizer.state_dict()
        # In the order of the state, which is equal on all ranks: each tensor is gathered by all.
        whole = {
            at: {key: _whole(value, self.args.should_save) for key, value in values.items()}
            for at, values in state["state"].items()
        }
        whole_state: dict[str, Any] = {**state, "state": whole}
        given = optimizer.state_dict
        optimizer.state_dict = lambda: whole_state
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            optimizer.state_dict = given

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        optimizer: Any = self.optimizer
        if checkpoint is not None:
            split_state(getattr(optimizer, "optimizer", optimizer))
            step = self.ranks.run._prepared.step  # pyright: ignore[reportPrivateUsage]
            if step is not None:
                step.steps_done = self.state.global_step  # dropout continues its masks

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _loads_whole(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @override
    def _load_best_model(self) -> None:
        with _loads_whole(self.model):
            super()._load_best_model()


def _whole(value: Any, is_kept: bool) -> Any:
    """Return a value of an optimizer's state, gathered by all ranks, on the CPU if it is kept."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, Tensor):
        return value.cpu() if is_kept else None
    return value


@contextmanager
def _loads_whole(model: Any) -> Generator[None]:
    """Let `load_state_dict` of a split model take whole weights, as transformers and PEFT read."""

    @torch.no_grad()
    def load(state: Mapping[str, Tensor], *_: Any, **__: Any) -> Any:
        own: dict[str, Any] = type(model).state_dict(model, keep_vars=True)
        for name in own.keys() & state.keys():
            fill_shard(own[name], state[name])
        keys = [*(own.keys() - state.keys())], [*(state.keys() - own.keys())]
        return cast(Any, torch_module)._IncompatibleKeys(*keys)

    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        yield
        return
    model.load_state_dict = load
    try:
        yield
    finally:
        del model.load_state_dict


class Trainer(RankTrainer):
    """`transformers.Trainer` with the argument `strategy`, see `RankTrainer`."""
