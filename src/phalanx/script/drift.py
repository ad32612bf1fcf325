"""Checksums that show whether ranks are equal, and messages on differences: pure functions.

Checksum words of 11 bits and their squares are summed over the ranks in float64, exactly for up to
2**15 ranks. N words are equal if and only if N (sum of squares) = (sum)^2, so every rank detects a
difference from the sums.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.comm.comm import local_shard

STEPS = "steps"
BATCHES = "batches"
AHEAD = "ahead"
CLIPS = "clips"

_COUNT_MESSAGES = {
    STEPS: "rank {0} has taken {1} steps and rank {2} has taken {3}, so their weights differ; each "
    "rank must step, or skip a step, when the others do",
    BATCHES: "the ranks have read different numbers of batches before the last one, {1} on rank "
    "{0} and {3} on rank {2}, so that rows of several global batches were added up; each rank must "
    "read, or leave out, a batch when the others do",
    AHEAD: "{1} batches wait for a run.backward on rank {0} and {3} on rank {2}, so the ranks use "
    "different batches as the last of a pass; each rank must use, or leave out, a batch that "
    "it has read when the others do",
    CLIPS: "run.clip was called {1} times on rank {0} and {3} times on rank {2}, so their weights "
    "differ; call it on every rank, and not under `if run.is_first`",
}


class Digest(NamedTuple):
    """Checksum of a rank's shard of a tensor.

    Attributes:
        place: which shard it is, such as "fsdp=1"; empty where all ranks hold the whole tensor.
        bits: sum of its bits, see `bits_of`.
        total: sum of its elements, for messages.
    """

    place: str
    bits: int
    total: float


@dataclass(frozen=True)
class RankState:
    """State of one rank that ranks compare.

    Attributes:
        rank: the global rank.
        counts: numbers of `STEPS`, `BATCHES`, `AHEAD` and `CLIPS`.
        settings: settings of the optimizers, by a name such as "lr of group 0 of SGD".
        weights: digests of the parameters, by name.
        states: digests of optimizer states, by a name such as "exp_avg of 0.weight".
    """

    rank: int
    counts: Mapping[str, int]
    settings: Mapping[str, str]
    weights: Mapping[str, Digest]
    states: Mapping[str, Digest]

    def to_text(self) -> str:
        """Return this state as JSON, for the job's store."""
        return json.dumps(vars(self))

    @classmethod
    def of_text(cls, text: str) -> RankState:
        """Return the state that `to_text` encoded."""
        values: dict[str, Any] = json.loads(text)
        for part in ("weights", "states"):
            values[part] = {name: Digest(*each) for name, each in values[part].items()}
        return cls(**values)


class Drift(NamedTuple):
    """A difference between two ranks, with the message on it."""

    kind: _Kind
    words: str


def first_difference(ranks: Sequence[RankState]) -> Drift | None:
    """Return the first difference, causes before effects; None if all ranks are equal."""
    for kind, words in _WORDS.items():
        for name in _names(getattr(facts, kind) for facts in ranks):
            if apart := _first_unequal_pair(ranks, kind, name):
                return Drift(kind, words(name, *apart))
    return None


def _first_unequal_pair(
    ranks: Sequence[RankState], kind: str, name: str
) -> tuple[RankState, RankState] | None:
    """Return the first holder of a shard and the first replica that differs; None if equal."""
    first: dict[str, RankState] = {}
    for facts in ranks:
        value = getattr(facts, kind).get(name)
        other = first.setdefault(value.place if isinstance(value, Digest) else "", facts)
        theirs = getattr(other, kind).get(name)
        if isinstance(value, Digest) and isinstance(theirs, Digest):
            value, theirs = value.bits, theirs.bits
        if value != theirs:
            return other, facts
    return None


def _names(parts: Any) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _of_setting(name: str, a: RankState, b: RankState) -> str:
    here, there = (facts.settings.get(name, "not set") for facts in (a, b))
    words = f"{name} is {here} on rank {a.rank} and {there} on rank {b.rank}; "
    if name.startswith("the kind"):
        return words + "make the same optimizer on every rank"
    if name.startswith("the arguments"):
        return words + "give run.clip the same on every rank"
    if not name.startswith("lr "):
        return words + "give it the same value on every rank"
    return words + (
        "step the scheduler on every rank, and with the same value: a scheduler that takes a loss, "
        "such as ReduceLROnPlateau, needs the loss that run.backward returned, or a run.sum"
    )


def _of_weights(name: str, a: RankState, b: RankState) -> str:
    words = f"{name} {_values(a.weights.get(name), b.weights.get(name), a, b)}; "
    for state in _names([a.states, b.states]):
        if _first_unequal_pair([a, b], "states", state):
            return words + (
                f"so does the optimizer's {state}: clip gradients by run.clip, and change "
                "gradients, weights and the optimizer's state on every rank"
            )
    if a.states:
        return words + (
            "the optimizers' states are equal, so code other than a step has set weights on one "
            "rank only; call load_state_dict, and set weights, on every rank, or before run.prepare"
        )
    return words + (
        "weights, or gradients, were changed on one rank only; change them on every rank, and clip "
        "gradients by run.clip"
    )


_Kind = Literal["counts", "settings", "weights", "states"]

_WORDS: Final[Mapping[_Kind, Callable[[str, RankState, RankState], str]]] = {
    "counts": lambda name, a, b: _COUNT_MESSAGES[name].format(
        a.rank, a.counts[name], b.rank, b.counts[name]
    ),
    "settings": _of_setting,
    "weights": _of_weights,
    "states": lambda name, a, b: (
        f"the optimizer's {name} {_values(a.states.get(name), b.states.get(name), a, b)}; load the "
        "state of an optimizer on every rank"
    ),
}
"""Kind of difference -> function that makes the message from a name and two ranks' facts."""


def _values(here: Digest | None, there: Digest | None, a: RankState, b: RankState) -> str:
    if here is None or there is None:
        return f"exists only on rank {(b if here is None else a).rank}"
    left, right = f"{here.total:.6g}", f"{there.total:.6g}"
    if left == right:
        left, right = f"{here.total:.17g}", f"{there.total:.17g}"
    return f"differs: its elements add up to {left} on rank {a.rank} and {right} on rank {b.rank}"


WORD_BITS: Final = 11

_MIX: Final = -0x61C8864680B583EB
"""Odd multiplier with mixed bits, for weights that make a swap of two tensors visible."""


def bits_of(tensor: Tensor) -> Tensor:
    """Return the wrapping sum of a tensor's bits, read as int64 words; int64, 0-d."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.data_ptr() % 8:  # an unaligned slice of a buffer has no int64 view
        flat = flat.clone()
    per_piece = 8 // flat.element_size()
    num_whole = len(flat) // per_piece * per_piece
    total = flat[:num_whole].view(torch.int64).sum()
    if num_whole < len(flat):
        rest = flat.new_zeros(per_piece)
        rest[: len(flat) - num_whole] = flat[num_whole:]
        total = total + rest.view(torch.int64)[0]
    return total


def words_of_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of tensors' bits that depends on their order, as 6 words; float64."""
    bits = torch.stack([bits_of(tensor) for tensor in tensors])
    odd = 2 * torch.arange(len(tensors), device=bits.device) + 1
    total = (bits * (odd * _MIX)).sum()
    shifts = torch.arange(0, 64, WORD_BITS, device=bits.device)
    return ((total >> shifts) & (2**WORD_BITS - 1)).double()


def words_of(text: str) -> list[int]:
    """Return the CRC-32 of a text, as 3 words."""
    checksum = zlib.crc32(text.encode())
    return [checksum >> shift & (2**WORD_BITS - 1) for shift in range(0, 32, WORD_BITS)]


def with_squares(words: Sequence[int]) -> list[int]:
    """Return words followed by their squares, to be summed over the ranks."""
    return [*words, *(word**2 for word in words)]


def sums_show_equal(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether all ranks had equal words, given the sums of words and of squares."""
    half = len(sums) // 2
    pairs = zip(sums[:half], sums[half:], strict=True)
    return all(num_ranks * squares == total**2 for total, squares in pairs)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of tensors, or of local shards, to compare between ranks."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = local_shard(tensor.detach()).cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def first_unequal_rank(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value differs from rank 0's; None if all are equal."""
    return next((rank for rank, each in enumerate(values) if each != values[0]), None)
