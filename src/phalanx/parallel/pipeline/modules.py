"""The stages of any module that is a chain of others: nn.Sequential, a decoder of transformers.

A forward of the whole module runs, and a stage is cut out of it:

    embedding    block 0     block 1     block 2     norm, head
    `Absent`     `Absent`    runs        `Absent`
    is passed    is passed   takes what  is where the stage
    by           by          was sent    is left, with its input

Absent modules have no parameters, but of a tied weight, and what they give is not a number. The
forward is left by an exception, which passes through whatever the module and the objective do with
an output: they are written for one process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from phalanx.errors import StrategyError
from phalanx.parallel.blocks import blocks_of
from phalanx.parallel.pipeline.awaited import Awaited, StandIn, await_, received_for
from phalanx.parallel.pipeline.stage import Absent, Stages

Links = Sequence[Sequence[str]]
"""Names of the modules of each link of a chain; those of a link are always in one stage."""


def links_of(model: nn.Module) -> Links:
    """Return the links of a module: what it names as its `chain`, or what its form shows.

    A `chain` is a list of names of submodules, in the order in which they run, each the input of
    the next; or lists of names, for several that make one link. The links of an nn.Sequential are
    its elements. Of another module they are what is before its one ModuleList, each element of the
    list, and what is after it, in the order of registration. Modules without parameters, as far as
    no link names them, run in every stage.

    Raises:
        StrategyError: the module is none of these, or it has parameters in no link.
    """
    given: Any = getattr(model, "chain", None)
    if isinstance(given, list | tuple):
        names = cast("Sequence[str | Sequence[str]]", given)
        links = [[each] if isinstance(each, str) else list(each) for each in names]
    elif isinstance(model, nn.Sequential):
        links = [[name] for name, _ in _children(model)]
    else:
        links = _around_the_list(model)
    _check(model, links)
    return links


def _around_the_list(model: nn.Module) -> list[list[str]]:
    """Return what is before the blocks of a module, each block, and what is after them."""
    blocks = [name for name, _ in blocks_of(model)]
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1:
        raise StrategyError(
            f"pp: {type(model).__name__} has {len(lists)} lists of blocks; expected one ModuleList "
            "of blocks that run one after another, an nn.Sequential, or the names of its modules "
            "in their order as its `chain`"
        )
    (of_blocks,) = lists
    before: list[str] = []
    after: list[str] = []
    found = before

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal found
        for name, child in _children(module):
            path = f"{prefix}{name}"
            if path == of_blocks:
                found = after
            elif of_blocks.startswith(f"{path}."):
                visit(child, f"{path}.")
            elif any(True for _ in child.parameters()):
                found.append(path)

    visit(model, "")
    return [link for link in (before, *([name] for name in blocks), after) if link]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of a module by name, one that has two names twice."""
    # `named_children` leaves the second name out. Private, and the way to all.
    children = module._modules  # pyright: ignore[reportPrivateUsage]
    return [(name, child) for name, child in children.items() if child is not None]


def _check(model: nn.Module, links: Links) -> None:
    """Refuse links that are not the model's, and parameters that are in none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [name for link in links for name in link]
    for name in named:
        if name not in modules or not name:
            raise StrategyError(
                f"pp: the `chain` of {type(model).__name__} names '{name}', which is no module of "
                "it; expected names as in named_modules()"
            )
        if any(f"{name}.".startswith(f"{other}.") for other in named if other != name) or (
            named.count(name) > 1
        ):
            raise StrategyError(
                f"pp: the `chain` of {type(model).__name__} names '{name}' twice, or a module that "
                "it is in; expected each once"
            )
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{module}.") for module in named):
            raise StrategyError(
                f"pp: the parameter '{name}' of {type(model).__name__} is in no link of its chain; "
                "hold it in a module that is one, or name its module in the `chain`"
            )


def cost_of(link: Sequence[nn.Module]) -> int:
    """Return what a link costs for each of its inputs: its parameters but of tables.

    It is in proportion to the FLOPs of linear maps. Convolutions and attention are not seen; the
    cut of a strategy can be given, and `pipeline.measured` has it from times.
    """
    modules = {module for each in link for module in each.modules()}
    return sum(
        parameter.numel()
        for module in modules
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


class _Left(BaseException):
    """A forward is left here: it has made the input of the next stage."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class Passed(Absent):
    """Stands for a module of another stage than that at work.

    Its attributes are those of the module, parameters on the meta device: a model may ask for the
    data type of its first layer. None of them is registered.
    """

    def __init__(self, of: nn.Module, call: Callable[[Sequence[Any]], Tensor]) -> None:
        super().__init__()
        self.__dict__ |= _outline(of)
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pass by, or leave the forward."""
        return self._call([*args, *kwargs.values()])


def _outline(of: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without any number that it holds."""
    own = {k: v for k, v in vars(of).items() if not k.startswith("_") and k != "forward"}
    parameters = of.named_parameters(recurse=False)
    own |= {name: torch.empty_like(each, device="meta") for name, each in parameters}
    return own | {name: SimpleNamespace(**_outline(child)) for name, child in _children(of)}


class ModuleStages(Stages):
    """The stages of a module, see above."""

    def __init__(
        self, model: nn.Module, links: Links, cut: Sequence[range], here: Sequence[int]
    ) -> None:
        """Replace in `model`, in place, what the stages `here` do not run.

        Raises:
            StrategyError: two stages read one parameter, and they are not the first and the last.
        """
        super().__init__(cut, here)
        self._model = model
        self._stage_of = {
            name: s for s, part in enumerate(cut) for at in part for name in links[at]
        }
        self._modules = {name: model.get_submodule(name) for name in self._stage_of}
        self._absent = {
            name: Passed(self._modules[name], functools.partial(self._call_absent, stage))
            for name, stage in self._stage_of.items()
        }
        self._first = {s: [self._modules[name] for name in links[cut[s][0]]] for s in here}
        self._at_work = 0
        self._is_in_objective = False
        self._waits = False
        self._received: Tensor | None = None
        self._left: _Left | None = None
        self._tied = self._find_tied()
        trained = (
            s for s in range(self.num_stages) if any(p.requires_grad for p in self.weights(s))
        )
        self.first_trained = next(trained, self.num_stages)
        tied = None if self._tied is None else model.get_parameter(self._tied)
        for name, stage in self._stage_of.items():
            if stage not in here:
                self._put(name, self._absent[name])
        if self._tied is not None and tied is not None and self.num_ends > 0:
            self._hold(tied, self._tied)
        # What is of other ranks goes, parameters and all.
        self._modules = {n: m for n, m in self._modules.items() if self._stage_of[n] in here}
        self._run_whole = model.forward
        self._is_in_forward = False
        self._warned = False
        model.forward = self._run_until_left
        for name in ("parameters", "named_parameters"):
            setattr(model, name, functools.partial(self._parameters, getattr(model, name)))

    def _names(self, stage: int) -> list[str]:
        return [name for name, of in self._stage_of.items() if of == stage]

    def _find_tied(self) -> str | None:
        """Return the name of the weight of the first and the last stage, if there is one."""
        read = [set(self.weights(stage)) for stage in range(self.num_stages)]
        ends, tied = {0, self.num_stages - 1}, list[str]()
        for name, parameter in self._model.named_parameters():
            stages = {stage for stage, weights in enumerate(read) if parameter in weights}
            if len(stages) > 1:
                tied.append(name)
            if len(stages) > 1 and (stages != ends or len(tied) > 1):
                raise StrategyError(
                    f"pp: stages {', '.join(map(str, sorted(stages)))} of "
                    f"{type(self._model).__name__} read one parameter, '{name}'; expected one at "
                    "most that several read, the first stage and the last; use fsdp"
                )
        return tied[0] if tied else None

    def _hold(self, parameter: nn.Parameter, name: str) -> None:
        """Register a parameter by its name in a module that is absent here."""
        (link,) = (n for n in self._stage_of if name.startswith(f"{n}."))
        if self._stage_of[link] in self.here:
            return
        module: nn.Module = self._absent[link]
        *path, own = name.removeprefix(f"{link}.").split(".")
        for step in path:
            module.__dict__.pop(step, None)
            module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.__dict__.pop(own, None)
        module.register_parameter(own, parameter)

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self._model.get_submodule(parent), own, module)

    @property
    @override
    def tied(self) -> nn.Parameter | None:
        if self._tied is None or self.num_ends == 0:
            return None
        return self._model.get_parameter(self._tied)

    @override
    def weights(self, stage: int) -> list[nn.Parameter]:
        found = [p for name in self._names(stage) for p in self._modules[name].parameters()]
        return list(dict.fromkeys(found))

    @override
    def prepare(self) -> None:
        for modules in self._first.values():
            for module in modules:
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        # Before and after the hooks of fsdp, which look at parameters.
        self._model.register_forward_pre_hook(self._begin, prepend=True)
        self._model.register_forward_hook(self._leave)

    @override
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        self._at_work, self._received, self._waits = stage, received, True
        with self._others_absent(stage):
            self._is_in_objective = torch.is_grad_enabled()
            try:
                output = forward()
            except _Left as left:
                self._warn_of_kept(stage)
                return left.output
            finally:
                self._is_in_objective = self._is_in_forward = False
                self._received = self._left = None
        if stage < self.num_stages - 1:
            raise StrategyError(
                f"pp: a forward of {type(self._model).__name__} did not come to the stage after "
                f"{stage}; expected an objective that calls the model, and a model that runs its "
                "chain in order"
            )
        return output

    @contextmanager
    def _others_absent(self, stage: int) -> Generator[None]:
        others = [n for n, of in self._stage_of.items() if of != stage and of in self.here]
        for name in others:
            self._put(name, self._absent[name])
        try:
            yield
        finally:
            for name in others:
                self._put(name, self._modules[name])

    def _run_until_left(self, *args: Any, **kwargs: Any) -> Any:
        """Be the forward of the model: what fsdp does before and after it is done here too."""
        try:
            return self._run_whole(*args, **kwargs)
        except _Left as left:
            self._left = left
            return left.output

    def _parameters(self, named: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Be `parameters` of the model; an objective would find those of one stage alone."""
        if self._is_in_objective and not self._is_in_forward:
            raise StrategyError(
                f"pp: the objective reads the parameters of {type(self._model).__name__}, of which "
                "a stage has its own alone, so that a loss of all of them would be too small; use "
                "weight_decay of the optimizer, or dp and fsdp"
            )
        return named(*args, **kwargs)

    def _warn_of_kept(self, stage: int) -> None:
        """Warn, once, of what a stage keeps for an objective that runs on another."""
        for name in () if self._warned else self._names(stage):
            for path, module in self._modules[name].named_modules(prefix=name):
                for key, value in vars(module).items():
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        self._warned = True
                        warnings.warn(
                            f"pp: '{path}.{key}' is kept for whoever reads it, and the objective "
                            "on the last stage does not: a loss of it would be left out",
                            stacklevel=2,
                        )
                        return

    def _begin(self, *_: Any) -> None:
        self._is_in_forward = True

    def _leave(self, *_: Any) -> None:
        self._is_in_forward = False
        if self._left is not None:
            raise self._left

    def _call_absent(self, stage: int, args: Sequence[Any]) -> Tensor:
        if stage < self._at_work:
            return self._give(stage)
        if self._waits:
            raise StrategyError(
                f"pp: {type(self._model).__name__} ran stage {stage} before {self._at_work}; its "
                "chain is not in the order in which its modules run"
            )
        args = [received_for(each) for each in args]
        _check_border(self._names(stage)[0], args)
        if isinstance(args[0], Awaited):
            args[0].check("send", False)
        raise _Left(args[0])

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the first module that runs of a stage take what the stage has received."""
        values = [*args, *kwargs.values()]
        if self._waits:
            self._waits = False
            if self._received is None:
                return None
            name = next(name for name, each in self._modules.items() if each is module)
            _check_border(name, values)
            received = StandIn.apply(self._received, True)
            if isinstance(values[0], Awaited):
                values[0].received = received
        else:  # it runs once more; in backward, where it is recomputed
            received = received_for(values[0]) if values else None
        if args:
            return (received, *args[1:]), kwargs
        first = next(iter(kwargs), None)
        return (args, kwargs) if first is None else (args, {**kwargs, first: received})

    def _give(self, stage: int) -> Tensor:
        """Return what an absent module gives: like the input of the stage at work, and not numbers.

        It becomes that input if it is what the stage's first module takes.
        """
        if self._received is None:
            raise self._recomputed(stage)
        given = cast(Tensor, StandIn.apply(self._received, False))
        return await_(given, functools.partial(self._check_use, stage))

    def _recomputed(self, stage: int) -> StrategyError:
        """Return the error of a recomputation that needs another stage, which is not at work."""
        return StrategyError(
            f"pp: {type(self._model).__name__} recomputes layers of several stages together, of "
            f"which stage {stage} is another rank's or has ended; recompute each layer by itself, "
            "or choose another cut"
        )

    def _check_use(self, stage: int, operator: str, is_read: bool) -> None:
        """Refuse an operator on what an absent stage gives, or on what was made of it."""
        model = type(self._model).__name__
        if self._received is None:
            raise self._recomputed(stage)
        if not self._waits:
            raise StrategyError(
                f"pp: what stage {stage} of {model} makes is used after the module that it is sent "
                f"to, by '{operator}', and a stage sends one tensor to the next alone; choose "
                "another cut, or put what is around a module, as `x + block(x)`, into it"
            )
        if is_read:
            raise StrategyError(
                f"pp: {model} reads numbers of what stage {stage} makes, by '{operator}', between "
                "its layers, and the stages after it do not have them; choose another cut, put "
                "that code into a layer, or use dp or fsdp"
            )


def _check_border(name: str, args: Sequence[Any]) -> None:
    """Refuse a link that takes more from the one before than one tensor can carry."""
    first, *others = args or [None]
    if not (isinstance(first, Tensor) and first.is_floating_point()):
        raise StrategyError(
            f"pp: the first argument of '{name}' is no floating-point tensor, and it is what one "
            "stage sends the next; choose another cut"
        )
    if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(others)):
        raise StrategyError(
            f"pp: '{name}' takes a second tensor that needs a gradient, and a stage sends one; "
            "choose another cut"
        )
