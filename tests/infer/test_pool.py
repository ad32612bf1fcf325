"""The blocks of the cache: none is lost, freed twice or taken for another's content."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.infer.pool import BlockPool, BlockTable

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


Prefix = tuple[int, ...]


def prefixes(tokens: list[int]) -> list[Prefix]:
    """Return what each position holds: keys and values depend on all tokens up to it."""
    return [tuple(tokens[: at + 1]) for at in range(len(tokens))]


class PoolMachine(RuleBasedStateMachine):
    """Sequences that begin, grow, fork and end, beside a memory that has what each one wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 2)
        self.sequences: list[tuple[BlockTable, list[int]]] = []
        self.memory: list[list[Prefix | None]] = [[None, None] for _ in range(7)]

    def write(self, table: BlockTable, tokens: list[int], start: int) -> bool:
        """Reserve and write the tokens from `start`; return whether there was room."""
        copies = self.pool.reserve(table, start, len(tokens))
        if copies is None:
            return False
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for at in range(start, len(tokens)):
            self.memory[table.blocks[at // 2]][at % 2] = tuple(tokens[: at + 1])
        self.pool.publish(table, tokens, len(tokens))
        return True

    @rule(tokens=TOKENS)
    def begin(self, tokens: list[int]) -> None:
        table = self.pool.match(tokens)
        num_found = 2 * len(table.blocks)
        assert num_found < len(tokens)
        found = [prefix for block in table.blocks for prefix in self.memory[block]]
        if not (is_right := found == prefixes(tokens[:num_found])):
            self.pool.free(table)
        assert is_right, "a block was computed after other tokens"
        if self.write(table, tokens, num_found):
            self.sequences.append((table, tokens))
        else:
            self.pool.free(table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        number = data.draw(st.integers(0, len(self.sequences) - 1))
        table, tokens = self.sequences[number]
        if self.write(table, [*tokens, token], len(tokens)):
            self.sequences[number] = (table, [*tokens, token])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_last_again=st.booleans())
    def fork(self, data: st.DataObject, is_last_again: bool) -> None:
        table, tokens = data.draw(st.sampled_from(self.sequences))
        other = self.pool.fork(table)
        if is_last_again and not self.write(other, tokens, len(tokens) - 1):
            self.pool.free(other)
            return
        self.sequences.append((other, list(tokens)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_broken=st.booleans())
    def end(self, data: st.DataObject, is_broken: bool) -> None:
        table, tokens = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if is_broken:
            self.pool.unpublish(table)
            found = self.pool.match([*tokens, 0])
            assert not set(found.blocks) & set(table.blocks)
            self.pool.free(found)
        self.pool.free(table)

    @precondition(lambda self: not self.sequences)
    @rule()
    def forget(self) -> None:
        self.pool.clear_prefixes()
        assert self.pool.match([0, 0, 1]).blocks == []

    @invariant()
    def each_block_is_free_or_held(self) -> None:
        held = {block for table, _ in self.sequences for block in table.blocks}
        assert self.pool.num_held == len(held)
        assert self.pool.num_free + self.pool.num_held == self.pool.num_blocks

    @invariant()
    def each_sequence_reads_what_it_wrote(self) -> None:
        for table, tokens in self.sequences:
            assert len(table.blocks) == -(-len(tokens) // 2)
            read = [prefix for block in table.blocks for prefix in self.memory[block]]
            assert read[: len(tokens)] == prefixes(tokens)

    def teardown(self) -> None:
        for table, _ in self.sequences:
            self.pool.free(table)
        assert self.pool.num_held == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(2, 4)
    table = BlockTable()
    assert pool.reserve(table, 0, 3) == []
    blocks = list(table.blocks)
    pool.free(table)
    try:
        pool.release(blocks)
    except AssertionError as error:
        assert "free already" in str(error)
    else:
        raise AssertionError("it was freed twice")


def test_the_longest_unused_content_is_evicted_first_and_the_begin_of_a_prompt_last() -> None:
    pool = BlockPool(4, 2)
    tables: list[BlockTable] = []
    for tokens in ([1, 1, 2, 2], [3, 3, 4, 4]):
        table = pool.match(tokens)
        assert pool.reserve(table, 0, 4) is not None
        pool.publish(table, tokens, len(tokens))
        tables.append(table)
    for table in tables:
        pool.free(table)
    assert pool.reserve(BlockTable(), 0, 2) == []  # takes the end of the first
    assert pool.num_evicted == 1
    for tokens, num_found in (([1, 1, 2, 2, 0], 1), ([3, 3, 4, 4, 0], 2)):
        table = pool.match(tokens)
        assert len(table.blocks) == num_found
        pool.free(table)


def test_a_block_is_found_only_after_the_same_prefix() -> None:
    pool, table = BlockPool(4, 2), BlockTable()
    tokens = [1, 2, 3, 4, 9]
    assert pool.reserve(table, 0, 5) == []
    pool.publish(table, tokens, len(tokens))
    for prompt, num_found in (([3, 4, 7], 0), ([3, 4, 3, 4, 7], 0), ([1, 2, 3, 4, 7], 2)):
        assert len(pool.match(prompt).blocks) == num_found


def test_equal_hashes_are_no_equal_contents() -> None:
    pool = BlockPool(4, 1)
    assert hash(-1) == hash(-2)
    table = pool.match([-1, 0])
    assert pool.reserve(table, 0, 2) == []
    pool.publish(table, [-1, 0], 2)
    assert pool.match([-2, 0]).blocks == []
    assert pool.match([-1, 0]).blocks == table.blocks[:1]
