"""Which documents are kept aside for validation: a function of their names and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.data.corpus import Document


@dataclass(frozen=True)
class HeldOut:
    """Documents for validation by number, and one that is cut: its number, and its bytes there."""

    validation: frozenset[int] = frozenset()
    cut: tuple[int, int] | None = None

    def parts(self, number: int, document: Document) -> Iterator[tuple[bool, str]]:
        """Yield the texts of document `number`, each with whether it is for validation."""
        if self.cut is not None and number == self.cut[0]:
            raw = document.text.encode()
            at = len(raw) - self.cut[1]
            # At the end of a line if one is near, else at the start of a character.
            line = raw.find(b"\n", at, at + self.cut[1] // 2) + 1
            at = line or at
            while at < len(raw) and raw[at] & 0xC0 == 0x80:
                at += 1
            pieces = ((False, raw[:at].decode()), (True, raw[at:].decode()))
            yield from (piece for piece in pieces if piece[1])
        else:
            yield number in self.validation, document.text


def hold_out(names: Sequence[str], sizes_bytes: Sequence[int], fraction: float) -> HeldOut:
    """Choose about `fraction` of the bytes, in [0, 1), for validation.

    Documents are taken whole, in an order that depends on their names alone, so that a document
    that joins the corpus moves few others. One document is cut where taking or leaving it would
    miss the fraction by more than a quarter: a corpus of one file has both parts too.
    """
    wanted = round(fraction * sum(sizes_bytes))
    order = sorted(range(len(names)), key=lambda number: (_digest(names[number]), number))
    chosen: set[int] = set()
    taken = 0
    for number in order:
        missing = wanted - taken
        excess = sizes_bytes[number] - missing
        if missing <= 0:
            break
        if excess <= 0:
            chosen.add(number)
            taken += sizes_bytes[number]
        elif min(missing, excess) > wanted / 4 or len(chosen) + 1 == len(names):
            return HeldOut(frozenset(chosen), (number, missing))
        else:
            if excess < missing:
                chosen.add(number)
            break
    return HeldOut(frozenset(chosen))


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
