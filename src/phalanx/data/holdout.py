"""Split the documents of a corpus into training and validation by their names and sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.data.corpus import Document


@dataclass(frozen=True)
class HeldOut:
    """Numbers of the validation documents; `cut` is (number, bytes) of one held out in part."""

    validation: frozenset[int] = frozenset()
    cut: tuple[int, int] | None = None

    def parts(self, number: int, document: Document) -> Iterator[tuple[bool, str]]:
        """Yield (is_validation, text) for each part of document `number`."""
        if self.cut is not None and number == self.cut[0]:
            raw = document.text.encode()
            at = len(raw) - self.cut[1]
            # Cut after a line if one ends nearby, else at the start of a character.
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

    Documents are held out whole, in an order of the hashes of their names, so that a document added
    to the corpus moves few others between the splits. A document is cut if holding it out whole or
    not at all would miss the fraction by over a quarter, or if no other is left to train on.
    """
    wanted = round(fraction * sum(sizes_bytes))
    hashes = [
        hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for name in names
    ]
    order = sorted(range(len(names)), key=lambda number: (hashes[number], number))
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
