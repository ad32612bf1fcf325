"""Assignment of roles to modules: patterns of module names mapped to the roles of layers.py.

In a pattern, `*` matches one component of a dotted name: `blocks.*.mlp.up`. The first matching
pattern applies. `column/3` is a column map whose weight fuses three maps, such as queries, keys and
values: each is split separately, so that a rank has its heads of all three. `column/4+1+1` gives
their proportions.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from phalanx.errors import StrategyError
from phalanx.models.decoder import Decoder
from phalanx.models.experts import MoE
from phalanx.parallel.tensor import transformers_models, transformers_tables

Role = Literal[
    "embedding",
    "table",
    "branch",
    "column",
    "row",
    "lora_a",
    "lora_b",
    "norm",
    "inner_norm",
    "local",
    "dropout",
    "head",
    "token",
    "gather",
    "full",
    "scatter",
    "experts",
]
ROLES: tuple[Role, ...] = get_args(Role)

Patterns = Mapping[str, str]

PAGE = "docs/strategies.md"
"""Page that lists the supported models and documents patterns."""

RECURSIVE_ROLES: frozenset[Role] = frozenset(
    {"local", "token", "gather", "full", "scatter", "experts"}
)
"""Roles that also apply to all submodules."""

COLUMNS: frozenset[Role] = frozenset({"column", "lora_a"})
"""Roles whose products a branch computes together, from one gather of its input."""

DECODER: Patterns = transformers_tables.by_role(
    embedding="embedding",
    table="position_embedding",
    dropout="dropout blocks.*.dropout",
    branch="blocks.*.attention blocks.*.mlp",
    column="blocks.*.attention.q blocks.*.attention.k blocks.*.attention.v "
    "blocks.*.mlp.gate blocks.*.mlp.up",
    row="blocks.*.attention.output blocks.*.mlp.down",
    local="blocks.*.attention.q_norm blocks.*.attention.k_norm",
    norm="blocks.*.attention_norm blocks.*.attention_output_norm blocks.*.mlp_norm "
    "blocks.*.mlp_output_norm norm",
    head="output",
)
_ADAPTER_PATTERNS: Patterns = transformers_tables.by_role(
    lora_a="blocks.*.attention.q.lora_A blocks.*.attention.k.lora_A blocks.*.attention.v.lora_A "
    "blocks.*.mlp.gate.lora_A blocks.*.mlp.up.lora_A",
    lora_b="blocks.*.attention.q.lora_B blocks.*.attention.k.lora_B blocks.*.attention.v.lora_B "
    "blocks.*.mlp.gate.lora_B blocks.*.mlp.up.lora_B",
    row="blocks.*.attention.output.lora_A blocks.*.mlp.down.lora_A",
    token="blocks.*.attention.output.lora_B blocks.*.mlp.down.lora_B",
)
"""Roles of the adapters of a decoder's linear maps."""
_PROJECTION_NORM_PATTERNS: Patterns = transformers_tables.by_role(
    inner_norm="blocks.*.attention.q_norm blocks.*.attention.k_norm"
)
"""Roles of the query and key norms if they normalize over all heads together, not each head."""
_LATENT_PATTERNS: Patterns = transformers_tables.by_role(
    lora_a="blocks.*.attention.q_down blocks.*.attention.kv_down",
    local="blocks.*.attention.q_latent_norm blocks.*.attention.kv_latent_norm",
    lora_b="blocks.*.attention.q blocks.*.attention.kv",
)
"""Roles of latent attention: every rank has the latent vectors, and its heads of q and kv."""


@dataclass(frozen=True)
class RoleBinding:
    """A module and its role.

    Attributes:
        columns: column maps of a branch, and the maps lora_a beside them, in the order of
            registration; empty for other roles.
        parts: proportions of the maps that the weight of a column map fuses.
    """

    name: str
    role: Role
    module: nn.Module
    columns: tuple[RoleBinding, ...] = ()
    parts: tuple[int, ...] = (1,)

    @property
    def is_fused(self) -> bool:
        """Whether the module is a column map whose weight fuses several maps."""
        return len(self.parts) > 1

    @property
    def text(self) -> str:
        """The role as written in patterns, such as `column/3`."""
        if not self.is_fused:
            return self.role
        is_even = set(self.parts) == {1}
        return f"{self.role}/{len(self.parts) if is_even else '+'.join(map(str, self.parts))}"


def default_patterns(model: nn.Module) -> Patterns:
    """Return the built-in patterns of a model that match at least one of its modules."""
    if isinstance(model, Decoder):
        is_joint = model.shape.qk_norm == "projection"
        joint = _PROJECTION_NORM_PATTERNS if is_joint else {}
        experts = {n: "experts" for n, each in model.named_modules() if isinstance(each, MoE)}
        patterns = {**experts, **DECODER, **joint, **_ADAPTER_PATTERNS}
        if (latent := model.shape.latent) is not None:
            patterns |= _LATENT_PATTERNS
            if latent.query_rank is None:
                patterns["blocks.*.attention.q"] = "column"
    else:
        patterns = transformers_tables.patterns_of(model)
    names = [name for name, _ in model.named_modules()]
    return {p: role for p, role in patterns.items() if any(_matches(p, n) for n in names)}


def roles_of(model: nn.Module, patterns: Patterns | None = None) -> dict[str, RoleBinding]:
    """Return the roles of modules by name, in the order of the model, whether tp can split it.

    Raises:
        StrategyError: the model is unknown and there are no patterns, a pattern matches nothing, or
            a role does not exist.
    """
    asked, known = dict(patterns or {}), default_patterns(model)
    if not asked and not known:
        raise StrategyError(
            f"tp: the roles of the modules of {type(model).__name__} are not known; give patterns "
            f"that map names to roles ({', '.join(ROLES)}), see {PAGE}"
        )
    names = [name for name, _ in model.named_modules() if name]
    texts = {**asked, **{p: role for p, role in known.items() if p not in asked}}
    parsed = {pattern: _parse(pattern, text) for pattern, text in texts.items()}
    for pattern, text in asked.items():
        if not any(_matches(pattern, name) for name in names):
            # The nearest name, with `*` for its numbers.
            general = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): None for name in names}
            close = difflib.get_close_matches(pattern, general, 1, 0.5)
            advice = f"; the nearest is '{close[0]}'" if close else ""
            raise StrategyError(f"tp: the pattern '{pattern}' ({text}) matches no module{advice}")
    modules = dict(model.named_modules())
    bindings: dict[str, RoleBinding] = {}
    for name in names:
        pattern = next((p for p in parsed if _matches(p, name)), None)
        if pattern is not None:
            role, parts = parsed[pattern]
            for inner, of_inner in _inside_wrapper(name, role, modules[name]).items():
                bound = parts if of_inner in ("column", "lora_b") else (1,)
                bindings[inner] = RoleBinding(inner, of_inner, modules[inner], parts=bound)
    return bindings


def bind_roles(model: nn.Module, patterns: Patterns | None = None) -> list[RoleBinding]:
    """Return bindings of the modules that have a role, in the order of the model.

    Args:
        model: any module, on any device.
        patterns: name patterns to roles, with precedence over the model's built-in patterns.

    Raises:
        StrategyError: the model is unknown and there are no patterns, a pattern matches nothing, a
            role does not exist, roles contradict each other, or a setting of the model (such as
            dropout) would give results that differ from a single process.
    """
    bindings = roles_of(model, patterns)
    for name, binding in bindings.items():
        if binding.role in COLUMNS and _enclosing(name, bindings, "branch") is None:
            raise StrategyError(f"tp: the column map '{name}' is in no module with the role branch")
        outer = _enclosing(name, bindings, *RECURSIVE_ROLES)
        if outer is not None:
            raise StrategyError(
                f"tp: '{name}' ({binding.role}) is inside '{outer}', whose role "
                f"{bindings[outer].role} applies to all its submodules; give a role to only one of "
                "the two"
            )
    transformers_models.refuse_unsupported(model)
    _refuse_dropout(model, bindings)
    for name, binding in bindings.items():
        if isinstance(binding.module, nn.Embedding) and binding.role in ("embedding", "table"):
            for option, default in _TABLE_OPTIONS.items():
                if getattr(binding.module, option) != default:
                    raise StrategyError(
                        f"tp: '{name}' has {option} = {getattr(binding.module, option)}, which a "
                        f"shard of a table cannot apply; expected {default}"
                    )
    columns: dict[str, tuple[RoleBinding, ...]] = {}
    for branch in (name for name, binding in bindings.items() if binding.role == "branch"):
        columns[branch] = tuple(
            binding
            for name, binding in bindings.items()
            if binding.role in COLUMNS and _enclosing(name, bindings, "branch") == branch
        )
        if not columns[branch]:
            raise StrategyError(
                f"tp: the branch '{branch}' has no column map, so it reads nothing from the "
                "residual; give one of its linear maps the role column"
            )
    return [dataclasses.replace(s, columns=columns.get(name, ())) for name, s in bindings.items()]


def _inside_wrapper(name: str, role: Role, module: nn.Module) -> dict[str, Role]:
    """Return the roles of the modules inside a layer that PEFT has wrapped, else its own.

        column    base column, A whole, B column: x -> a, whole -> inner, without another message
        row       base row, A row, B whole: inner -> a, residual -> residual

    Raises:
        StrategyError: the adapter has other parameters than the two maps.
    """
    if isinstance(trained := getattr(module, "modules_to_save", None), nn.ModuleDict):
        copies = [f"modules_to_save.{each}" for each in trained]
        return dict.fromkeys((f"{name}.{each}" for each in ("original_module", *copies)), role)
    if not isinstance(getattr(module, "base_layer", None), nn.Module):
        return {name: role}
    of_maps: dict[str, Role] = {"base_layer": role}
    if role in ("column", "row"):
        pair: tuple[Role, Role] = ("lora_a", "lora_b") if role == "column" else ("row", "token")
        for holder, of_holder in zip(("lora_A", "lora_B"), pair, strict=True):
            maps = getattr(module, holder, None) or {}
            of_maps |= {f"{holder}.{each}": of_holder for each in maps}
    for other, _ in module.named_parameters():
        if not other.startswith(tuple(f"{each}." for each in of_maps)):
            raise StrategyError(
                f"tp: '{name}' ({role}) is a {type(module).__name__} of PEFT with the parameter "
                f"'{other}'; tp splits only LoRA beside column and row maps, without DoRA; use dp "
                "or fsdp"
            )
    return {f"{name}.{each}": of_map for each, of_map in of_maps.items()}


def reads_residual(bindings: Iterable[RoleBinding], outside: str) -> bool:
    """Return whether any bound module outside of the module named `outside` reads the residual."""
    prefix = f"{outside}." if outside else ""
    return any(
        binding.role in ("norm", "branch", "row", "token", "gather", "head")
        for binding in bindings
        if not binding.name.startswith(prefix)
    )


def _parse(pattern: str, text: str) -> tuple[Role, tuple[int, ...]]:
    """Return the role, and the proportions of the fused maps in lowest terms."""
    role, slash, number = text.partition("/")
    if role not in ROLES:
        raise StrategyError(
            f"tp: '{text}' of '{pattern}' is not a role; the roles are {', '.join(ROLES)}"
        )
    if not slash:
        return role, (1,)
    sizes = [int(size) if size.isdecimal() else 0 for size in number.split("+")]
    parts = sizes if len(sizes) > 1 else [1] * sizes[0]
    if role != "column" or len(parts) < 2 or not all(parts):
        raise StrategyError(
            f"tp: '{text}' of '{pattern}': only the role column takes several maps, as in "
            "'column/3', or in 'column/4+1+1' if the first map is four times as large"
        )
    return role, tuple(part // math.gcd(*parts) for part in parts)


def _refuse_dropout(model: nn.Module, bindings: Mapping[str, RoleBinding]) -> None:
    """Raise a StrategyError for dropout that draws from each rank's own generator.

    Its masks would differ between ranks, and from the masks of a single process.
    """
    rates_on: list[str] = []
    for name, module in model.named_modules():
        keyed = name in bindings and bindings[name].role == "dropout"
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)  # pyright: ignore[reportPrivateUsage]
        values = {"p": module.p} if is_dropout else vars(module)
        rates = {k: v for k, v in values.items() if isinstance(v, float) and v > 0}
        rates = {k: v for k, v in rates.items() if is_dropout or "dropout" in k}
        rates_on += [] if keyed else [f"'{name}.{key}' = {rate:g}" for key, rate in rates.items()]
    if not rates_on:
        return
    config: dict[str, Any] = dict(vars(getattr(model, "config", object)))
    settings = [k for k, v in config.items() if "drop" in k and isinstance(v, float) and v > 0]
    advice = f" (in its config: {', '.join(settings)})" if settings else ""
    more = f" and {len(rates_on) - 3} more" if len(rates_on) > 3 else ""
    raise StrategyError(
        f"tp: {', '.join(rates_on[:3])}{more}: ranks would not drop the elements that one process "
        f"drops; set them to 0{advice}"
    )


_TABLE_OPTIONS = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def _enclosing(name: str, bindings: Mapping[str, RoleBinding], *roles: str) -> str | None:
    """Return the name of the innermost module with one of `roles` that contains module `name`."""
    while name := name.rpartition(".")[0]:
        if name in bindings and bindings[name].role in roles:
            return name
    return None


@functools.lru_cache(maxsize=1 << 14)
def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
