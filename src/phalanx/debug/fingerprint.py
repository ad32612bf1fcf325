"""The fingerprint of a collective call: properties that must match between ranks, and its place.

The check compares in this order, and reports the first difference:

    op, reduction, data type, root    equal on all ranks
    shapes                            equal on all ranks, where each rank has the full tensor
    piece that rank i sends rank j    its shape must equal the shape that rank j receives from rank
                                      i; pieces of an all-gather, a gather, a scatter, a
                                      reduce-scatter or an all-to-all may have different shapes
    name of the tensor                equal, where it has one on both ranks, see [Note: Names]

[Note: Names] Two calls in swapped order that match in everything else differ only by the names of
their tensors: a parameter or its gradient, or the module that FSDP2 gathers or reduces. A name is
compared only if this rank has a tensor with the other rank's name too. So ranks that hold different
parts of a model (pipeline stages) may combine tensors with different names, as for tied weights;
ranks that have both tensors, and call with different ones, have swapped the calls.

[Note: Places] The places in the code are reported, never compared. A program may call one
collective from two lines, `if rank == 0: ... else: ...`, and the ranks may take the branches
alternately, as in loops in which some rank has no data; by places alone that looks like a swap.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.calls import Call

NUM_PLACES = 2
"""Frames of a call that a message reports: the calling frame and its caller."""

_PACKAGE = Path(__file__).parents[1]

_HIDDEN = (
    str(Path(torch.__file__).parent),
    str(_PACKAGE / "comm"),
    str(_PACKAGE / "debug"),
    contextlib.__file__,
)
"""Prefixes of the files whose frames are not reported as the place of a call."""

_COLLECTIVES = (str(Path(torch.distributed.__file__).parent), str(_PACKAGE / "comm"))
"""Prefixes of the files that wait for other ranks when the innermost frame is in them."""

_OUTERMOST = (str(_PACKAGE / "launch"), "<frozen")
"""Prefixes of the files that call a rank's function or a script: their frames end the report."""

_FSDP_FILE = os.path.join("_fully_shard", "_fsdp_param_group.py")


@dataclass(frozen=True)
class Fingerprint:
    """One rank's call of a collective.

    Attributes:
        reduction: such as "sum"; empty if nothing is reduced.
        shapes: shapes of the inputs, such as "[8x4]".
        root: global rank of the source or destination; None if the op has no root.
        sent_shapes: shape sent to each rank of the group; empty if all ranks have the full tensor.
        received_shapes: shape received from each rank of the group.
        tensor: name of the tensor, if known, see [Note: Names].
        places: file, line and function of the call, and of its caller.
        phase: phase of the step.
    """

    op: str
    reduction: str = ""
    dtype: str = ""
    shapes: str = ""
    root: int | None = None
    sent_shapes: Sequence[str] = ()
    received_shapes: Sequence[str] = ()
    tensor: str = ""
    places: Sequence[str] = ()
    phase: str = ""

    def text(self) -> str:
        """Return one line of JSON, the input of `read`; equal fingerprints have equal text."""
        return json.dumps(vars(self))

    @staticmethod
    def read(text: str | bytes) -> Fingerprint:
        """Return the fingerprint that `text` has serialized."""
        return Fingerprint(**json.loads(text))

    @property
    def is_even(self) -> bool:
        """Whether all pieces that this rank sends and receives have one shape."""
        return len({*self.sent_shapes, *self.received_shapes}) <= 1

    def __str__(self) -> str:
        parts = (
            self.op,
            self.reduction,
            self.dtype and f"of {self.dtype}{self.shapes}",
            self.tensor and f"({self.tensor})",
            "" if self.root is None else f"with root {self.root}",
            self.phase and f"in phase {self.phase}",
        )
        return " ".join(filter(None, parts))


def take(call: Call, *, tensor: str, places: Sequence[str], phase: str) -> Fingerprint:
    """Return the fingerprint of `call`; `Fingerprint` describes the other arguments."""
    has_payload = call.op != "barrier"
    tensors = [*_flat(call.inputs), *_flat(call.outputs)] if has_payload else []
    root = None
    if call.op in ("broadcast", "reduce", "gather", "scatter"):
        root = call.ranks[call.arguments.get("root_rank", call.arguments.get("src"))]
    gives, takes = _given_and_taken(call)
    return Fingerprint(
        call.op,
        _reduction(call),
        ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors})),
        _shapes(call.inputs) if has_payload else "",
        root,
        gives,
        takes,
        tensor,
        places,
        phase,
    )


_COMPARED = {
    "op": "op", "reduction": "reduction", "data type": "dtype", "root": "root", "shape": "shapes",
}  # fmt: skip
"""Names of the properties that the check compares first -> their attributes."""


def difference(
    calls: Mapping[int, Fingerprint], has_name: Callable[[str], bool]
) -> tuple[int, int, str] | None:
    """Find the first difference between the calls of the ranks of a group.

    Args:
        calls: fingerprint of each global rank, in the order of the group.
        has_name: returns whether this rank has a tensor of a name.

    Returns:
        Two ranks whose calls do not match, and the difference as text; None if all calls match.
        Unless pieces differ, the first rank has the most common value.
    """
    for what, attribute in _COMPARED.items():
        values = {rank: getattr(call, attribute) for rank, call in calls.items()}
        if what == "shape" and any(call.sent_shapes for call in calls.values()):
            break  # the pieces are compared below, for each pair of ranks
        if pair := _odd_one(values):
            return *pair, f"{what}: {values[pair[0]]} and {values[pair[1]]}"
    # all-to-all of two ranks      rank 0 sends [3, 5]      rank 1 receives [5, ..]
    # piece 0 -> 1                 5                        5: equal, whatever the others have
    for index, (giver, giving) in enumerate(calls.items()):
        for gift, (taker, taking) in zip(giving.sent_shapes, calls.items(), strict=False):
            taken = taking.received_shapes[index]
            if gift != taken:
                what = f"rank {giver} sends {gift or 'nothing'} to rank {taker}, which expects"
                return giver, taker, f"shape: {what} {taken or 'nothing'} from rank {giver}"
    names = {rank: call.tensor for rank, call in calls.items() if call.tensor}
    names = {rank: name for rank, name in names.items() if has_name(name)}
    if pair := _odd_one(names):
        return *pair, f"tensor: {names[pair[0]]} and {names[pair[1]]}"
    return None


def pair_difference(one: Fingerprint, other: Fingerprint) -> str:
    """Return the difference between a send and its receive; empty if they match."""
    for what in ("data type", "shape"):
        mine, theirs = (getattr(call, _COMPARED[what]) for call in (one, other))
        if mine != theirs:
            return f"{what}: {mine} and {theirs}"
    return ""


def find_places(frame: FrameType | None) -> tuple[tuple[str, ...], str]:
    """Return the places of a call in the code, outside torch, comm and debug, and its FSDP2 module.

    Returns:
        The innermost places, as "file:line in function", the last of them in a script that called
        this package if one did; and "FSDP module NAME" or "".
    """
    places: list[tuple[str, bool]] = []
    module = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OUTERMOST):
            break
        if code.co_filename.endswith(_FSDP_FILE) and not module:
            # Private; messages lack the module without it. tests/debug/test_check.py pins it.
            name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            module = "" if name is None else f"FSDP module {name or '(root)'}"
        if code.co_name == "__torch_dispatch__":
            places.clear()  # frames inside a mode, which forwards the call or runs a composite
        elif code.co_name != "__torch_function__" and not _is_hidden(code.co_filename):
            place = f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
            places.append((place, code.co_filename.startswith(str(_PACKAGE))))
        frame = frame.f_back
    # The line of a script that calls phalanx is more useful than the frames inside phalanx.
    called = [place for place, is_ours in places if not is_ours]
    innermost = [place for place, _ in places[:NUM_PLACES]]
    if called and called[0] not in innermost:
        innermost[-1] = called[0]
    return tuple(innermost), module


def is_collective(frame: FrameType) -> bool:
    """Return whether a frame is in comm or torch.distributed."""
    return frame.f_code.co_filename.startswith(_COLLECTIVES)


@cache
def _is_hidden(file: str) -> bool:
    return file.startswith(_HIDDEN)


@cache
def _short(file: str) -> str:
    """Return a path, relative to the working directory if the file is below that."""
    with contextlib.suppress(OSError):  # the working directory may be gone
        path, folder = Path(file), Path.cwd()
        return str(path.relative_to(folder)) if path.is_relative_to(folder) else file
    return file


def _odd_one(values: Mapping[int, Any]) -> tuple[int, int] | None:
    """Return a rank with the most common value and a rank with another; None if all are equal."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    common = counts.most_common(1)[0][0]
    one = next(rank for rank, value in values.items() if value == common)
    return one, next(rank for rank, value in values.items() if value != common)


def _reduction(call: Call) -> str:
    reduce_op = call.arguments.get("reduce_op")
    if reduce_op is None:  # ops of comm.exchange have no such argument, and always sum
        return "sum" if call.op == "reduce_scatter" else ""
    return (
        reduce_op
        if isinstance(reduce_op, str)
        else dist.ReduceOp.RedOpType(reduce_op.op()).name.lower()
    )


def _given_and_taken(call: Call) -> tuple[Sequence[str], Sequence[str]]:
    """Return the shapes that this rank sends to, and receives from, each rank of the group."""
    inputs, outputs, num_ranks = call.inputs, call.outputs, len(call.ranks)
    if call.op == "all_gather":
        whole = [_shapes(inputs)] * num_ranks
        return whole, _listed(outputs, num_ranks) or whole
    if call.op == "reduce_scatter":
        shard = _shapes(outputs) or ", ".join(_cut(t, None, num_ranks)[0] for t in _flat(inputs))
        return _listed(inputs, num_ranks) or [shard] * num_ranks, [shard] * num_ranks
    if call.op == "all_to_all" and len(inputs) == num_ranks > 1:
        return [_shapes([t]) for t in inputs], [_shapes([t]) for t in outputs]
    if call.op == "all_to_all":
        sizes, other_sizes = (call.arguments[f"{end}_split_sizes"] for end in ("input", "output"))
        other = (outputs or inputs)[0]
        return _cut(inputs[0], sizes, num_ranks), _cut(other, other_sizes, num_ranks)
    if call.op in ("gather", "scatter"):
        root: int = call.arguments["root_rank"]
        of_all, of_rank = (outputs, inputs) if call.op == "gather" else (inputs, outputs)
        is_root = call.group.rank() == root
        by_root = _listed(of_all, num_ranks) if is_root else [""] * num_ranks
        by_others = [_shapes(of_rank) if rank == root else "" for rank in range(num_ranks)]
        return (by_others, by_root) if call.op == "gather" else (by_root, by_others)
    return (), ()


def _listed(tensors: list[Any], num_ranks: int) -> list[str]:
    """Return the shapes if `tensors` is one list of a tensor for each rank, else an empty list."""
    is_listed = len(tensors) == 1 and isinstance(tensors[0], Sequence)
    return [_shapes([t]) for t in tensors[0]] if is_listed and len(tensors[0]) == num_ranks else []


def _cut(tensor: torch.Tensor, sizes: Sequence[int] | None, num_ranks: int) -> list[str]:
    """Return the shapes of a tensor split along its first dimension, evenly if `sizes` is empty."""
    even = [len(tensor) // num_ranks] * num_ranks
    return [_shape([size, *tensor.shape[1:]]) for size in (sizes or even)]


def _flat(tensors: list[Any]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for one in tensors:
        flat.extend([one] if isinstance(one, torch.Tensor) else one)
    return flat


def _shapes(tensors: list[Any]) -> str:
    return ", ".join(_shape(tensor.shape) for tensor in _flat(tensors))


def _shape(sizes: Sequence[int]) -> str:
    return f"[{'x'.join(map(str, sizes))}]"
