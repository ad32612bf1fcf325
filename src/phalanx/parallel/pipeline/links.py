"""The links of a module that is a chain of submodules, and the parts of it outside of any link.

A link is one submodule, or several that always share a stage; modules.py runs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.cut import cut_chain, cut_of, num_stages, schedule_of
from phalanx.parallel.skeleton import Skeleton, Weight, blocks_of
from phalanx.strategy import Strategy

Links = Sequence[Sequence[str]]
"""Names of the modules of each link of a chain; all modules of a link are in one stage."""


@dataclass(frozen=True)
class CutChain:
    """A model as a chain of links, cut into stages.

    Attributes:
        links: the links of the model, in order.
        cut: range of links of each stage.
        tied: the weight that both the first and the last stage read, or None.
    """

    links: Links
    cut: Sequence[range]
    tied: Weight | None

    def names(self, stage: int) -> list[str]:
        """Return the names of the modules of a stage."""
        return [name for link in self.cut[stage] for name in self.links[link]]


def chain_of(strategy: Strategy, skeleton: Skeleton) -> CutChain:
    """Return the chain of a model, cut into the stages of a strategy.

    Raises:
        StrategyError: the model is no chain, or its chain does not allow this cut.
    """
    if skeleton.shape is not None:
        tied = next(w for w in skeleton.weights if w.name == "embedding.weight")
        cut = cut_of(strategy, skeleton.shape)
        blocks = [[f"blocks.{index}"] for index in range(skeleton.shape.num_layers)]
        head = ["norm", "output", *(["embedding"] if skeleton.shape.tied else [])]
        links = [["embedding", "position_embedding"], *blocks, head]
        return CutChain(links, cut, tied if skeleton.shape.tied else None)
    model = skeleton.model
    if strategy.tp.degree > 1:
        raise StrategyError(
            f"strategy '{strategy}': tp with pp supports only phalanx's Decoder, and the model is "
            f"a {type(model).__name__}; use fsdp with pp"
        )
    links = links_of(model)
    costs = [float(cost_of([model.get_submodule(name) for name in link])) for link in links]
    cut = cut_links(strategy, model, links, costs)
    chain = chain_by(skeleton, links, cut)
    rank_of = schedule_of(strategy, 1).rank_of
    for rank in range(strategy.pp.degree):
        stages = (stage for stage, of in enumerate(rank_of) if of == rank)
        names = [name for stage in stages for name in chain.names(stage)]
        if not any(_is_read(weight, names) for weight in skeleton.weights):
            raise StrategyError(
                f"pp: rank {rank} of pp has no parameter in its layers, {', '.join(names)}; choose "
                "another cut"
            )
    return chain


def cut_links(
    strategy: Strategy, model: nn.Module, links: Links, costs: Sequence[float]
) -> tuple[range, ...]:
    """Return the links of each stage: the strategy's cut, or else the best one by `costs`.

    Links that read one parameter stay in one stage if enough others are left.

    Raises:
        StrategyError: see `cut_chain`.
    """
    layers = ", ".join(map(" + ".join, links))
    # Runs of links, split wherever no parameter is read on both sides. A parameter that the links 1
    # and 3 of five read keeps 1, 2 and 3 together: [0] [1 2 3] [4]. One parameter that only the
    # first and the last link read may be tied across stages.
    readers: dict[nn.Parameter, set[int]] = {}
    for number, link in enumerate(links):
        for name in link:
            for parameter in model.get_submodule(name).parameters():
                readers.setdefault(parameter, set()).add(number)
    shared = [of for of in readers.values() if len(of) > 1]
    ends = {0, len(links) - 1}
    if shared.count(ends) == 1:
        shared.remove(ends)
    inner = {number for of in shared for number in range(min(of) + 1, max(of) + 1)}
    starts = [number for number in range(len(links)) if number not in inner]
    units = [range(*pair) for pair in itertools.pairwise([*starts, len(links)])]
    if strategy.cut or len(units) < num_stages(strategy):
        return cut_chain(strategy, costs, layers)
    sums = [sum(costs[unit.start : unit.stop]) for unit in units]
    cut = cut_chain(strategy, sums, layers)
    return tuple(range(units[part.start].start, units[part.stop - 1].stop) for part in cut)


def chain_by(skeleton: Skeleton, links: Links, cut: Sequence[range]) -> CutChain:
    """Return the chain of a model with the given links and cut; find its tied weight.

    Raises:
        StrategyError: several stages read one parameter and are not the first and the last, or
            more than one parameter is read by several stages.
    """
    chain, ends = CutChain(links, cut, None), {0, len(cut) - 1}
    names, tied = [chain.names(stage) for stage in range(len(cut))], list[Weight]()
    for weight in skeleton.weights:
        stages = [stage for stage, of in enumerate(names) if _is_read(weight, of)]
        if len(stages) > 1:
            tied.append(weight)
        if len(stages) > 1 and (set(stages) != ends or len(tied) > 1):
            raise StrategyError(
                f"pp: stages {', '.join(map(str, stages))} of {type(skeleton.model).__name__} read "
                f"one parameter, '{weight.name}'; expected at most one shared parameter, read by "
                "the first stage and the last; use fsdp"
            )
    return CutChain(links, cut, tied[0] if tied else None)


def _is_read(weight: Weight, modules: Iterable[str]) -> bool:
    """Return whether one of the named `modules` contains the parameter."""
    return any(name.startswith(f"{module}.") for name in weight.names for module in modules)


def links_of(model: nn.Module) -> Links:
    """Return the links of a module, from its attribute `chain` or from its structure.

    A `chain` lists names of submodules in the order in which they run, each one the input of the
    next; a list of names in it is one link of several modules. The links of an nn.Sequential are
    its elements. The links of any other module are the modules before its only ModuleList (as one
    link), each element of the list, and the modules after it (as one link), in the order of
    registration. Modules that are in no link, without parameters and running statistics, run in
    every stage.

    Raises:
        StrategyError: the module has none of these forms, or has parameters or running statistics
            outside of its links.
    """
    chain: Any = getattr(model, "chain", None)
    if isinstance(chain, list | tuple):
        names = cast("Sequence[str | Sequence[str]]", chain)
        links = [[each] if isinstance(each, str) else list(each) for each in names]
    elif isinstance(model, nn.Sequential):
        links = [[name] for name, _ in children(model)]
    else:
        links = _around_the_list(model)
    _check(model, links)
    return links


def _around_the_list(model: nn.Module) -> list[list[str]]:
    """Return the links: modules before the only list of blocks, each block, modules after it."""
    blocks = [name for name, _ in blocks_of(model)]
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1:
        inner = {m for _, child in children(model) for m in child.modules() if m is not child}
        outer = [name for name, child in children(model) if child not in inner]
        raise StrategyError(
            f"pp: {type(model).__name__} has {len(lists)} lists of blocks; expected one ModuleList "
            "of blocks that run one after another, an nn.Sequential, or the names of its modules "
            f"in the order in which they run, as the last line of __init__: self.chain = {outer} "
            "in that order (docs/strategies.md); layers that a skip connection "
            "bypasses, as in a U-Net, cannot be in separate stages: put them into one module, or "
            "use dp or fsdp"
        )
    (of_blocks,) = lists
    before: list[str] = []
    after: list[str] = []
    side = before

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal side
        for name, child in children(module):
            path = f"{prefix}{name}"
            if path == of_blocks:
                side = after
            elif of_blocks.startswith(f"{path}."):
                visit(child, f"{path}.")
            elif any(True for _ in child.parameters()) or _running(child):
                side.append(path)

    visit(model, "")
    return [link for link in (before, *([name] for name in blocks), after) if link]


def _running(module: nn.Module) -> list[str]:
    """Return the names of the submodules that have running statistics."""
    statistics = ((n, getattr(m, "running_mean", None)) for n, m in module.named_modules())
    return [name for name, mean in statistics if mean is not None]


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, child) of a module's children; a child with two names appears twice."""
    # `named_children` omits the second name. Private, and the only way to get all names.
    children = module._modules  # pyright: ignore[reportPrivateUsage]
    return [(name, child) for name, child in children.items() if child is not None]


def _check(model: nn.Module, links: Links) -> None:
    """Refuse links with unknown or repeated names, and parameters outside of all links."""
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [name for link in links for name in link]
    for name in named:
        if name not in modules or not name:
            raise StrategyError(
                f"pp: the `chain` of {type(model).__name__} names '{name}', which is not a module "
                "of the model; expected names as in named_modules()"
            )
        if any(f"{name}.".startswith(f"{other}.") for other in named if other != name) or (
            named.count(name) > 1
        ):
            raise StrategyError(
                f"pp: the `chain` of {type(model).__name__} names '{name}' twice, or also a module "
                "that contains it; expected each module once"
            )
    # Compare modules and not names, because a module may also have a name outside of the chain.
    held = {module for name in named for module in modules[name].modules()}
    parameters = {parameter for module in held for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if parameter not in parameters:
            raise StrategyError(
                f"pp: the parameter '{name}' of {type(model).__name__} is in no link of its chain; "
                "register it in a module that is a link, or name its module in the `chain`"
            )
    for name in _running(model):
        module = model.get_submodule(name)
        if module not in held and module.training:
            raise StrategyError(
                f"pp: '{name}' of {type(model).__name__} has running statistics, which every stage "
                "would update, and is in no link of its chain; name it in the `chain`"
            )


def cost_of(link: Sequence[nn.Module]) -> int:
    """Return the relative cost of a link: its number of parameters, without embedding tables.

    The number is proportional to the FLOPs of linear layers. It ignores the reuse of weights by
    convolutions, and attention; for such models a strategy can name the cut.
    """
    modules = {module for each in link for module in each.modules()}
    return sum(
        parameter.numel()
        for module in modules
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


class UnlinkedBuffers:
    """The persistent buffers of a model outside of all links, which stages must not change."""

    def __init__(self, model: nn.Module, links: Iterable[nn.Module]) -> None:
        """Collect the persistent buffers of modules outside of `links`."""
        held = {module for link in links for module in link.modules()}
        self._model_name = type(model).__name__
        self._found: list[tuple[str, nn.Module, str]] = []
        for path, module in model.named_modules():
            if module not in held:
                # Private, and the only record of which buffers are in the state dict.
                own = module._buffers.keys() - module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
                self._found += [(f"{path}.".lstrip("."), module, name) for name in sorted(own)]

    def states(self) -> dict[str, tuple[int, int]]:
        """Return for each buffer its identity and version, which change with the buffer."""
        buffers = {f"{prefix}{name}": getattr(m, name) for prefix, m, name in self._found}
        return {n: (id(b), b._version) for n, b in buffers.items() if b is not None}

    def check(self, before: dict[str, tuple[int, int]]) -> None:
        """Refuse buffers that have changed since `states` returned `before`."""
        for name, state in self.states().items():
            if state != before.get(name):
                raise StrategyError(
                    f"pp: the buffer '{name}' of {self._model_name} is in no link of its chain and "
                    "changes in a forward, which runs once in each stage; register it in a module "
                    "of the chain, or with persistent=False if each forward fills it anew"
                )
