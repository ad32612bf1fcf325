"""Save and resume further objects of a script with its model: any object with a `state_dict`.

    manifest    {name: {"state": plain values, "tensors": [[path, name of the file's tensor], ...]}}
    files       registered.<name>.<path>      a tensor of a state, as shards if it is a DTensor

Pickle is not used: a state consists of mappings and lists of numbers, text and tensors. All values
except DTensors are saved from rank 0; a warning names an object whose state differs on a rank.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.encoding import decoded, encoded, is_plain
from phalanx.checkpoint.index import Index
from phalanx.checkpoint.tensor_file import NAMES
from phalanx.checkpoint.untrusted import brief
from phalanx.comm.together import gather_objects
from phalanx.errors import CheckpointError, ScriptError

PREFIX: Final = "registered."
"""Prefix of the names of registered objects' tensors in the files."""

LOCAL_ROUNDS: Final = "local_rounds"
"""Name of the registered state of `dp:local`, see train/local_step.py."""

TABLE_SUMS: Final = "table_sums"
"""Name of the registered state of embedding tables that servers update by row-wise Adagrad."""

_IGNORED: Final[Mapping[str, str]] = {
    LOCAL_ROUNDS: "the outer momentum and the workers' moments of dp:local",
    TABLE_SUMS: "the sums of squares of embedding rows, of server.table_rule adagrad",
}
"""Names that a run ignores in a checkpoint if it has not registered them -> their states."""

_EXTRA_STATE: Final = "_extra_state"
"""Key suffix that PyTorch gives a module's extra state in a state_dict; not documented."""

_COMPARED: Final = 1 << 16
"""Most elements of a tensor that is compared between ranks at each save."""

KeyPath = tuple[Any, ...]
"""The keys and indices that lead to a value in a nested state."""


@contextmanager
def unchanged_on_error(objects: Iterable[Any], groups: Iterable[dict[str, Any]]) -> Generator[None]:
    """Give objects with a `state_dict`, and parameter groups, their present states on an error."""
    states = [(each, copy.deepcopy(each.state_dict())) for each in objects]
    settings = [(group, dict(group)) for group in groups]
    try:
        yield
    except CheckpointError:
        for each, state in states:
            with suppress(Exception):  # a user's load_state_dict may raise anything
                each.load_state_dict(state)
        for group, before in settings:
            group.clear()
            group.update(before)
        raise


class SplitState(NamedTuple):
    """The states of all registered objects, separated into JSON values and tensors.

    Attributes:
        plain: JSON values and tensor paths, by the name of the object.
        tensors: tensors by their names in the files.
    """

    plain: dict[str, Any]
    tensors: dict[str, Tensor]


class Registered:
    """The objects of a script that are saved and resumed with its run.

    Attributes:
        is_closed: whether the run has called resume, after which `add` refuses further objects.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._objects: dict[str, Any] = {}
        self._reported: set[str] = set()

    @property
    def objects(self) -> Collection[Any]:
        """The registered objects."""
        return self._objects.values()

    def add(self, name: str, each: Any) -> None:
        """Register the object `each`, and check that its present state can be saved.

        Raises:
            ScriptError: the name is invalid or taken, `run.resume` was called before, or the
                object has no state that can be saved.
        """
        if not isinstance(cast(Any, name), str) or not name.replace("_", "").isalnum():
            raise ScriptError(
                f"register: the name is {brief(name)}; expected letters, digits and underscores"
            )
        if self.is_closed:
            raise ScriptError(
                f"register: '{name}' is registered after run.resume, which restores objects "
                f"registered before it, so '{name}' would start from scratch at each resume; "
                "register it before run.resume"
            )
        if name in self._objects:
            kind = type(self._objects[name]).__name__
            raise ScriptError(f"register: '{name}' is already a {kind}; give another name")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, method, None)):
                raise ScriptError(
                    f"register: '{name}' is a {type(each).__name__} without {method}; give an "
                    "object with state_dict() and load_state_dict(state)"
                )
        try:
            _parts_of(name, each)
        except CheckpointError as error:
            raise ScriptError(f"register: {error}") from None
        self._objects[name] = each

    def add_extra_state(self, model: nn.Module, *, is_whole: bool = True) -> None:
        """Register the extra states of a model's modules (`get_extra_state`), if there are any.

        `is_whole` is whether each rank has all modules, not only the modules of a pipeline stage.

        Raises:
            ScriptError: there are extra states, and `is_whole` is False or they cannot be saved.
        """
        extra = ExtraState(model)
        if extra.modules and not is_whole:
            raise ScriptError(
                f"pp: {next(iter(extra.modules))} has a get_extra_state, but a checkpoint "
                "stores only the first rank's, which has only the modules of the first stage; "
                "store that state in a buffer, or use dp, fsdp or tp"
            )
        if extra.modules:
            self.add("extra_state", extra)

    def parts(self) -> SplitState:
        """Return the present states of all registered objects.

        Raises:
            CheckpointError: a state contains a value that cannot be saved.
        """
        plain: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, each in self._objects.items():
            plain[name], own = _parts_of(name, each)
            tensors |= own
        return SplitState(plain, tensors)

    def empty_tensors(self, plain: Mapping[str, Any], index: Index) -> dict[str, Tensor]:
        """Return empty tensors for the saved ones; DTensors where the object has DTensors now.

        Args:
            plain: JSON values of the saved states, by the name of the object.
            index: tensors of the checkpoint.

        Raises:
            CheckpointError: the checkpoint has objects that the script lacks, lacks a tensor, or
                has a registered tensor that belongs to no object.
        """
        plain = self._of_this(plain)
        if plain.keys() - self._objects.keys():
            raise CheckpointError(
                f"it has the registered objects {brief(sorted(plain))}, and this script has "
                f"{brief(sorted(self._objects))}; register the same objects before run.resume"
            )
        if (added := sorted(self._objects.keys() - plain.keys())) and dist.get_rank() == 0:
            warnings.warn(
                f"resume: the checkpoint has no state of {brief(added)}, which starts from scratch",
                stacklevel=5,
            )
        own: dict[str, Tensor] = {}
        for name, each in self._objects.items():
            own |= _parts_of(name, each)[1]
        room: dict[str, Tensor] = {}
        for name in plain:
            for _, tensor in _paths_of(name, plain[name]):
                if tensor not in index:
                    raise CheckpointError(f"it has no tensor {brief(tensor)}")
                shape, like = index[tensor].layout.shape, own.get(tensor)
                if isinstance(like, DTensor) and tuple(like.shape) == shape:
                    room[tensor] = torch.empty_like(like, dtype=index[tensor].dtype)
                else:
                    room[tensor] = torch.empty(shape, dtype=index[tensor].dtype)
        named = [each for each in index if each.startswith(PREFIX) and each not in room]
        left = tuple(f"{PREFIX}{name}." for name in _IGNORED)
        if unknown := [each for each in named if not each.startswith(left)]:
            raise CheckpointError(f"its tensor {brief(unknown[0])} belongs to no object")
        return room

    def _of_this(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved states without the ignored ones, see `_IGNORED`."""
        known = self._objects
        return {n: each for n, each in plain.items() if n not in _IGNORED or n in known}

    def remarks_on(self, plain: Mapping[str, Any]) -> list[str]:
        """Return a line on each saved state that this run ignores."""
        used = self._of_this(plain)
        ignored = [_IGNORED[name] for name in plain if name not in used]
        return [f"the checkpoint has {what}; this run does not use them" for what in ignored]

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the saved states into the objects by their `load_state_dict`.

        Raises:
            CheckpointError: the `load_state_dict` of an object fails.
        """
        for name in self._of_this(plain):
            each = self._objects[name]
            try:
                state = decoded(plain[name]["state"])
                for path, tensor in _paths_of(name, plain[name]):
                    state = _put(state, path, tensors[tensor])
                each.load_state_dict(state)
            except Exception as error:  # a user's load_state_dict may raise anything
                raise CheckpointError(
                    f"cannot resume '{name}', a {type(each).__name__}, whose load_state_dict "
                    f"failed: {type(error).__name__}: {brief(error, 200)}"
                ) from error

    def warn_if_ranks_differ(self, parts: SplitState) -> None:
        """Warn once if an object's state differs between ranks; all ranks call this together."""
        own: dict[str, str] = {}
        for name, plain in parts.plain.items():  # without DTensors and tensors above _COMPARED
            digest = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16)
            for called, tensor in parts.tensors.items():
                is_whole = not isinstance(tensor, DTensor) and tensor.numel() <= _COMPARED
                if is_whole and called.startswith(f"{PREFIX}{name}."):
                    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
                    digest.update(flat.numpy().tobytes())
            own[name] = digest.hexdigest()
        first, *others = gather_objects(own)
        for rank, theirs in enumerate(others, 1):
            apart = [name for name in first if theirs.get(name) != first[name]]
            if apart and apart[0] not in self._reported and dist.get_rank() == 0:
                warnings.warn(
                    f"save: the state of '{apart[0]}' on rank {rank} differs from rank 0's, which "
                    "the checkpoint stores for all ranks; compute it from results of run.sum, "
                    "run.mean or run.gather",
                    stacklevel=4,
                )
            self._reported.update(apart)


def is_extra_state(key: str) -> bool:
    """Return whether `key` of a state_dict is the entry of a module's `get_extra_state`."""
    return key.rpartition(".")[2] == _EXTRA_STATE


class ExtraState:
    """The extra states of a model's modules (`get_extra_state`), as one object to register."""

    def __init__(self, model: nn.Module) -> None:
        plain = nn.Module.get_extra_state
        modules = model.named_modules()
        self.modules = {n: m for n, m in modules if type(m).get_extra_state is not plain}

    def state_dict(self) -> dict[str, Any]:
        """Return the extra states by module name."""
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the extra state of each module."""
        for name, module in self.modules.items():
            module.set_extra_state(state[name])


def _parts_of(name: str, each: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON values of an object's state, and its tensors by their names in the files."""
    found: list[tuple[KeyPath, Tensor]] = []
    what = f"'{name}', a {type(each).__name__}"
    try:
        state = _without_tensors(each.state_dict(), (), found)
    except RecursionError:
        raise CheckpointError(f"cannot save the state of {what}: it contains itself") from None
    tensors: dict[str, Tensor] = {}
    paths: list[Any] = []
    for path, tensor in found:
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise CheckpointError(
                f"cannot save the state of {what}: {'.'.join(map(str, path))} is a {tensor.layout} "
                f"tensor of {tensor.dtype}; expected a dense one of {', '.join(map(str, NAMES))}"
            )
        called = f"{PREFIX}{name}.{'.'.join(map(str, path))}"
        while called in tensors:  # paths such as "a.b" and ("a", "b") collide
            called += "_"
        tensors[called] = tensor.detach()
        paths.append([list(path), called])
    plain = encoded({"state": state, "tensors": paths}, what)
    return plain, tensors


def _without_tensors(value: Any, path: KeyPath, found: list[tuple[KeyPath, Tensor]]) -> Any:
    """Return a state with None in place of each tensor; append the tensors to `found`."""
    if isinstance(value, Tensor):
        found.append((path, value))
        return None
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        made = {key: _without_tensors(each, (*path, key), found) for key, each in pairs}
        return Counter(made) if isinstance(value, Counter) else made
    if isinstance(value, list | tuple):
        if is_plain(value):
            return value
        items = enumerate(cast("Sequence[Any]", value))
        return (tuple if isinstance(value, tuple) else list)(
            _without_tensors(each, (*path, at), found) for at, each in items
        )
    return value


def _paths_of(name: str, plain: Any) -> list[tuple[KeyPath, str]]:
    """Return the paths of an object's tensors in its state, with their names in the files."""
    problem = f"it does not list the tensors in the state of '{name}'"
    try:
        paths = [(tuple(decoded(path)), called) for path, called in plain["tensors"]]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(problem) from error
    if not all(isinstance(called, str) and called.startswith(PREFIX) for _, called in paths):
        raise CheckpointError(problem)
    return paths


def _put(state: Any, path: KeyPath, tensor: Tensor) -> Any:
    """Return a state with `tensor` inserted at `path`."""
    if not path:
        return tensor
    inner = _put(state[path[0]], path[1:], tensor)
    if isinstance(state, tuple):
        items: tuple[Any, ...] = state
        return (*items[: path[0]], inner, *items[path[0] + 1 :])
    state[path[0]] = inner
    return state
