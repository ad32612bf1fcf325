"""Which experts the tokens of a step go to: on the ranks, and in plain PyTorch.

    ranks     Router -> experts [N, k] of each microbatch, with its rows and positions ──> rank 0
    rank 0    plain Router -> the set of experts of each token of the batch, and its margin

A selection is right or wrong, however close it was. Its margin is the distance between the last
selected and the first rejected score, relative to the largest score of the token, so it says what
rounding may decide: a set that differs is a fault if the margin is above the limit of scores, and a
tie below. In narrow types, where many tokens tie, the reference replays the routes of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.models.experts import Router
from phalanx.parallel.accumulate import Runner
from phalanx.verify.compare import Difference, limit_of
from phalanx.verify.reference import Routed
from phalanx.verify.settings import ROUTING


class Route(NamedTuple):
    """The experts [B, T, k] that a router selects in a microbatch of a rank, best first.

    Attributes:
        router: name of the router.
        rows_B: rows, numbered over all steps.
        positions_T: positions in the row; some may be padding beyond its end.
    """

    router: str
    rows_B: Tensor
    positions_T: Tensor
    experts_BTk: Tensor


class RouteRecorder:
    """Hooks on the routers of a rank's model that record the routes of a step.

    Attributes:
        is_on: whether forwards are recorded; not if backward runs one again.
    """

    def __init__(
        self, model: torch.nn.Module, runner: Runner, positions: Callable[[int], Tensor]
    ) -> None:
        """Register the hooks; `positions` is of `locate.positions_of`."""
        self.is_on = False
        self._runner, self._positions = runner, positions
        self._latest: dict[tuple[str, int], Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(partial(self._note, name))

    def _note(self, name: str, _module: Router, _args: Any, output: tuple[Tensor, Tensor]) -> None:
        if self.is_on:  # a second forward of a microbatch replaces the first
            self._latest[name, self._runner.microbatch] = output[0].detach().cpu()

    def take(self, rows: Sequence[Tensor]) -> list[Route]:
        """Return the routes since the last call; `rows` has the rows of each microbatch."""
        routes: list[Route] = []
        for (name, number), experts_Nk in self._latest.items():
            rows_B = rows[number].cpu()
            length = len(experts_Nk) // max(1, len(rows_B))
            experts_BTk = experts_Nk.view(len(rows_B), length, experts_Nk.shape[1])
            routes.append(Route(name, rows_B, self._positions(length), experts_BTk))
        self._latest.clear()
        return routes


def joined(ranks: Iterable[Sequence[Route]], first: int) -> dict[str, Tensor]:
    """Return the experts of a whole batch whose rows begin at `first`, by router, [B, T, k]."""
    by_router: dict[str, list[Route]] = {}
    for route in (each for routes in ranks for each in routes if len(each.rows_B)):
        by_router.setdefault(route.router, []).append(route)
    whole: dict[str, Tensor] = {}
    for name, routes in by_router.items():
        num_rows = 1 + max(int(route.rows_B.max()) for route in routes) - first
        length = 1 + max(int(route.positions_T.max()) for route in routes)
        experts_BTk = torch.zeros(num_rows, length, routes[0].experts_BTk.shape[2]).long()
        for route in routes:
            experts_BTk[route.rows_B[:, None] - first, route.positions_T] = route.experts_BTk
        whole[name] = experts_BTk
    return whole


def compare_routes(
    step: int,
    ranks: Sequence[Sequence[Route]],
    first: int,
    reference: Mapping[str, Routed],
    moved: Sequence[Mapping[str, Routed]],
    dtype: torch.dtype,
) -> list[Difference]:
    """Compare the sets of experts of each token of a step, whose rows begin at `first`.

    The error is the largest margin of a token whose set differs. `moved` are of perturbed
    references: what moves the margins of all tokens may decide about one.
    """
    rows: list[Difference] = []
    for name, routed in reference.items():
        margins_BT = routed.margins_BT
        finite = margins_BT.nan_to_num(posinf=0.0)
        others = [of[name].margins_BT.nan_to_num(posinf=0.0) for of in moved]
        # Of scores that are relative to the largest one, so the smallest limit is of 1.
        limit = limit_of(finite, others, dtype, 1.0)
        held = [(rank, each) for rank, of in enumerate(ranks) for each in of if each.router == name]
        worst = Difference(step, ROUTING, name, 0.0, limit)
        tied = (margins_BT == 0).nonzero().tolist()
        if tied and dtype == torch.float64:  # whichever is selected: sets that agree do so by luck
            row, place = tied[0]
            problem = f"position {place} of row {row} has equal scores on both sides of the limit"
            worst = Difference(step, ROUTING, name, 0.0, limit, problem)
        if not held:
            worst = Difference(step, ROUTING, name, float("inf"), problem="it is missing")
        for rank, route in held:
            is_real_T = route.positions_T < margins_BT.shape[1]
            rows_B1, positions_T = route.rows_B[:, None] - first, route.positions_T[is_real_T]
            selected_BTE = routed.selected_BTE[rows_B1, positions_T]
            experts_BTk = route.experts_BTk[:, is_real_T]
            ours_BTE = torch.zeros_like(selected_BTE).scatter(-1, experts_BTk, True)
            wrong = (ours_BTE != selected_BTE).any(-1).nonzero().tolist()
            for row, place in wrong:
                at = int(rows_B1[row]), int(positions_T[place])
                margin = float(margins_BT[at])
                if margin <= worst.error and worst.problem:
                    continue
                sets = [each[row, place].nonzero().flatten() for each in (ours_BTE, selected_BTE)]
                here, there = (", ".join(map(str, each.tolist())) for each in sets)
                problem = (
                    f"position {at[1]} of row {at[0]} goes to experts {here} on rank {rank}, and "
                    f"to {there} in one process by a margin of {margin:.1e}"
                )
                worst = Difference(step, ROUTING, name, margin, limit, problem)
        rows.append(worst)
    return rows
