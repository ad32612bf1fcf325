"""The heap of a process: blocks are given out once, come back, and beyond a limit leave memory."""

import gc
import os

import pytest
import torch

from phalanx.comm import heap as heaps
from phalanx.comm.heap import PAGE, Heap, mapped

MIB = 1 << 20


def resident_bytes(heap: Heap) -> int:
    return 512 * os.fstat(heap.file).st_blocks


def test_blocks_do_not_overlap_and_are_given_out_again() -> None:
    heap, generator = Heap(), torch.Generator().manual_seed(0)
    held: dict[int, torch.Tensor] = {}
    for turn in range(300):
        size = int(torch.randint(0, 3 * PAGE, (), generator=generator))
        held[turn] = heap.empty([size], torch.int32).fill_(turn)
        if turn % 3:
            del held[min(held)]
        for key, tensor in held.items():
            assert bool((tensor == key).all())
    views = [tensor[1:2] for tensor in held.values() if len(tensor) > 1]
    assert all(heap.block_of(view) is not None for view in views)
    assert heap.block_of(torch.ones(3)) is None
    del tensor
    held.clear()
    views.clear()
    resident = resident_bytes(heap)
    assert len(heap.block(resident - PAGE)) == resident - PAGE  # all of it, joined
    assert resident_bytes(heap) == resident


def test_a_block_stays_while_its_tensor_or_the_block_is_held() -> None:
    heap = Heap()
    tensor = heap.empty([4], torch.float64)
    block, address = heap.block_of(tensor), tensor.data_ptr()
    del tensor
    assert heap.empty([4], torch.float64).data_ptr() != address
    del block
    assert heap.empty([4], torch.float64).data_ptr() == address


def test_what_is_freed_beyond_the_limit_goes_back_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heaps, "KEPT_BYTES", 16 * MIB)
    heap = Heap()
    tensors = [heap.empty([8 * MIB], torch.uint8).fill_(1) for _ in range(4)]
    assert resident_bytes(heap) == 32 * MIB + PAGE
    tensors.clear()
    gc.collect()
    assert heap.empty([12 * MIB], torch.uint8).sum() >= 0  # two that were kept, joined
    assert resident_bytes(heap) == 16 * MIB + PAGE


def test_too_much_is_an_error_and_nothing_else() -> None:
    heap = Heap()
    with pytest.raises(OSError, match="left"):
        heap.empty([heap.num_bytes], torch.uint8)
    assert heap.empty([MIB], torch.uint8).fill_(3).sum() == 3 * MIB


def test_a_file_is_taken_for_a_heap_by_its_name_size_and_token() -> None:
    heap, process = Heap(), os.getpid()
    with pytest.raises(OSError, match="a different heap"):
        mapped(process, heap.file, b"0" * 16, heap.num_bytes)
    for size in (heap.num_bytes + PAGE, heap.num_bytes - PAGE):
        with pytest.raises(OSError, match=f"has {heap.num_bytes} bytes; expected {size}"):
            mapped(process, heap.file, heap.token, size)
    others = os.open(os.devnull, os.O_RDONLY), os.memfd_create("phalanx-weights")
    os.ftruncate(others[1], heap.num_bytes)
    os.pwrite(others[1], heap.token, 0)
    for other in others:
        with pytest.raises(OSError, match="expected a memory file named phalanx"):
            mapped(process, other, heap.token, heap.num_bytes)
        os.close(other)
    found = mapped(process, heap.file, heap.token, heap.num_bytes)
    tensor = heap.empty([3], torch.int64).fill_(7)
    offset = tensor.data_ptr() - heap.address
    assert found.tensor(offset, 24, torch.int64).tolist() == [7, 7, 7]
    del heaps._MAPPED[heap.token]
