"""Chunks go to servers in proportion to their weights, and few move where one comes or goes."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.server.placement import chunks_of, place, ranked


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.sampled_from([4, 8]))
def test_chunks_cover_each_group_once(sizes: list[int], itemsize: int) -> None:
    chunks = chunks_of(sizes, itemsize, 1024)
    for group, size in enumerate(sizes):
        held = [i for c in chunks if c.group == group for i in range(c.begin, c.end)]
        assert held == list(range(size))
    assert all((c.end - c.begin) * itemsize <= 1024 for c in chunks)


def test_a_lost_server_moves_its_own_chunks_alone_to_the_second_of_each() -> None:
    chunks = chunks_of([4_000_000], 4, 4096)
    weights = dict.fromkeys(("a", "b", "c"), 1.0)
    before, after = place(chunks, weights), place(chunks, {"a": 1.0, "b": 1.0})
    assert set(before["a"]) <= set(after["a"]) and set(before["b"]) <= set(after["b"])
    assert all(len(held) > 0.28 * len(chunks) for held in before.values())
    assert ranked("x", weights)[1:] == ranked("x", {n: 1.0 for n in ranked("x", weights)[1:]})


def test_a_server_of_twice_the_weight_gets_twice_the_chunks() -> None:
    chunks = chunks_of([8_000_000], 4, 4096)
    placed = place(chunks, {"a": 2.0, "b": 1.0})
    assert 1.9 < len(placed["a"]) / len(placed["b"]) < 2.1


def test_a_table_is_cut_between_rows_and_its_first_rows_are_on_all_servers() -> None:
    chunks = chunks_of([100, 1_000_000 * 16], 4, widths={1: 16})
    rows = [chunk for chunk in chunks if chunk.group == 1]
    assert all(chunk.begin % 16 == chunk.end % 16 == 0 for chunk in rows)
    assert sum(chunk.end - chunk.begin for chunk in rows) == 1_000_000 * 16
    for held in place(chunks, dict.fromkeys("abc", 1.0)).values():
        first = [c for c in held if c.group == 1 and c.end <= 20_000 * 16]
        assert sum(c.end - c.begin for c in first) > 0.2 * 20_000 * 16
