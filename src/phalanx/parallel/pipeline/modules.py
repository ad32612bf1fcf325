"""The stages of any module that is a chain of submodules: nn.Sequential, a transformers decoder.

The forward of the full module runs, but computes only one stage. Here stage 1 of three runs:

    |------- stage 0 -------|   |------ stage 1 ------|   |-------- stage 2 -------|
    embedding ---> block 0 -----> block 1 ---> block 2 -----> block 3 ---> norm, head ---> loss
    absent [1]     absent [1]     runs [2]     runs           absent [3]   not reached
       |              |             ^             |             |
       +-- no value --+             |             +-- output ---+---> _StageEnd, to `run`
                              received tensor

[1] A `PlaceholderModule` for each earlier module returns a tensor with the shape and dtype of the
    real output, which the outline sent with the received tensor describes. Its values are unknown,
    so computations of the model between modules are tracked (unknown_tensor.py).
[2] The first module of the stage gets the received tensor as its first argument (`_enter`).
[3] The first module after the stage gets the stage's output as its argument, and raises `_StageEnd`
    with it, which `run` catches. So the rest of the forward and of the objective, which are written
    for one process, is skipped.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from phalanx.errors import StrategyError
from phalanx.parallel.pipeline.chain import Chain
from phalanx.parallel.pipeline.links import CutChain, UnlinkedBuffers
from phalanx.parallel.pipeline.outline import Form, Like, form_of, read, write
from phalanx.parallel.pipeline.stage import Stages
from phalanx.parallel.pipeline.unknown_tensor import (
    StandIn,
    UnknownTensor,
    absent,
    mark_unknown,
    received_for,
)


class _StageEnd(BaseException):
    """Ends a forward that has computed the input of the next stage, `output`."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class ModuleStages(Stages):
    """The stages of a module; see the docstring of this file."""

    def __init__(self, model: nn.Module, chain: CutChain, here: Sequence[int]) -> None:
        """Replace the modules outside of the stages `here` by placeholders, in place."""
        super().__init__(chain.cut, here)
        self._model = model
        stage_of = {name: s for s in range(self.num_stages) for name in chain.names(s)}
        tied = None if chain.tied is None else chain.tied.name
        self._chain = Chain(model, stage_of, tied, self._call_absent)
        firsts = {stage: chain.links[chain.cut[stage][0]] for stage in here}
        self._first = {s: [self._chain.modules[n] for n in names] for s, names in firsts.items()}
        self._at_work = 0
        self._is_in_objective = False
        self._waits = False
        self._received: Tensor | None = None
        self._outputs: dict[str, Form] = {}
        self._left: _StageEnd | None = None
        trained = (
            s for s in range(self.num_stages) if any(p.requires_grad for p in self.weights(s))
        )
        self.first_trained = next(trained, self.num_stages)
        self._chain.keep(here, holds_tied=not {0, self.num_stages - 1}.isdisjoint(here))
        self._run_whole = model.forward
        self._is_in_forward = False
        self._loose = UnlinkedBuffers(model, self._chain.modules.values())
        self._warned = False
        model.forward = self._run_until_left
        for name in ("parameters", "named_parameters"):
            setattr(model, name, functools.partial(self._parameters, getattr(model, name)))

    @override
    def weights(self, stage: int) -> list[nn.Parameter]:
        return self._chain.weights(stage)

    @override
    def prepare(self) -> None:
        for modules in self._first.values():
            for module in modules:
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        for name, module in self._chain.modules.items():
            module.register_forward_hook(functools.partial(self._note_output, name))

        def begin(*_: Any) -> None:
            self._is_in_forward = True

        def leave(*_: Any) -> None:
            self._is_in_forward = False
            if self._left is not None:
                raise self._left

        # Run before, and after, the hooks of fsdp, which call `parameters`.
        self._model.register_forward_pre_hook(begin, prepend=True)
        self._model.register_forward_hook(leave)

    @override
    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Tensor]) -> Tensor:
        self._at_work, self._received, self._waits = stage, received, True
        before = self._loose.states()
        self._outputs = read(self._before(stage), self.outline)
        with self._chain.others_absent(stage):
            self._is_in_objective = torch.is_grad_enabled()
            try:
                output = forward()
            except _StageEnd as left:
                # An objective that reads tensors which a module stores as attributes runs on the
                # last stage, where they are missing: warn of the first one, once.
                stored = (
                    f"{path}.{key}"
                    for name in self._chain.names(stage)
                    for path, module in self._chain.modules[name].named_modules(prefix=name)
                    for key, value in vars(module).items()
                    if isinstance(value, Tensor) and value.grad_fn is not None
                )
                if not self._warned and (first := next(stored, None)) is not None:
                    self._warned = True
                    warnings.warn(
                        f"pp: '{first}' is a stored tensor with a gradient graph, which the "
                        "objective on the last stage does not have: a loss computed from it would "
                        "be left out",
                        stacklevel=1,
                    )
                self._loose.check(before)
                self.outline = write(self._before(stage + 1), self._outputs)
                return left.output
            except RuntimeError as error:
                if "not have been used in the graph" not in str(error):
                    raise
                raise StrategyError(
                    f"pp: the objective computes a gradient through {type(self._model).__name__}, "
                    "as by torch.autograd.grad, and the graph of a stage ends at the tensor that "
                    "it receives from the previous stage; use dp or fsdp"
                ) from error
            finally:
                self._is_in_objective = self._is_in_forward = False
                self._received = self._left = None
        self._loose.check(before)
        if stage < self.num_stages - 1 or self._waits:
            missed = f"stage {stage}" if self._waits else f"the stage after {stage}"
            raise StrategyError(
                f"pp: a forward of {type(self._model).__name__} did not reach {missed}; expected "
                "an objective that calls the model, and a model that runs its chain in order"
            )
        return output

    def _before(self, stage: int) -> list[str]:
        return [name for name, of in self._chain.stage_of.items() if of < stage]

    def _run_until_left(self, *args: Any, **kwargs: Any) -> Any:
        """Replacement of the model's forward; it returns normally, so that hooks of fsdp run."""
        try:
            return self._run_whole(*args, **kwargs)
        except _StageEnd as left:
            self._left = left
            return left.output

    def _parameters(self, named: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replacement of the model's `parameters`; an objective may not call it in a pipeline."""
        if self._is_in_objective and not self._is_in_forward:
            raise StrategyError(
                f"pp: the objective reads the parameters of {type(self._model).__name__}, and a "
                "stage has only its own, so a loss of all parameters would be too small; use "
                "weight_decay of the optimizer, or dp or fsdp"
            )
        return named(*args, **kwargs)

    def _call_absent(self, name: str, args: Sequence[Any]) -> Any:
        stage = self._chain.stage_of[name]
        # Three cases: an earlier stage, whose output is unknown here; then the first module after
        # the stage, which ends the forward; between them the running stage itself, which is not
        # absent.
        if stage < self._at_work:
            # A stand-in for the output, with its form but without values. If the form is unknown,
            # the output is one tensor like the received one.
            received = self._received
            if received is None:
                raise self._recomputed(stage)
            check = functools.partial(self._check_use, stage)
            like = Like(received.dtype, received.shape)
            is_tuple, parts = self._outputs.get(name, Form(False, (like,)))
            outputs = [p and mark_unknown(absent(received, p.shape, p.dtype), check) for p in parts]
            return tuple(outputs) if is_tuple else outputs[0]
        if self._waits:
            raise StrategyError(
                f"pp: {type(self._model).__name__} ran stage {stage} before stage "
                f"{self._at_work}; its chain is not in the order in which its modules run"
            )
        args = [received_for(each) for each in args]
        _check_border(self._chain.names(stage)[0], args)
        if isinstance(args[0], UnknownTensor):
            args[0].check("send", False)
        raise _StageEnd(args[0])

    def _note_output(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        form = form_of(output)
        if form is not None:
            self._outputs[name] = form
        elif self._chain.stage_of[name] < self.num_stages - 1:
            odd = ""
            if type(output) in (tuple, list):
                part = next(each for each in output if not isinstance(each, Tensor | None))
                odd = f" with a {type(part).__name__}"
            raise StrategyError(
                f"pp: '{name}' of {type(self._model).__name__} returns a {type(output).__name__}"
                f"{odd}, which later stages do not have; expected a tensor, or a "
                "tuple of tensors and None"
            )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the first argument of a stage's first module by the received tensor."""
        values = [*args, *kwargs.values()]
        if self._waits:
            self._waits = False
            if self._received is None:
                return None
            name = next(name for name, each in self._chain.modules.items() if each is module)
            _check_border(name, values)
            received = StandIn.apply(self._received)
            if isinstance(values[0], UnknownTensor):
                values[0].received = received
        else:  # the module runs again, for example recomputed in backward
            received = received_for(values[0]) if values else None
        if args:
            return (received, *args[1:]), kwargs
        first = next(iter(kwargs), None)
        return (args, kwargs) if first is None else (args, {**kwargs, first: received})

    def _recomputed(self, stage: int) -> StrategyError:
        """Return the error of a recomputation that needs a stage other than the running one."""
        return StrategyError(
            f"pp: {type(self._model).__name__} recomputes layers of several stages together, and "
            f"stage {stage} belongs to another rank or has ended; recompute each layer separately, "
            "or choose another cut"
        )

    def _check_use(self, stage: int, operator: str, is_read: bool) -> None:
        """Refuse an operator on an awaited tensor of `stage`, if it needs values or comes too late.

        Every use is too late once the first module of the running stage has been called.
        """
        model = type(self._model).__name__
        if self._received is None:
            raise self._recomputed(stage)
        if not self._waits:
            raise StrategyError(
                f"pp: an output of stage {stage} of {model} is used by '{operator}' after the "
                "module that receives it, and a stage sends one tensor to the next stage only; "
                "choose another cut, or put code around a module, as `x + block(x)`, into that "
                "module"
            )
        if is_read:
            raise StrategyError(
                f"pp: {model} reads the values of an output of stage {stage}, by '{operator}', "
                "between its layers, and later stages do not have these values; choose another "
                "cut, put that code into a layer, or use dp or fsdp"
            )


def _check_border(name: str, args: Sequence[Any]) -> None:
    """Refuse a link whose input from the previous stage is more than one floating-point tensor."""
    first, *others = args or [None]
    if not (isinstance(first, Tensor) and first.is_floating_point()):
        raise StrategyError(
            f"pp: the first argument of '{name}', which the previous stage sends, is not a "
            "floating-point tensor; choose another cut"
        )
    if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(others)):
        raise StrategyError(
            f"pp: '{name}' takes a second tensor that needs a gradient, and a stage sends only "
            "one tensor; choose another cut"
        )
