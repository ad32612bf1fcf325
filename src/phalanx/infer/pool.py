"""The blocks of a key-value cache: who holds which, and which are found again. No torch.

A block has room for keys and values of consecutive positions of one sequence, in every layer
(Kwon et al. 2023, PagedAttention, arXiv 2309.06180, section 4). A sequence holds its blocks in a
`BlockTable`, so that its memory needs not be contiguous, and at most one block is partly empty.

    held   by one sequence or by several, counted
    free   by nobody; in the order in which they became free: the first is taken first

A full block keeps its content while it is free, and is found by it: by its tokens and by the
content of the block before it, of which each has a number of its own. Python's dict compares the
tokens themselves where hashes are equal, so no block stands for other tokens. A block forgets its
content when it is taken for another (lazy eviction, least recently used first). A sequence frees
its last blocks first, so the begin of a prompt, which others may share, is evicted last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = 0
"""Number of the content before the first block of any sequence."""


class BlockCopy(NamedTuple):
    """A block whose content is to be copied to another before anything is written."""

    source: int
    target: int


@dataclass
class BlockTable:
    """The blocks of a sequence, in the order of its positions.

    Attributes:
        blocks: numbers of the blocks.
        contents: numbers of the contents of those, from the first, that can be found again.
    """

    blocks: list[int] = field(default_factory=list[int])
    contents: list[int] = field(default_factory=list[int])

    @property
    def content(self) -> int:
        """Number of the last known content."""
        return self.contents[-1] if self.contents else ROOT


class BlockPool:
    """All blocks of a cache.

    Attributes:
        num_blocks: how many there are.
        block_size: positions of a block.
        finds_prefixes: whether full blocks are found again by their content.
        num_evicted: contents that were forgotten since the pool was made.
    """

    def __init__(self, num_blocks: int, block_size: int, *, finds_prefixes: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.finds_prefixes = finds_prefixes
        self.num_evicted = 0
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._last_content = ROOT
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that a sequence holds, or several."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks have room for `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> BlockTable:
        """Return a table that holds the longest known prefix of `tokens`, in full blocks.

        The last token is never part of the prefix: its logits have to be computed.
        """
        table = BlockTable()
        if not self.finds_prefixes:
            return table
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = (table.content, tuple(tokens[start : start + self.block_size]))
            found = self._known.get(key)
            if found is None:
                break
            block, content = found
            self._hold(block)
            table.blocks.append(block)
            table.contents.append(content)
        return table

    def reserve(self, table: BlockTable, start: int, stop: int) -> list[BlockCopy] | None:
        """Make the positions from `start` to `stop` of a sequence its own to write.

        Blocks are taken where it has none yet, and a block that another sequence holds too is
        replaced by a copy (copy on write).

        Returns:
            The blocks to copy; None where too few blocks are free, and then nothing has changed.
        """
        have, first = len(table.blocks), start // self.block_size
        needed = self.blocks_for(stop)
        shared = [n for n in range(first, min(have, needed)) if self._holders[table.blocks[n]] > 1]
        if len(shared) + max(needed - have, 0) > len(self._free):
            return None
        copies: list[BlockCopy] = []
        for number in shared:
            copy = BlockCopy(table.blocks[number], self._take())
            self.release([copy.source])
            table.blocks[number] = copy.target
            copies.append(copy)
        if shared:  # a copy is known once it is published
            del table.contents[shared[0] :]
        table.blocks += [self._take() for _ in range(needed - have)]
        return copies

    def publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Let the full blocks of `tokens`, whose keys and values are written, be found again."""
        if not self.finds_prefixes:
            return
        for number in range(len(table.contents), len(tokens) // self.block_size):
            start = number * self.block_size
            key = (table.content, tuple(tokens[start : start + self.block_size]))
            found = self._known.get(key)
            if found is None:  # else another block has this content already, and stays the known
                self._last_content += 1
                block = table.blocks[number]
                found = self._known[key] = (block, self._last_content)
                self._key_of[block] = key
            table.contents.append(found[1])

    def discard(self, table: BlockTable) -> None:
        """Forget the contents of a sequence, so that no other finds them."""
        for block in table.blocks:
            self._forget(block)

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a table that holds the same blocks; `reserve` copies those that are written."""
        for block in table.blocks:
            self._hold(block)
        return BlockTable(list(table.blocks), list(table.contents))

    def free(self, table: BlockTable) -> None:
        """Give all blocks of a sequence back, the last first."""
        self.release(reversed(table.blocks))
        table.blocks, table.contents = [], []

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back, once for each time that they are named."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def forget(self) -> None:
        """Forget all contents, as after a change of the weights; no sequence may hold blocks."""
        assert self.num_held == 0, "a sequence holds blocks whose content is forgotten"
        self._known.clear()
        self._key_of.clear()

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._holders[block] = 1
        self.num_evicted += self._forget(block)
        return block

    def _forget(self, block: int) -> bool:
        """Forget the content of a block, and return whether it had one."""
        if (key := self._key_of.pop(block, None)) is None:
            return False
        del self._known[key]
        return True

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1
