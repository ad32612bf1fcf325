"""Samples: each token predicted once, documents told apart, bytes exact."""

import math
import pickle
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.data.samples import Samples
from phalanx.data.token_file import TokenFile, TokenWriter, open_token_file
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.models.shape import ModelShape

END = 9


def token_file(path: Path, documents: list[list[int]]) -> TokenFile:
    with TokenWriter(path, num_ids=10, end_id=END) as writer:
        for document in documents:
            writer.begin_document()
            writer.write(document)
    return open_token_file(path)


def test_a_batch_in_full(tmp_path: Path) -> None:
    # 9 1 2 3 9 4 9 5 6 9: windows of 4
    samples = Samples(token_file(tmp_path / "a", [[1, 2, 3], [4], [5, 6]]), 4)
    assert len(samples) == 3
    batch = samples.batch(np.array([0, 1, 2, -1]), np.array([10, 11, 12, -1]))
    assert batch.tokens_BT.tolist() == [[9, 1, 2, 3], [9, 4, 9, 5], [6, 0, 0, 0], [0, 0, 0, 0]]
    x = IGNORE
    assert batch.labels_BT.tolist() == [[1, 2, 3, 9], [4, 9, 5, 6], [9, x, x, x], [x, x, x, x]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.documents_BT is not None
    assert batch.documents_BT.tolist() == [[0] * 4, [0, 0, 1, 1], [0] * 4, [0] * 4]
    assert batch.rows_B.tolist() == [10, 11, 12, -1]
    assert int((batch.labels_BT != IGNORE).sum()) == 9
    tensors = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_documents_are_none_when_each_row_holds_one_or_the_mask_is_off(tmp_path: Path) -> None:
    file = token_file(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    one, both = np.array([0, 2]), np.array([0, 1])
    assert Samples(file, 4).batch(one, one).documents_BT is None
    assert Samples(file, 4).batch(both, both).documents_BT is not None
    plain = Samples(file, 4, document_mask=False).batch(both, both)
    assert plain.documents_BT is None
    assert plain.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert plain.labels_BT.tolist() == Samples(file, 4).batch(both, both).labels_BT.tolist()


documents = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=documents, seq_len=st.integers(1, 20))
def test_each_token_is_predicted_once_and_bytes_are_exact(
    tmp_path: Path, texts: list[list[int]], seq_len: int
) -> None:
    samples = Samples(token_file(tmp_path / "a", texts), seq_len)
    rows = np.arange(len(samples))
    batch = samples.batch(rows, rows)
    stream = [token for text in texts for token in [END, *text]] + [END]
    valid = batch.labels_BT != IGNORE
    assert batch.labels_BT[valid].tolist() == stream[1:]
    assert batch.tokens_BT[valid].tolist() == stream[:-1]
    # An id of k stands for k + 1 bytes here, a separator for none.
    table = np.array([*range(1, 10), 0], dtype=np.int32)
    expected = sum(token + 1 for text in texts for token in text)
    assert samples.count_bytes(np.append(rows, -1), table) == expected
    assert samples.count_bytes(rows[:1], table) == table[stream[1 : seq_len + 1]].sum()
    # Positions count within the document, from its first token in the row.
    if batch.documents_BT is not None:
        for numbers, places in zip(batch.documents_BT, batch.positions_BT, strict=True):
            for number in numbers.unique():
                mine = places[numbers == number]
                assert mine.tolist() == list(range(len(mine)))


def test_label_after_a_boundary_counts_and_sees_only_the_separator(tmp_path: Path) -> None:
    """The loss over the masked file is the sum of the losses of each document on its own."""
    texts = [[1, 2, 3], [4, 5], [6, 7, 8, 1]]
    shape = ModelShape(
        vocab_size=10, num_layers=2, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=16,
        max_seq_len=16,
    )  # fmt: skip
    decoder = Decoder(shape).double()
    decoder.initialize(0)

    def loss(name: str, documents: list[list[int]]) -> float:
        samples = Samples(token_file(tmp_path / name, documents), 12)
        assert len(samples) == 1
        batch = samples.batch(np.array([0]), np.array([0]))
        with torch.no_grad():
            total = decoder(
                batch.tokens_BT,
                batch.labels_BT,
                positions_BT=batch.positions_BT,
                documents_BT=batch.documents_BT,
            )
        return float(total)

    alone = sum(loss(str(number), [text]) for number, text in enumerate(texts))
    assert math.isclose(loss("all", texts), alone, rel_tol=1e-12)


def test_pickle_sends_no_tokens(tmp_path: Path) -> None:
    samples = Samples(token_file(tmp_path / "a", [[1] * 100_000]), 4)
    before = samples.batch(np.array([3]), np.array([3])).tokens_BT
    raw = pickle.dumps(samples)
    assert len(raw) < 1000
    copy = pickle.loads(raw)
    assert torch.equal(copy.batch(np.array([3]), np.array([3])).tokens_BT, before)


def test_edges(tmp_path: Path) -> None:
    assert len(Samples(token_file(tmp_path / "a", []), 4)) == 0
    batch = Samples(token_file(tmp_path / "b", [[1]]), 2).batch(np.array([0]), np.array([0]))
    moved = batch.to("cpu")
    assert torch.equal(moved.tokens_BT, batch.tokens_BT)
