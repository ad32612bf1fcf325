"""What users do wrong in a loop of their own: each mistake gets one sentence that names it."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from loops import Numbers, Twice, normed, perceptron
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import phalanx
from phalanx.errors import PhalanxError
from phalanx.launch.local import run_ranks


class Script:
    """A prepared loop, one batch into its first pass."""

    def __init__(self, strategy: str = "dp2", accumulation: int = 1) -> None:
        self.run = phalanx.init(strategy, accumulation=accumulation)
        self.plain = perceptron().double()
        self.before = torch.optim.SGD(self.plain.parameters(), 0.1)
        loader = DataLoader(Numbers(), 8)
        self.model, self.optimizer, self.loader = self.run.prepare(self.plain, self.before, loader)
        self.x, self.y = next(iter(self.loader))

    def loss(self, reduction: str = "sum") -> torch.Tensor:
        return cross_entropy(self.model(self.x), self.y, reduction=reduction)

    def backward(self) -> None:
        self.run.backward(sum_of_rows=self.loss(), count=len(self.y))


def a_mean_of_own_rows() -> None:
    script = Script()
    script.run.backward(script.loss("mean"))


def a_loss_and_its_count() -> None:
    script = Script()
    cast(Any, script.run.backward)(script.loss(), len(script.y))


def a_mean_and_its_count() -> None:
    script = Script()
    script.run.backward(script.loss("mean"), count=len(script.y))


def a_vector_as_a_sum() -> None:
    script = Script()
    script.run.backward(sum_of_rows=script.loss("none"), count=len(script.y))


def weights_of_another_shape() -> None:
    script = Script()
    script.run.backward(script.loss("none"), weights=torch.ones(1))


def a_count_below_0() -> None:
    script = Script()
    script.run.backward(sum_of_rows=script.loss(), count=torch.tensor(-3.0))


def a_term_of_own_rows_without_a_value() -> None:
    """A surrogate loss, whose value is 0 on every rank."""
    script = Script()
    out, y = script.run.gather(script.model(script.x), script.y)
    own = script.loss()
    script.run.backward(cross_entropy(out, y) + own - own.detach())


def a_later_term_of_own_rows_without_a_value() -> None:
    script = Script()
    for number in range(4):
        out, y = script.run.gather(script.model(script.x), script.y)
        own = script.loss() if number == 3 else torch.zeros(())
        penalty = 0.01 * sum(p.square().sum() for p in script.model.parameters())
        script.run.backward(cross_entropy(out, y) + penalty + own - own.detach())
        script.optimizer.step()
        script.optimizer.zero_grad()


def a_gather_within_a_reentrant_checkpoint() -> None:
    script = Script()
    y = script.run.gather(script.y)
    out = script.model(script.x)
    loss = checkpoint(lambda out: cross_entropy(script.run.gather(out), y), out, use_reentrant=True)
    script.run.backward(loss)


def own_losses_of_other_gathers() -> None:
    script = Script()
    out = script.model(script.x)
    every = script.run.gather(out)
    loss = cross_entropy(out, script.y)
    if script.run.rank == 1:
        loss = loss + every.logsumexp(0).sum()
    script.run.backward(mean_of_rows=loss, count=4)


def a_number_expanded_to_rows() -> None:
    script = Script()
    script.run.gather(script.loss().expand(len(script.y)))


def a_term_of_own_rows() -> None:
    script = Script()
    out, y = script.run.gather(script.model(script.x), script.y)
    script.run.backward(cross_entropy(out, y) + 0.1 * script.loss())


def the_same_rows_on_all_ranks() -> None:
    script = Script()
    script.run.backward(script.model(torch.ones(4, 6).double()).sum())
    script.optimizer.step()


def a_parameter_outside_the_model() -> None:
    script = Script()
    scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    loss = cross_entropy(script.model(script.x) * scale, script.y)
    script.run.backward(mean_of_rows=loss, count=len(script.y))


def a_gathered_parameter_outside_the_model() -> None:
    script = Script("fsdp2")
    scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    out, y = script.run.gather(script.model(script.x) * scale, script.y)
    script.run.backward(cross_entropy(out, y))


def a_loss_that_is_not_finite() -> None:
    script = Script()
    out, y = script.run.gather(script.model(script.x), script.y)
    script.run.backward(cross_entropy(out, y) * float("nan"))
    script.optimizer.step()


def a_mean_over_no_rows() -> None:
    """Its gradient is NaN on rank 1, which has the count 0."""
    script = Script()
    is_odd = script.run.rank == 1
    loss = script.loss() * (0 if is_odd else 1) / torch.tensor(0.0 if is_odd else 4.0)
    script.run.backward(mean_of_rows=loss, count=0 if is_odd else 4)
    script.optimizer.step()


def a_sum_of_losses() -> None:
    script = Script()
    script.run.sum(script.loss())


def no_graph() -> None:
    script = Script()
    with torch.no_grad():
        script.backward()


def a_count_of_each() -> None:
    script = Script()
    script.run.backward(sum_of_rows=script.loss(), count=torch.ones(4))


def forgotten_backward() -> None:
    Script().optimizer.step()


def two_steps() -> None:
    script = Script()
    script.backward()
    script.optimizer.step()
    script.optimizer.zero_grad()
    script.optimizer.step()
    script.optimizer.zero_grad()


def a_backward_of_torch() -> None:
    script = Script()
    script.loss().backward()
    script.optimizer.step()
    script.optimizer.zero_grad()


def zeroed_too_early() -> None:
    script = Script()
    script.backward()
    script.optimizer.zero_grad()
    script.optimizer.step()


def a_loss_beside() -> None:
    script = Script()
    script.backward()
    script.optimizer.step()
    script.optimizer.zero_grad()
    script.loss().backward()
    script.backward()


def a_draw_without_a_batch() -> None:
    run = phalanx.init("dp2")
    run.prepare(perceptron())
    run.draw(torch.randn)


def a_draw_of_other_rows() -> None:
    script = Script()
    script.run.draw(lambda _: torch.randn_like(script.x))


def a_step_of_one_rank() -> None:
    script = Script()
    for _ in range(3):
        script.backward()
        if script.run.is_first:
            script.optimizer.step()
        script.optimizer.zero_grad()


def a_second_step_of_one_rank() -> None:
    """Each rank has batches of its own, so that no loader is prepared."""
    run = phalanx.init("dp2")
    torch.manual_seed(0)
    plain = perceptron()
    model, optimizer = run.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    for number in range(4):
        run.backward(sum_of_rows=model(torch.ones(4, 6) + run.comm.coord("dp")).sum(), count=4)
        if number != 1 or run.is_first:
            optimizer.step()
        optimizer.zero_grad()


def a_rate_of_one_rank() -> None:
    script = Script()
    script.optimizer.param_groups[0]["lr"] = 0.1 + script.run.comm.coord("dp")
    script.run.save("runs/nowhere")


def a_clip_of_one_rank() -> None:
    script = Script()
    script.backward()
    if script.run.is_first:
        script.run.clip(0.1)
    script.optimizer.step()
    script.optimizer.zero_grad()
    for _ in range(2):
        script.backward()


def gradients_clipped_on_one_rank() -> None:
    script = Script()
    script.backward()
    if script.run.is_first:
        nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)
    script.optimizer.step()
    script.optimizer.zero_grad()
    script.run.state_dict()


def weights_loaded_on_one_rank() -> None:
    script = Script()
    if script.run.is_first:
        script.model.load_state_dict(perceptron().state_dict())
    script.backward()
    script.optimizer.step()
    script.optimizer.zero_grad()
    with torch.no_grad():
        for x, _ in script.run.prepare(DataLoader(Numbers(), 8)):
            script.run.sum(len(x))


def a_pass_left_within_a_step() -> None:
    script = Script(accumulation=3)
    for _ in range(2):
        for x, y in script.loader:
            script.run.backward(
                sum_of_rows=cross_entropy(script.model(x), y, reduction="sum"), count=len(y)
            )
            break


def a_zip_that_the_second_ends() -> None:
    script = Script(accumulation=3)
    short = script.run.prepare(DataLoader(range(16), 4))
    for _ in range(2):
        for (x, y), _ in zip(script.loader, short, strict=False):
            script.run.backward(
                sum_of_rows=cross_entropy(script.model(x), y, reduction="sum"), count=len(y)
            )
            if script.run.is_step_end:
                script.optimizer.step()
                script.optimizer.zero_grad()


def saved_within_a_step() -> None:
    script = Script(accumulation=3)
    script.backward()
    script.run.save("runs/nowhere")


def saved_after_a_step_of_one_rank() -> None:
    script = Script()
    script.backward()
    if script.run.is_first:
        script.optimizer.step()
        script.optimizer.zero_grad()
    script.run.save("runs/nowhere")


def a_state_on_one_rank() -> None:
    script = Script()
    if script.run.is_first:
        weight = next(script.model.parameters())
        script.optimizer.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    script.run.save("runs/nowhere")


def an_optimizer_of_whole_parameters() -> None:
    run = phalanx.init("fsdp2")
    model = perceptron()
    run.prepare(model, torch.optim.LBFGS(model.parameters()))


def a_dropout_that_is_recomputed_with_other_draws() -> None:
    run = phalanx.init("dp2")
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(), 8))
    x, y = next(iter(loader))
    logits = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    run.backward(sum_of_rows=cross_entropy(logits, y, reduction="sum"), count=len(y))


def a_device_that_is_not_the_jobs() -> None:
    phalanx.init("dp2", device="cuda")


def a_step_within_an_accumulation() -> None:
    script = Script(accumulation=3)
    script.backward()
    script.optimizer.step()
    script.optimizer.zero_grad()


def clipped_too_early() -> None:
    Script().run.clip(1.0)


def optimizer_not_prepared() -> None:
    run = phalanx.init("fsdp2")
    plain = perceptron()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model, loader = run.prepare(plain, DataLoader(TensorDataset(torch.randn(8, 6)), 4))
    (x,) = next(iter(loader))
    run.backward(sum_of_rows=model(x).sum(), count=len(x))
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of_another_model() -> None:
    run = phalanx.init("dp2")
    run.prepare(perceptron(), torch.optim.SGD(perceptron().parameters(), 0.1))


def cast_afterwards() -> None:
    script = Script("fsdp2")
    script.model.float()
    script.x = script.x.float()
    script.backward()


def a_penalty_on_shards() -> None:
    script = Script("fsdp2")
    penalty = sum(parameter.abs().sum() for parameter in script.model.parameters())
    script.run.backward(sum_of_rows=script.loss() + 0.01 * penalty, count=len(script.y))


def frozen_afterwards() -> None:
    script = Script("fsdp2")
    script.model[0].requires_grad_(False)
    script.backward()


def hooked_beside_an_accumulation() -> None:
    script = Script(accumulation=2)
    script.model[0].weight.register_hook(lambda gradient: 2 * gradient)
    script.backward()


def stepped_within_backward() -> None:
    model = perceptron()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    phalanx.init("dp2").prepare(model)


def extended_afterwards() -> None:
    script = Script()
    script.model.add_module("more", nn.Linear(5, 5).double())
    script.backward()


def a_parameter_replaced() -> None:
    script = Script()
    script.model[0].weight = nn.Parameter(torch.zeros(10, 6).double())
    script.backward()


def weights_put_in_place() -> None:
    script = Script()
    script.backward()
    script.optimizer.step()
    script.optimizer.zero_grad()
    script.model.load_state_dict(perceptron().double().state_dict(), assign=True)
    script.run.save("runs/nowhere")


def a_module_replaced_under_fsdp() -> None:
    script = Script("fsdp2")
    script.model[0] = nn.Linear(6, 10).double()
    script.backward()


def a_schedule_of_another_optimizer() -> None:
    script = Script()
    other = torch.optim.Adam(script.plain.parameters())
    script.run.prepare(torch.optim.lr_scheduler.StepLR(other, 1))


def registered_after_resume() -> None:
    script = Script()
    script.run.resume("runs/nowhere")
    script.run.register("schedule", torch.optim.lr_scheduler.StepLR(script.optimizer, 1))


def wrapped_before() -> None:
    phalanx.init("dp2").prepare(nn.parallel.DistributedDataParallel(perceptron()))


def on_meta() -> None:
    with torch.device("meta"):
        model = perceptron()
    phalanx.init("dp2").prepare(model)


def prepared_twice() -> None:
    script = Script()
    script.run.prepare(script.model)


def a_function() -> None:
    phalanx.init("dp2").prepare(cross_entropy)


def not_prepared() -> None:
    run = phalanx.init("dp2")
    run.backward(sum_of_rows=perceptron()(torch.ones(1, 6)).sum(), count=1)


def shared_memory_of_one_rank() -> None:
    phalanx.init("dp2", shared_memory=dist.get_rank() == 0)


def calls_compared_on_one_rank() -> None:
    phalanx.init("dp2", debug_comm=dist.get_rank() == 0)


def a_batch_left_out_on_one_rank() -> None:
    script = Script()
    batches = iter(script.loader)
    for _ in range(2 if script.run.is_first else 1):
        next(batches)
    for _ in range(2):
        script.backward()
        script.optimizer.step()
        script.optimizer.zero_grad()


def models_that_differ() -> None:
    run = phalanx.init("dp2")
    run.prepare(nn.Linear(2, 2 if run.is_first else 3))


def gathered_numbers() -> None:
    phalanx.init("dp2").gather(torch.tensor(1.0))


def gathered_rows_of_several_batches() -> None:
    script = Script()
    script.run.gather(torch.cat([script.x, script.x]))


def gathered_rows_of_unlike_lengths() -> None:
    run = phalanx.init("dp2")
    run.gather(torch.zeros(2, 3 if run.is_first else 4))


def a_distributed_sampler() -> None:
    dataset = Numbers()
    loader = DataLoader(dataset, 8, sampler=DistributedSampler(dataset, 4, 0))
    phalanx.init("dp2").prepare(loader)


def small_batches() -> None:
    phalanx.init("dp2").prepare(DataLoader(Numbers(), 1))


def no_batches() -> None:
    phalanx.init("dp2").prepare(DataLoader(Numbers(), batch_size=None))


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


def no_length() -> None:
    phalanx.init("dp2").prepare(DataLoader(Endless(), 8))


def batch_norm() -> None:
    phalanx.init("dp2").prepare(normed())


def a_max_norm() -> None:
    phalanx.init("dp2").prepare(nn.Sequential(nn.Embedding(5, 2, max_norm=1.0)))


def an_unknown_batch_norm() -> None:
    phalanx.init("dp2").prepare(normed(), batch_norm="all")  # pyright: ignore[reportArgumentType]


def a_pipeline() -> None:
    phalanx.init("pp2")


def too_many_ranks() -> None:
    phalanx.init("dp4")


def no_accumulation() -> None:
    phalanx.init("dp2", accumulation=0)


def a_layer_of_no_role() -> None:
    phalanx.init("tp2").prepare(Twice())


def a_number_for_a_strategy() -> None:
    phalanx.init(3)


def gathered_unlike_batches() -> None:
    run = phalanx.init("dp2")
    run.gather((torch.zeros(2), torch.zeros(2)) if run.is_first else torch.zeros(2))


def summed_in_a_fork() -> None:
    run = phalanx.init("dp2")
    pipe = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_sum, args=(run, pipe[1]))
    process.start()
    said = pipe[0].recv()
    process.join()
    raise said


def _sum(run: phalanx.Run, line: Any) -> None:
    try:
        run.sum(1)
    except PhalanxError as error:
        line.send(error)


def turned_round() -> None:
    Script().run.clip(-1.0)


def clipped_by_no_number() -> None:
    Script().run.clip(float("nan"))


def a_negative_power() -> None:
    Script().run.clip(1.0, p=-1)


def a_count_that_is_none() -> None:
    script = Script()
    script.run.backward(sum_of_rows=script.loss(), count=float("nan"))


def an_optimizer_again() -> None:
    script = Script()
    script.run.prepare(script.optimizer)


def saved_nowhere() -> None:
    Script().run.save(None)  # pyright: ignore[reportArgumentType]


def kept_none() -> None:
    Script().run.save("runs/nowhere", keep=-1)


def kept_zero() -> None:
    Script().run.save("runs/nowhere", keep=0)


def resumed_from_a_number() -> None:
    Script().run.resume(3)  # pyright: ignore[reportArgumentType]


def resumed_from_a_file() -> None:
    Script().run.resume(__file__)


def a_sum_of_text() -> None:
    Script().run.sum("a")  # pyright: ignore[reportArgumentType]


def a_sum_of_unlike_shapes() -> None:
    run = phalanx.init("dp2")
    run.sum(torch.zeros(5) if run.is_first else 0)


def a_mean_of_unlike_shapes() -> None:
    run = phalanx.init("dp2")
    run.mean(torch.zeros(2, 3) if run.is_first else torch.zeros(6), 4)


MISTAKES: dict[Callable[[], None], str] = {
    a_mean_of_own_rows: r"the loss is 1.\d+ on rank 0 and 1.\d+ on rank 1; expected the loss of "
    r"the whole batch, .*; write .* run.gather.*run.backward\(mean_of_rows=loss, count=len\(y\)\)",
    a_loss_and_its_count: r"expected one loss, and a count with a loss of rows; write the loss of",
    a_mean_and_its_count: r"expected one loss, and a count with a loss of rows; write the loss of",
    a_vector_as_a_sum: r"backward: the loss is a tensor of shape \(4,\); expected one number",
    weights_of_another_shape: r"losses have the shape \(4,\) and the weights \(1,\); expected",
    a_count_below_0: r"the counts of the ranks are -3, -3; expected .* finite and not negative",
    a_term_of_own_rows_without_a_value: r"a term of the loss is computed from this rank's own rows"
    r": without gathered rows the gradient of \S+ has the norm",
    a_later_term_of_own_rows_without_a_value: r"a term of the loss is computed from .* own rows",
    a_gather_within_a_reentrant_checkpoint: r"through a reentrant checkpoint, within which no",
    own_losses_of_other_gathers: r"the losses of rows reach other gathers on some ranks",
    a_number_expanded_to_rows: r"shape \(4,\) is a number of this rank's rows, expanded to them",
    a_term_of_own_rows: r"the loss is .* on rank 0 and .*: a part of it is computed from this",
    the_same_rows_on_all_ranks: r"optimizer.step\(\): no loss .* is computed from rows that run.",
    a_mean_over_no_rows: r"step 1: the loss is not finite \(nan on rank",
    a_parameter_outside_the_model: r"a parameter of shape \(1,\) that is not in the prepared model",
    a_gathered_parameter_outside_the_model: r"not in the prepared model, .*nn\.ModuleDict",
    a_loss_that_is_not_finite: r"step 1: the loss is not finite \(nan on rank .*nonfinite='skip'",
    a_sum_of_losses: r"sum: the number has a graph, .*run.gather.*run.sum\(value.detach\(\)\)",
    no_graph: r"the loss has no graph.*outside torch.no_grad",
    a_count_of_each: r"the count is a tensor of shape \(4,\)",
    forgotten_backward: r"optimizer.step\(\) without a run.backward",
    two_steps: r"optimizer.step\(\) without a run.backward since its last step",
    a_backward_of_torch: r"gradients of this rank alone: loss.backward\(\) was called",
    zeroed_too_early: r"zero_grad\(\) came between run.backward and the step",
    a_loss_beside: r"gradients of this rank alone, as loss.backward\(\) adds them; call run.backw",
    a_step_of_one_rank: r"rank 0 has taken \d steps and rank 1 has taken \d, so their weights",
    a_second_step_of_one_rank: r"rank 0 has taken 2 steps and rank 1 has taken 1, so their",
    a_rate_of_one_rank: r"save: lr of group 0 of SGD is 0.1 on rank 0 and 1.1 on rank 1; step",
    a_clip_of_one_rank: r"backward: run.clip was called 1 times on rank 0 and 0 times on rank 1",
    gradients_clipped_on_one_rank: r"state_dict: 0.weight differs: its elements add up to .*, and "
    r"clip gradients by run.clip",
    weights_loaded_on_one_rank: r"sum: 0.weight differs: .* changed on one rank only; change them",
    a_pass_left_within_a_step: r"a pass over the loader begins within a step: .*break only where",
    a_zip_that_the_second_ends: r"a pass over the loader begins within a step: .*the shortest",
    saved_within_a_step: r"save: called between run.backward and optimizer.step\(\)",
    an_optimizer_of_whole_parameters: r"LBFGS does not support sharded.*use dp, or one of",
    a_dropout_that_is_recomputed_with_other_draws: "dropout '1' is recomputed.*preserve_rng_state",
    a_device_that_is_not_the_jobs: r"device is cuda, but this process has joined a job on cpu",
    a_step_within_an_accumulation: r"after 1 of 3 calls of run.backward.*accumulation=1",
    clipped_too_early: r"clip: there are no gradients of a complete step",
    optimizer_not_prepared: r"no optimizer is prepared",
    optimizer_of_another_model: r"the SGD updates a parameter of shape \(10, 6\) in group 0",
    cast_afterwards: r"0.weight was float64 on cpu when.* is float32 on cpu",
    hooked_beside_an_accumulation: r"0.weight has a hook by register_hook.*each microbatch",
    stepped_within_backward: "0.weight has a hook by register_post_accumulate_grad_hook",
    a_penalty_on_shards: r"backward: the loss has a term computed from .*p.grad.add_\(p.sign\(\),",
    frozen_afterwards: r"0.weight was trained when.*is frozen, which shards do not support",
    extended_afterwards: r"more.weight was not in the model when the model was prepared",
    a_parameter_replaced: r"backward: 0.weight was replaced after run.prepare .*before run.prep",
    weights_put_in_place: r"save: 0.weight was replaced .*run.load_state_dict, or copy_",
    a_module_replaced_under_fsdp: r"backward: 0.weight was replaced after run.prepare",
    a_schedule_of_another_optimizer: r"the StepLR sets the .*rate of Adam, which is not prepared",
    registered_after_resume: r"'schedule' is registered after run.resume, .* before run.resume",
    wrapped_before: r"the model is a DistributedDataParallel.*give the module.*model.module",
    on_meta: r"0.weight is on the meta device, without initial weights",
    prepared_twice: r"Sequential is prepared already, and this call prepares it",
    a_function: r"cannot prepare a function; expected an nn.Module",
    not_prepared: r"backward: no model is prepared",
    shared_memory_of_one_rank: r"differ in shared_memory \(True on rank 0, False on rank 1\)",
    calls_compared_on_one_rank: r"differ in debug_comm \(True on rank 0, False on rank 1\)",
    a_batch_left_out_on_one_rank: r"the ranks have read different numbers of batches",
    models_that_differ: r"rank 1 differs from rank 0's: weight is \(3, 2\) on rank 1 and \(2, 2\)",
    gathered_numbers: r"gather: a tensor has no rows, .* compute the number from the gathered rows",
    gathered_rows_of_several_batches: r"has 8 entries .* has 4 rows; .*before .*concatenated",
    gathered_rows_of_unlike_lengths: r"the rows have different shapes .*run.gather\(out, pad=0\)",
    a_distributed_sampler: r"has num_replicas=4, .*give num_replicas=2",
    small_batches: r"batch_size is 1, the global batch, which is split over 2 .*at least 2",
    no_batches: r"has batch_size=None",
    no_length: r"Endless, or the loader's sampler, has no length",
    batch_norm: r"BatchNorm1d '1' takes mean and variance.*batch_norm='global'.*'local'",
    a_max_norm: r"Embedding '0' has a max_norm, so a forward rescales the weights",
    an_unknown_batch_norm: r"batch_norm is 'all'; expected 'global' or 'local'",
    a_pipeline: r"'pp2' has pp: a pipeline runs the forward itself",
    too_many_ranks: r"'dp4' needs 4 ranks, but there are 2",
    no_accumulation: r"accumulation is 0; expected at least 1",
    a_number_for_a_strategy: r"init: strategy is 3; expected text such as 'dp2,fsdp2'",
    gathered_unlike_batches: r"gather: the ranks give 1 and 2 tensors; give the same number",
    summed_in_a_fork: r"all_reduce: this process is a fork of a rank, such as a worker of a Data",
    turned_round: r"clip: max_norm is -1.0; expected more than 0",
    clipped_by_no_number: r"clip: max_norm is nan; expected more than 0",
    a_negative_power: r"clip: p is -1; expected more than 0",
    a_count_that_is_none: r"the count is nan; expected how many rows or tokens",
    an_optimizer_again: r"this SGD is prepared already; give it once",
    saved_nowhere: r"save: the folder is None; expected a path",
    kept_none: r"save: keep is -1; expected at least 1; the nearest is 1",
    kept_zero: r"save: keep is 0; expected at least 1",
    resumed_from_a_number: r"resume: the folder is 3; expected a path",
    resumed_from_a_file: r"resume: .*test_mistakes.py is a file; expected the folder of a run",
    saved_after_a_step_of_one_rank: r"save: rank 0 has taken 1 steps and rank 1 has taken 0",
    a_state_on_one_rank: r"the optimizer's momentum_buffer of 0.weight exists only on rank 0",
    a_draw_without_a_batch: r"draw: no batch of a prepared DataLoader has been read",
    a_draw_of_other_rows: r"draw: .* of shape \(4, 6\); expected 8 rows, the number that is",
    a_sum_of_text: r"sum: 'a' is not a number; expected a number or a tensor",
    a_sum_of_unlike_shapes: r"sum: .* shape \(\) on rank 1 and \(5,\) on rank 0; give",
    a_mean_of_unlike_shapes: r"mean: .* shape \(6,\) on rank 1 and \(2, 3\) on rank 0",
    a_layer_of_no_role: r"the roles of the modules of Twice are not known; give patterns",
}


def words_of_mistakes() -> list[str]:
    words: list[str] = []
    for mistake in MISTAKES:
        try:
            mistake()
        except PhalanxError as error:
            words.append(str(error))
        else:
            words.append(f"{mistake.__name__} passed")
    return words


def test_each_mistake_is_named_in_one_sentence() -> None:
    for rank_words in run_ranks(words_of_mistakes, 2, threads=1):
        for (mistake, pattern), words in zip(MISTAKES.items(), rank_words, strict=True):
            assert re.search(pattern, words, re.DOTALL), (mistake.__name__, words)
            assert len(words.splitlines()) == 1, mistake.__name__


def loss_of_no_rows() -> str:
    run = phalanx.init("dp2")
    model = perceptron().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Subset(Numbers(), range(9)), 8)
    _, _, loader = run.prepare(model, optimizer, loader)
    said = ""
    for number, (_, y) in enumerate(loader):
        if number == 1:
            with pytest.raises(PhalanxError) as raised:
                run.backward(sum_of_rows=torch.zeros(()), count=len(y))
            said = str(raised.value)
    return said


def test_a_loss_of_no_rows_that_has_no_graph_names_the_batch() -> None:
    """Of the last batch, of one row, rank 1 has none: as where each expert takes some rows."""
    first, other = run_ranks(loss_of_no_rows, 2, threads=1)
    assert "compute it outside torch.no_grad()" in first
    assert "the batch of this rank has no rows" in other and "drop_last=True" in other


def saved_without_its_schedule(folder: str, is_registered: bool) -> list[str]:
    script = Script()
    scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
    if is_registered:
        script.run.register("schedule", scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            script.backward()
            script.optimizer.step()
            script.optimizer.zero_grad()
            scheduler.step()
            script.run.save(folder)
    return [str(each.message) for each in caught if "schedule" in str(each.message)]


def test_a_schedule_that_no_checkpoint_has_is_told_once(tmp_path: Path) -> None:
    args = str(tmp_path / "not"), False
    first, other = run_ranks(saved_without_its_schedule, 2, *args, threads=1)
    assert len(first) == 1
    assert re.search(r"rate of SGD and is not prepared, so no checkpoint has it", first[0])
    assert other == []
    args = str(tmp_path / "registered"), True
    assert run_ranks(saved_without_its_schedule, 2, *args, threads=1) == [[], []]


def test_a_strategy_for_many_ranks_names_the_command_on_one_process() -> None:
    words = run_ranks(words_of_one, 1)[0]
    assert re.search(r"'dp2' needs 2 ranks, but this is one process; .*--nproc 2", words)


def words_of_one() -> str:
    with pytest.raises(PhalanxError) as raised:
        phalanx.init("dp2")
    return str(raised.value)
