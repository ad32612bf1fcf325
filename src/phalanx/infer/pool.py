"""Block allocator of the key-value cache, with reference counts and prefix reuse. No torch.

A block stores the keys and values of consecutive positions of one sequence, in every layer
(Kwon et al. 2023, PagedAttention, arXiv 2309.06180, section 4). A `BlockTable` lists the blocks of
a sequence, so its memory need not be contiguous, and at most one of its blocks is partly empty.

    held   referenced by at least one sequence; references are counted
    free   no reference; blocks are reallocated in the order in which they became free

A full block keeps its content while it is free, and `match` can find it. Its key is its tokens and
the id of the content of the block before it; each content has a unique id. Python's dict compares
the tokens themselves when hashes are equal, so a hash collision cannot return a wrong block. A
block loses its content when it is reallocated (lazy eviction, least recently used first). A
sequence frees its last block first, so the start of a prompt, which others may share, is evicted
last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = 0
"""Content id that stands before the first block of every sequence."""


class BlockCopy(NamedTuple):
    """Copy of block `source` to block `target`, to be done before a step writes to the cache."""

    source: int
    target: int


@dataclass
class BlockTable:
    """Block table of a sequence, in the order of its positions.

    Attributes:
        blocks: block numbers.
        content_ids: content ids of the leading full blocks that are published.
        root: content id before the first block; sequences of different roots share no block.
    """

    blocks: list[int] = field(default_factory=list[int])
    content_ids: list[int] = field(default_factory=list[int])
    root: int = ROOT

    @property
    def last_content_id(self) -> int:
        """Content id of the last published block; `root` if there is none."""
        return self.content_ids[-1] if self.content_ids else self.root


class BlockPool:
    """Allocator of all blocks of a key-value cache.

    Attributes:
        num_blocks: number of blocks.
        block_size: positions of a block.
        has_prefix_cache: whether `match` reuses full blocks with equal content (prefix caching).
        num_evicted: number of contents that were lost to reallocation.
    """

    def __init__(self, num_blocks: int, block_size: int, *, has_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.has_prefix_cache = has_prefix_cache
        self.num_evicted = 0
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._last_content = ROOT
        self._block_by_key: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Number of blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)

    def match(self, tokens: Sequence[int], root: int = ROOT) -> BlockTable:
        """Return a table of the longest cached prefix of `tokens`, and hold its full blocks.

        A root other than ROOT is below it, as no content has such an id.

        The last token is never part of the prefix, because its logits must be computed.
        """
        # Blocks of 4; the key of a block is the content before it and its own tokens:
        #
        #     cached    ROOT -> [a b c d] content 1 -> [e f g h] content 2
        #     prompt          a b c d e f g h         8 tokens: content 1, as the last is computed
        #     prompt          a b c d e f g h i       9 tokens: contents 1 and 2
        #     prompt          x b c d e f g h i       none: content 2 follows content 1 alone
        table = BlockTable(root=root)
        if not self.has_prefix_cache:
            return table
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = (table.last_content_id, tuple(tokens[start : start + self.block_size]))
            if (cached := self._block_by_key.get(key)) is None:
                break
            block, content_id = cached
            self._hold(block)
            table.blocks.append(block)
            table.content_ids.append(content_id)
        return table

    def reserve(self, table: BlockTable, start: int, stop: int) -> list[BlockCopy] | None:
        """Make positions [start, stop) of a sequence writable.

        Allocate the blocks that are missing, and replace a block that another sequence holds too by
        a copy (copy on write).

        Returns:
            The blocks to copy; None if too few blocks are free, and then nothing has changed.
        """
        # Positions 6 .. 9 of a forked sequence, blocks of 4; block 7 is held by its sibling too:
        #
        #     before    [3] [7]          references 2, 2
        #     after     [3] [9] [4]      7 is copied to 9, which is then written; 4 is new
        have, first = len(table.blocks), start // self.block_size
        needed = self.blocks_for(stop)
        shared = [
            n for n in range(first, min(have, needed)) if self._ref_counts[table.blocks[n]] > 1
        ]
        if len(shared) + max(needed - have, 0) > len(self._free):
            return None
        copies: list[BlockCopy] = []
        for number in shared:
            copy = BlockCopy(table.blocks[number], self._allocate())
            self.release([copy.source])
            table.blocks[number] = copy.target
            copies.append(copy)
        if shared:  # a copy must be published again before `match` can find it
            del table.content_ids[shared[0] :]
        table.blocks += [self._allocate() for _ in range(needed - have)]
        return copies

    def publish(self, table: BlockTable, tokens: Sequence[int], stop: int) -> None:
        """Register the full blocks of the first `stop` tokens, so that `match` finds them."""
        if not self.has_prefix_cache:
            return
        for number in range(len(table.content_ids), stop // self.block_size):
            start = number * self.block_size
            key = (table.last_content_id, tuple(tokens[start : start + self.block_size]))
            if key not in self._block_by_key:  # else the block that has this content already stays
                self._last_content += 1
                block = table.blocks[number]
                self._block_by_key[key] = (block, self._last_content)
                self._key_of[block] = key
            table.content_ids.append(self._block_by_key[key][1])

    def unpublish(self, table: BlockTable) -> None:
        """Unregister the contents of a sequence, so that no other sequence reuses them."""
        for block in table.blocks:
            self._evict(block)

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table that holds the same blocks; `reserve` copies them on write."""
        for block in table.blocks:
            self._hold(block)
        return BlockTable(list(table.blocks), list(table.content_ids), table.root)

    def free(self, table: BlockTable) -> None:
        """Release all blocks of a sequence, the last block first."""
        self.release(reversed(table.blocks))
        table.blocks, table.content_ids = [], []

    def release(self, blocks: Iterable[int]) -> None:
        """Decrement the reference count of each block, and free blocks without a reference."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def clear_prefixes(self) -> None:
        """Unregister all contents, for example after new weights; no sequence may hold blocks."""
        assert self.num_held == 0, "a sequence holds blocks whose content would be unregistered"
        self._block_by_key.clear()
        self._key_of.clear()

    def _allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._ref_counts[block] = 1
        self.num_evicted += self._evict(block)
        return block

    def _evict(self, block: int) -> bool:
        """Unregister the content of a block, and return whether it had one."""
        if (key := self._key_of.pop(block, None)) is None:
            return False
        del self._block_by_key[key]
        return True

    def _hold(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1
