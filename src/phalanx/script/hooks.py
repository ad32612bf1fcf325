"""Call a script's hooks on parameters with the gradient of the global batch.

    autograd     hook(gradient of this rank's samples)     not used
    here         hook(sum over ranks / count)              as on one process

Autograd calls a hook of `tensor.register_hook` with the gradient of one rank's samples, before the
all-reduce: a hook that clamps would clamp each rank's part. So the hooks are removed from the
parameters, and called after the gradients have been reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from phalanx.comm.comm import Comm
from phalanx.errors import ScriptError

_Hooks = dict[int, Callable[[Tensor], Tensor | None]]


def refuse_lost_hooks(model: nn.Module, comm: Comm) -> None:
    """Refuse hooks that sharding would lose, or that would see gradients before reduction."""
    if comm.size("job") == 1:
        return
    are_kept = comm.size("fsdp") == comm.size("tp") == 1
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if after or (parameter._backward_hooks and not are_kept):  # pyright: ignore[reportPrivateUsage]
            call = "register_post_accumulate_grad_hook" if after else "register_hook"
            raise ScriptError(
                f"prepare: {name} has a hook by {call}, which would receive only a part of its "
                "gradient, or none; change parameter.grad between run.backward and "
                "optimizer.step() instead" + ("" if after else ", or use dp")
            )


class ReducedGradientHooks:
    """Calls the hooks of replicated parameters after the gradients have been reduced."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], comm: Comm) -> None:
        # With one data rank, autograd itself calls the hooks.
        self._parameters = parameters if comm.size("data") > 1 else {}
        self._hooks: dict[nn.Parameter, list[_Hooks]] = {}

    def take(self, accumulation: int) -> None:
        """Move hooks registered since the last call from the parameters to this object."""
        for name, parameter in self._parameters.items():
            # Private, but torch has no other access; tests/script/test_plain_scripts.py pins it.
            hooks: Any = parameter._backward_hooks  # pyright: ignore[reportPrivateUsage]
            if not hooks:
                continue
            if accumulation > 1:
                raise ScriptError(
                    f"backward: {name} has a hook by register_hook, which receives the gradient of "
                    "each microbatch on one process, but only the gradient of the whole step on "
                    "several ranks; change parameter.grad between run.backward and "
                    "optimizer.step() instead"
                )
            self._hooks.setdefault(parameter, []).append(hooks)  # a handle's `remove` edits it
            parameter._backward_hooks = None  # pyright: ignore[reportPrivateUsage]

    def call(self) -> None:
        """Call the hooks with the reduced gradients; a returned tensor replaces the gradient."""
        for parameter, registered in self._hooks.items():
            hooks = [hook for each in registered for hook in each.values()]
            for hook in hooks:
                if parameter.grad is not None:
                    changed = hook(parameter.grad)
                    parameter.grad = parameter.grad if changed is None else changed
