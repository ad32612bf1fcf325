"""The split: by name, near its share, and whole documents where that can be."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.corpus import Document
from phalanx.data.tokens import HeldOut, hold_out


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=40),
    share=st.floats(0, 0.9),
)
def test_parts_hold_all_bytes_and_validation_is_near_its_share(
    sizes: list[int], share: float
) -> None:
    names = [f"d{i}" for i in range(len(sizes))]
    split = hold_out(names, sizes, share)
    got = sum(sizes[i] for i in split.validation) + (split.cut[1] if split.cut else 0)
    wanted = round(share * sum(sizes))
    assert abs(got - wanted) <= max(wanted / 4, 1)
    if split.cut:
        assert split.cut[0] not in split.validation
        assert 0 < split.cut[1] <= sizes[split.cut[0]]


def test_share_of_zero_keeps_nothing_aside() -> None:
    assert hold_out(["a", "b"], [10, 10], 0.0) == HeldOut()


def test_a_new_document_moves_few_others() -> None:
    names = [f"d{i}" for i in range(1000)]
    before = hold_out(names, [100] * 1000, 0.1)
    after = hold_out(["new", *names], [100] * 1001, 0.1)
    old = {names[i] for i in before.validation}
    new = {["new", *names][i] for i in after.validation}
    assert len(old) == 100
    assert len(old ^ new) <= 2


def test_single_document_is_cut_at_a_line() -> None:
    text = "".join(f"line {i} é\n" for i in range(1000))
    size = len(text.encode())
    split = hold_out(["only"], [size], 0.1)
    (is_a, first), (is_b, second) = split.parts(0, Document("only", text))
    assert (is_a, is_b) == (False, True)
    assert first + second == text
    assert first.endswith("\n")
    assert abs(len(second.encode()) / size - 0.1) < 0.005


@given(text=st.text(min_size=1, max_size=60), wanted=st.integers(1, 60))
def test_cut_loses_nothing(text: str, wanted: int) -> None:
    size = len(text.encode("utf-8", "ignore"))
    text = text.encode("utf-8", "ignore").decode()
    if not 0 < wanted < size:
        return
    split = HeldOut(frozenset(), (0, wanted))
    assert "".join(part for _, part in split.parts(0, Document("d", text))) == text
