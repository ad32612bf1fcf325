"""The training step of a worker with parameter servers, which sum the workers' gradients.

    ps, ssp/S      push the gradient, wait for the totals, send the update's rate and scale, pull
    async, quorum  clip the gradient by its own norm, push, pull
    local/H        see local_step.py

For an embedding table, a worker pushes only gradient rows that it looked up, and pulls a row when a
forward looks it up. A waiting worker computes tasks of lost workers. Servers hold the moments of
Adam; the worker's own optimizer has them only while a checkpoint is written.

[Note: Rates without a clock] An update of k of N workers moves the weights by k/N of the learning
rate, so that the samples of a synchronous step move them as far as that step does.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from phalanx.config.schema import ServerConfig
from phalanx.errors import ConfigError
from phalanx.parallel.sparse import sparse_tables
from phalanx.server.client import Client
from phalanx.server.flat import FlatParameters
from phalanx.server.rule import STATE_NAMES
from phalanx.server.table import EmbeddingTable, RowAdagradState
from phalanx.train.clip import scale_to
from phalanx.train.optimizer import learning_rate
from phalanx.train.step import Step, StepResult

BatchOf = Callable[[int, int], Sequence[Any]]
"""Returns the microbatches of the task (clock, slot)."""

UpdateScale = tuple[int, float, float | None]
"""Version, learning rate and gradient scale of an update; scale None skips the update."""

HELP_S: Final = 0.25
"""Seconds between two requests of a waiting worker for a task of a lost worker."""


class ServedStep(Step):
    """The step of one worker; base class of `ClockedStep`, `AsyncStep` and `LocalStep`.

    Attributes:
        client: client of the servers.
        version: version of this worker's weights.
        sums: row-wise Adagrad state of embedding tables, filled for a checkpoint.
        batch_of: returns the samples of another worker's task; None disables help.
        steps_a_task: steps of a task, that is, between two pushes.
        is_behind: whether `before_save` found weights of a later step on a server of `ps`.
    """

    client: Client
    version: int
    batch_of: BatchOf | None = None
    steps_a_task, is_behind = 1, False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sums = RowAdagradState()

    def join(self, client: Client, server: ServerConfig, *, is_first: bool) -> None:
        """Connect to the servers, initialize their weights if `is_first`, and pull the weights.

        A worker that replaces a lost one may wait here for tasks of other lost workers, so it
        computes them with `batch_of`.
        """
        self.client, self.consistency, self.server = client, client.consistency, server
        self._helped_s, self._is_over = 0.0, False
        self._totals: dict[int, list[list[float]]] = {}
        self.tables = self._find_tables()
        weights = [table.weight for table in self.tables]
        self.flat = FlatParameters(self.optimizer, self.inner_rule, weights)
        sizes, shapes = [len(each) for each in self.flat.weights], [each.shape for each in weights]
        client.lay_out(sizes, next(self.model.parameters()).dtype, tables=shapes)
        if is_first:
            kept, steps = self.kept()
            kept = [*(kept or [[] for _ in sizes]), *([each] for each in self.sums.sums)]
            flats = [*self.flat.weights, *(each.detach().view(-1) for each in weights)]
            first = (flats, self.rule(), self.config.clip_p)
            client.create(*first, self.steps_done // self.steps_a_task, kept, steps)
        self.pull(0)
        client.totals(0)
        clock = client.done[client.worker]
        self.steps_done = clock * self.steps_a_task
        needed = self.consistency.needs(clock)
        self._totals = client.totals(needed, self.help)  # with updates that no one has applied
        self.pull(needed)

    def _find_tables(self) -> list[EmbeddingTable]:
        """Return the embedding tables with sparse gradients; a tied one once."""
        found = sparse_tables(self.model)
        if found and self.server.table_rule is None:
            raise ConfigError(
                f"the embedding {next(iter(found))} has sparse gradients, but server.table_rule is "
                "unset; set it to adagrad"
            )
        tables: list[EmbeddingTable] = []
        for number, weight in enumerate(dict.fromkeys(found.values())):
            names = [name for name, each in found.items() if each is weight]
            modules = [self.model.get_submodule(name) for name in names]
            for name, module in zip(names, modules, strict=True):
                if (max_norm := getattr(module, "max_norm", None)) is not None:
                    raise ConfigError(
                        f"the embedding {name} has max_norm {max_norm:g}, with which a lookup "
                        "changes rows only on the worker; the nearest is max_norm=None"
                    )
            pull = functools.partial(self._pull_rows, number)
            tables.append(EmbeddingTable(names[0], weight, modules, pull))
        return tables

    def _pull_rows(self, table: int, rows: Tensor, target: Tensor) -> None:
        self.client.pull_rows(table, rows, target, self.version)

    def pull(self, needed: int, idle: Callable[[], None] | None = None) -> None:
        """Pull weights of at least version `needed`, and let lookups pull table rows again.

        `idle` is called while this waits.
        """
        self.version = self.client.pull(self.flat.weights, needed, self.recipes(), idle)
        for table in self.tables:
            table.expire()

    def recipes(self) -> list[UpdateScale]:
        """Return how servers shall apply complete updates that belong to a clock."""
        return []

    @property
    def inner_rule(self) -> str:
        """Name of the update rule of this worker's own optimizer, which checkpoints store."""
        return self.server.rule

    def rule(self) -> dict[str, Any]:
        """Return the servers' update rule and its hyperparameters."""
        config, server = self.config, self.server
        numbers = {"betas": [config.beta1, config.beta2], "eps": config.eps}
        numbers |= {"momentum": server.momentum, "decays": self.flat.decays}
        rate = 1.0 if server.table_lr is None else server.table_lr / config.lr
        return {"name": server.rule, **numbers, "tables": server.table_rule, "tables_rate": rate}

    def kept(self) -> tuple[list[list[Tensor]], float]:
        """Return the servers' initial optimizer state and its steps; clear the local state."""
        kept = self.flat.moments()
        self.optimizer.state.clear()
        return kept

    def before_save(self) -> None:
        """Copy the servers' weights and optimizer state to this worker, for a checkpoint.

        If this worker was stopped for long, others have computed its task, and a server may apply
        the next update while this worker reads: it then `is_behind`, and must not save.
        """
        names, num = self.flat.names, len(self.flat.weights)
        flats = [[flat, *(torch.empty_like(flat) for _ in names)] for flat in self.flat.weights]
        for weight in [table.weight.detach() for table in self.tables]:
            kept = STATE_NAMES[str(self.server.table_rule)]
            flats.append([weight.view(-1), *(weight.new_empty(len(weight)) for _ in kept)])
        steps, versions = self.client.read(flats)
        self.is_behind = self.consistency.kind == "ps" and versions != {self.steps_done}
        if steps is not None:
            self.flat.give_moments([of_group[1:] for of_group in flats[:num]], steps)
            self.sums.sums = [sums for of_table in flats[num:] for sums in of_table[1:]]

    def results(self) -> dict[int, StepResult]:
        """Return step -> result of recent steps, by the totals of the servers."""
        return {}

    def rate(self, clock: int) -> float:
        """Return the learning rate of the update of `clock`."""
        if self.num_steps is None:
            return float(self.optimizer.param_groups[0]["lr"])
        return learning_rate(self.config, clock, self.num_steps)

    def push(self, clock: int, slot: int, loss: Tensor, tokens: Tensor) -> int:
        """Push the gradients of a task in flat memory and tables; return the update's number."""
        num = float(tokens)
        numbers: dict[str, Any] = {"base": self.version, "tokens": num, "loss": float(loss) * num}
        grads = [*self.flat.grads, *(table.gradient() for table in self.tables)]
        return self.client.push(clock, slot, grads, rate=self.rate(clock), **numbers)

    def take_task(
        self, clock: int, slot: int, microbatches: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Compute and push the gradient of a task; return its loss and number of valid tokens."""
        before, self.steps_done = self.steps_done, clock
        try:
            loss, tokens = super().compute_gradients(microbatches)
            with self.phase("reduce"):
                self.finish_gradients()
                self.flat.take_gradients()
                self.push(clock, slot, loss, tokens)
        finally:
            self.steps_done = before
        return loss, tokens

    def loss_without_push(self, microbatches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return loss and valid tokens, for records; another worker has pushed the gradient."""
        found = super().compute_gradients(microbatches)
        self.optimizer.zero_grad()
        return found

    def finish_gradients(self) -> None:
        """Process the gradients of a task before they are pushed; nothing by default."""

    def help(self, *, is_through: bool = False) -> None:
        """Compute a task of a lost worker, if there is one.

        It requests a task at most every HELP_S seconds, but again at once after it computed one.
        In an asynchronous kind, a worker that `is_through` its own tasks helps live workers too.
        """
        now_s = time.monotonic()
        if self.batch_of is None or now_s - self._helped_s < HELP_S:
            return
        limit = self.version + self.consistency.staleness
        if self.consistency.is_asynchronous:
            limit = 1 << 62
        reply = self.client.ask_scheduler("help", limit=limit, is_through=is_through)
        self._helped_s, self._is_over = time.monotonic(), bool(reply["is_over"])
        if reply["task"] is not None:
            clock, slot = reply["task"]
            self.take_task(clock, slot, self.batch_of(clock, slot))
            self._helped_s = 0.0


class ClockedStep(ServedStep):
    """The step of `ps` and `ssp`, where each update belongs to a clock."""

    _found: tuple[float, float, float] | None = None

    @override
    def compute_gradients(self, microbatches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        clock, own = self.steps_done, self.client.worker
        made: tuple[Tensor, Tensor] | None = None
        if self.client.ask_scheduler("claim", clock=clock)["is_mine"]:
            made = self.take_task(clock, own, microbatches)
        with self.phase("reduce"):
            self._totals = self.client.totals(self.consistency.needs(clock + 1), self.help)
        latest = max((v for v in self._totals if v <= clock), default=None)
        self._found = None if latest is None else self._of(latest)
        if self._found is None:  # with staleness, while no update is complete yet
            return made or self.loss_without_push(microbatches)
        num_valid, loss_sum, _ = self._found
        mean = torch.tensor(loss_sum / max(num_valid, 1), dtype=torch.float64)
        return mean, torch.tensor(int(num_valid))

    def _of(self, version: int) -> tuple[float, float, float]:
        """Return valid tokens, loss sum, and norm of the mean gradient of update `version`."""
        parts, p = self._totals[version], self.config.clip_p
        tokens, loss = parts[0][0], parts[0][1]
        powers = [each[2] for each in parts]
        norm = max(powers) if math.isinf(p) else sum(powers) ** (1 / p)
        return tokens, loss, norm / max(tokens, 1)

    @override
    def results(self) -> dict[int, StepResult]:
        found: dict[int, StepResult] = {}
        for version in range(self.steps_done):
            if version in self._totals:
                tokens, loss, norm = self._of(version)
                mean, is_skipped = loss / max(tokens, 1), not math.isfinite(norm + loss)
                more = (self.rate(version), int(tokens), is_skipped)
                found[version + 1] = StepResult(mean, norm, *more)
        return found

    @override
    def norm(self, p: float) -> Tensor:
        if self._found is None or p != self.config.clip_p:
            return super().norm(p)
        return torch.tensor(self._found[2], dtype=torch.float64)

    @override
    def recipes(self) -> list[UpdateScale]:
        found: list[UpdateScale] = []
        for version in sorted(v for v in self._totals if v >= self.client.applied):
            _, loss, norm = self._of(version)
            scale, limit = 1.0, self.config.clip_norm
            if 0 < limit < norm:
                scale = min(1.0, limit / (norm + 1e-6))
            is_finite = math.isfinite(norm) and math.isfinite(loss)
            found.append((version, self.rate(version), scale if is_finite else None))
        return found

    @override
    def update(self, norm: float | None) -> None:
        self.pull(self.consistency.needs(self.steps_done + 1))


class AsyncStep(ServedStep):
    """The step of `async` and `quorum`, where updates belong to no clock."""

    _made: tuple[Tensor, Tensor] | None = None

    @override
    def compute_gradients(self, microbatches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        self._is_mine = bool(self.client.ask_scheduler("claim", clock=self.steps_done)["is_mine"])
        if not self._is_mine:  # another worker computed it; the records repeat the last loss
            self.optimizer.zero_grad()
            self._made = self._made or self.loss_without_push(microbatches)
            return self._made
        self._made = super().compute_gradients(microbatches)
        return self._made

    @override
    def finish_gradients(self) -> None:
        norm = float(self.norm(self.config.clip_p))
        if 0 < self.config.clip_norm < norm:
            scale_to(self.gradients(), norm, self.config.clip_norm)

    @override
    def update(self, norm: float | None) -> None:
        needed = 0
        if self._is_mine and self._made is not None:
            loss, tokens = self._made
            if norm is None:
                self.optimizer.zero_grad()
                loss, tokens = torch.zeros_like(loss), torch.zeros_like(tokens)
            else:
                self.finish_gradients()
            self.flat.take_gradients()
            update = self.push(self.steps_done, self.client.worker, loss, tokens)
            needed = update + 1 if self.consistency.kind == "quorum" else 0
        self.pull(needed, self.help)

    @override
    def join(self, client: Client, server: ServerConfig, *, is_first: bool) -> None:
        super().join(client, server, is_first=is_first)
        self._finish_job()

    @override
    def __call__(self, microbatches: Sequence[Any]) -> StepResult:
        result = super().__call__(microbatches)
        self._finish_job()
        return result

    def _finish_job(self) -> None:
        """After the last step, compute the remaining tasks of all workers, and pull the result."""
        if self.steps_done != self.num_steps:
            return
        while not self._is_over:
            self.client.totals(0)  # so that the scheduler hears what other groups have done
            self._helped_s = 0.0
            self.help(is_through=True)
            if self.batch_of is None:
                break
            time.sleep(HELP_S / 10)
        self.pull(0)
