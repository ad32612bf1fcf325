"""AdamW and Muon with weight decay for matrices only, and a cosine rate after a linear warm-up.

AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. Cosine: Loshchilov and
Hutter, SGDR, 2017, without restarts. Muon: Jordan et al., Muon: An optimizer for hidden layers in
neural networks, 2024; its rate for AdamW's settings: Liu et al., Muon is Scalable for LLM Training,
2025.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.comm import Comm, SingleRankComm, local_shard
from phalanx.config import OptimizerConfig
from phalanx.errors import ScriptError
from phalanx.models.block_weights import hidden_matrices, newton_schulz_flops
from phalanx.models.decoder import Decoder
from phalanx.parallel.tensor.layers import is_transposed
from phalanx.parallel.tensor.roles import roles_of
from phalanx.parallel.whole_matrix import Matrix, Owners


class AdamW(torch.optim.AdamW):
    """AdamW on local shards: the update is elementwise, and gradients are sharded as parameters.

    With DTensors, PyTorch's first step would infer the sharding of each operation, which takes a
    tenth of a second for a small model on three mesh axes. The moments are stored as DTensors.
    """

    # Private; `step` gets its tensors from it. tests/parallel/test_sharded.py pins its behavior.
    def _init_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return has_complex


AdjustedRate = Literal["original", "match_rms_adamw"]
"""How Muon scales the rate of a matrix [A, B]: by sqrt(max(1, A/B)), or by 0.2 sqrt(max(A, B)), so
that the update has the root mean square of AdamW's."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5, which has the steepest slope at 0 (Jordan et al., 2024)."""


def orthogonalize(
    matrix: Tensor, coefficients: Sequence[float], num_steps: int, eps: float
) -> Tensor:
    """Return nearly U V^T of the matrix U S V^T, by Newton-Schulz steps in the matrix's dtype.

    It computes what torch.optim.Muon computes, in the same operations, and leaves `matrix` as is.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)  # the largest singular value is at most 1
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def matrices_of(shape: Sequence[int], group: Mapping[str, Any]) -> list[range]:
    """Return the rows, along the first dimension, of each matrix of a parameter of a Muon group.

    A parameter [E, F, D] is a stack of E matrices. With `parts`, it is a fusion of matrices, whose
    numbers of rows have these proportions.
    """
    if len(shape) == 3:
        return [range(n, n + 1) for n in range(shape[0])]
    parts: Sequence[int] = group.get("parts", (1,))
    if shape[0] % sum(parts):
        raise ScriptError(
            f"Muon: {shape[0]} rows do not divide into matrices of the proportions {tuple(parts)}"
        )
    ends = [0, *itertools.accumulate(shape[0] // sum(parts) * part for part in parts)]
    return [range(*both) for both in itertools.pairwise(ends)]


def step_matrices(optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Take Muon's step on the parameters of `groups` that have a gradient.

    Momentum and weights are updated shard by shard; only the orthogonalisation needs the whole
    matrix, at its owner. Its input and its result travel in the data type of the iteration, so a
    narrower type loses nothing.
    """
    owners: Owners | None = getattr(optimizer, "owners", None)
    found: dict[Tensor, dict[str, Any]]
    found = {p: group for group in groups for p in group["params"] if p.grad is not None}
    every = [] if owners is None else [owners]
    if here := not_owned(optimizer, found, owners):
        every.append(_owners(SingleRankComm(), {p: found[p] for p in here}))
    for of in every:
        used: dict[torch.dtype, dict[int, dict[str, Any]]] = {}
        for number, parameter in enumerate(of.parameters):
            if (group := found.get(parameter)) is not None:
                # Without a setting bfloat16, as in torch.optim.Muon.
                narrow: torch.dtype = getattr(torch, group.get("ns_dtype") or "bfloat16")
                dtype = parameter.dtype if parameter.dtype == torch.float64 else narrow
                used.setdefault(dtype, {})[number] = group
        for dtype, groups_of_numbers in used.items():
            _step_in(of, optimizer.state, groups_of_numbers, dtype)


def not_owned(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], owners: Owners | None
) -> list[Tensor]:
    """Return the parameters without an owner, such as of a later group: they are whole here.

    Raises:
        ScriptError: one is sharded.
    """
    known = {} if owners is None else dict.fromkeys(owners.parameters)
    here = [parameter for parameter in parameters if parameter not in known]
    for parameter in here:
        if isinstance(parameter, DTensor):
            raise ScriptError(
                f"{type(optimizer).__name__}: a parameter of shape {tuple(parameter.shape)} is "
                "sharded, and its update needs the whole of it; give the optimizer to run.prepare, "
                "with all of its parameters"
            )
    return here


def _owners(comm: Comm, groups: Mapping[Tensor, Mapping[str, Any]]) -> Owners:
    rows = [matrices_of(parameter.shape, group) for parameter, group in groups.items()]
    return Owners(comm, list(groups), rows, newton_schulz_flops)


def _step_in(
    owners: Owners,
    state: dict[Any, Any],
    groups: Mapping[int, Mapping[str, Any]],
    dtype: torch.dtype,
) -> None:
    """Step the parameters whose numbers are the keys of `groups`, by iterations in `dtype`."""
    shards: dict[int, Sequence[Tensor]] = {}
    for number, group in groups.items():
        parameter = owners.parameters[number]
        gradient, kept = cast(Tensor, parameter.grad), state[parameter]
        if "momentum_buffer" not in kept:
            kept["momentum_buffer"] = torch.zeros_like(gradient)
        tensors = (parameter.detach(), gradient, kept["momentum_buffer"])
        shards[number] = _, gradient, buffer = [local_shard(tensor) for tensor in tensors]
        buffer.lerp_(gradient, 1 - group["momentum"])

    def direction(each: Matrix) -> Tensor:
        group = groups[each.parameter]
        gradient, buffer = map(each.local, shards[each.parameter][1:])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    for each in owners.rounds(groups, dtype.itemsize):
        wholes = owners.gather(each, direction, dtype)
        for matrix, whole in wholes.items():
            group = groups[matrix.parameter]
            how = (group["ns_coefficients"], group["ns_steps"], group["eps"])
            flat = whole.view(whole.shape[-2:])
            wholes[matrix] = orthogonalize(flat, *how).reshape(whole.shape)
        for matrix, update in owners.scatter(each, wholes, dtype).items():
            group, rows = groups[matrix.parameter], matrix.local(shards[matrix.parameter][0])
            rate = float(group["lr"])
            rows.mul_(1 - rate * group["weight_decay"])
            rows.add_(update, alpha=-rate * rate_ratio(group["adjust_lr_fn"], matrix.shape))


def rate_ratio(adjusted: str | None, shape: Sequence[int]) -> float:
    """Return the factor of the rate of a matrix [A, B], see `AdjustedRate`."""
    rows, columns = shape[-2:]
    if adjusted == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class TorchMuon(torch.optim.Muon):
    """torch.optim.Muon on split parameters; `bind` gives its class to an optimizer."""

    owners: Owners | None = None

    def _init_group(self, group: Any, *lists: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        del lists  # they stay empty, and PyTorch's step then updates nothing
        if group is self.param_groups[-1]:
            step_matrices(self, self.param_groups)
        return False


def bind(optimizer: torch.optim.Optimizer, comm: Comm) -> bool:
    """Choose the owners of the matrices of a Muon optimizer; its parameters are split already.

    Every rank calls this together. A torch.optim.Muon keeps its groups and its state, and becomes a
    `TorchMuon`, so that references to the object stay valid.

    Returns:
        Whether the optimizer is a Muon.
    """
    if type(optimizer) is torch.optim.Muon:
        optimizer.__class__ = TorchMuon
    if not isinstance(optimizer, Muon | TorchMuon):
        return False
    groups = [group for group in optimizer.param_groups if group.get("use_muon", True)]
    optimizer.owners = _owners(comm, {p: group for group in groups for p in group["params"]})
    return True


class Muon(AdamW):
    """Muon for the groups with `use_muon`, and AdamW for all other groups.

    A parameter of Muon is a matrix, or a stack of matrices [E, F, D]. Its step is exact under every
    split, see parallel/whole_matrix.py; `phalanx.Run.prepare` and the trainers `bind` it.

    Attributes:
        owners: owners of the matrices; None before `bind`, with all matrices whole here.
    """

    owners: Owners | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustedRate | None = None,
        *,
        ns_dtype: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        """Take the arguments of torch.optim.Muon, and settings of AdamW for the other groups.

        A group of fused weights has the proportions of their matrices along the rows in `parts`,
        such as (4, 1, 1), see `muon_groups`. The iteration runs in `ns_dtype`, bfloat16 if None,
        and in float64 for float64 matrices.
        """
        if adjust_lr_fn not in (None, *get_args(AdjustedRate)):
            raise ScriptError(
                f"Muon: adjust_lr_fn is {adjust_lr_fn!r}; expected one of "
                f"{', '.join(get_args(AdjustedRate))}, or None"
            )
        if ns_dtype not in (None, "bfloat16", "float16", "float32"):
            raise ScriptError(f"Muon: ns_dtype is {ns_dtype!r}; the nearest is 'bfloat16'")
        self._of_adam = {"eps": adam_eps, "use_muon": False}
        self._of_muon = {
            "use_muon": True, "momentum": momentum, "nesterov": nesterov, "eps": eps,
            "ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype, "parts": (1,),
        }  # fmt: skip
        super().__init__(
            params, lr=lr, betas=betas, eps=adam_eps, weight_decay=weight_decay, fused=fused
        )
        # A fused AdamW skips a step that a GradScaler finds infinite by itself, and Muon does not.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's expects a step of every state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with Muon's settings unless its `use_muon` is false."""
        is_muon = param_group.get("use_muon", True)
        super().add_param_group({**(self._of_muon if is_muon else self._of_adam), **param_group})
        for parameter in self.param_groups[-1]["params"] if is_muon else ():
            if parameter.ndim not in (2, 3):
                raise ScriptError(
                    f"Muon: a parameter has the shape {tuple(parameter.shape)}; expected a matrix "
                    "or a stack of matrices; give the others in a group with use_muon=False"
                )

    def _init_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, group: dict[str, Any], *lists: list[torch.Tensor]
    ) -> bool:
        if not group["use_muon"]:
            return super()._init_group(group, *lists)
        # All of Muon's groups move together, with the last one; AdamW finds no tensors here.
        groups = [each for each in self.param_groups if each["use_muon"]]
        if group is groups[-1]:
            step_matrices(self, groups)
        return False


def build_optimizer(model: nn.Module, config: OptimizerConfig, comm: Comm | None = None) -> AdamW:
    """Return the optimizer of the trainable parameters of `model`; AdamW is fused.

    Vectors (norms and biases) have no weight decay. A tied parameter appears once. With the kind
    muon, `hidden_matrices` are updated by Muon, and all others by AdamW.

    Args:
        model: the model, split.
        config: settings.
        comm: communicator of the split; None if this process has the whole model.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    hidden = hidden_matrices(trained) if config.kind == "muon" else ()
    others = [p for n, p in trained.items() if n not in hidden]
    matrices = [parameter for parameter in others if parameter.ndim >= 2]
    vectors = [parameter for parameter in others if parameter.ndim < 2]
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups: list[dict[str, Any]]
    groups = [{"params": some, "weight_decay": decay} for some, decay in decays if some]
    shared: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    if config.kind == "adamw":
        groups = groups or [{"params": others}]  # a pipeline stage may be frozen
        return AdamW(groups, eps=config.eps, fused=True, **shared)
    rest = groups or [{"params": []}]
    groups = [{**group, "use_muon": False} for group in rest]
    if hidden:
        ratio = 1.0 if config.matrix_lr is None else config.matrix_lr / config.lr
        groups.append(
            {"params": [trained[n] for n in hidden], "lr": config.lr * ratio, "lr_ratio": ratio}
        )
    muon = Muon(
        groups,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.adjust_lr,
        ns_dtype=config.ns_dtype,
        adam_eps=config.eps,
        fused=True,
        **shared,
    )
    if comm is not None:
        bind(muon, comm)
    return muon


def muon_groups(model: nn.Module, roles: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the groups of a `Muon` for a model's trained parameters, by its modules' roles in tp.

    Weights of column and row maps go to Muon, fused ones (queries, keys and values, or gate and up)
    part by part; all other parameters to AdamW, vectors without weight decay. So do fused weights
    [in, out] (GPT-2's), whose parts are columns.

    Args:
        model: decoder, transformers model of docs/strategies.md, or any module, before its split.
        roles: patterns of module names -> roles, such as {"layers.*.up": "column"}, with precedence
            over the built-in ones.

    Raises:
        StrategyError: the roles of the model are unknown.
    """
    if isinstance(model, Decoder):
        hidden = dict.fromkeys(hidden_matrices(dict(model.named_parameters())), (1,))
    else:
        hidden = {
            f"{name}.weight": each.parts
            for name, each in roles_of(model, roles).items()
            if each.role in ("column", "row") and not (each.is_fused and is_transposed(each.module))
        }
    of_muon: dict[tuple[int, ...], list[nn.Parameter]] = {}
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in hidden:
            of_muon.setdefault(hidden[name], []).append(parameter)
        else:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": some, "parts": parts} for parts, some in of_muon.items()
    ]
    if matrices:
        groups.append({"params": matrices, "use_muon": False})
    if vectors:
        groups.append({"params": vectors, "use_muon": False, "weight_decay": 0.0})
    return groups


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (the first is 0) of `num_steps`.

    The rate rises linearly over the warm-up steps, is `config.lr` at their end, and falls by half a
    cosine to `config.min_lr_ratio * config.lr` at the last step.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = min(200, num_steps // 10)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, num_steps - 1 - warmup))
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
