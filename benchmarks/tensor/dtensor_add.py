"""Time what PyTorch's DTensor takes to add two tensors of a shape it has not added before.

    python benchmarks/tensor/dtensor_add.py

It plans an addition over all axes of the mesh together. No rank is started: the process group is
PyTorch's fake one.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

PLACEMENTS = [Shard(0), Shard(1), Shard(0), Shard(1)]


def milliseconds(work: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    print("ms, median (min-max) of 5 shapes")
    print("axes            first a.add_(b)               first a + b  again")
    for num_axes in range(1, 5):
        sizes = (2,) * (num_axes - 1) + (2 ** (5 - num_axes),)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abcd"[:num_axes]))
        in_place, out_of_place, again = [], [], []
        for size in range(4, 10):
            a, b = (
                DTensor.from_local(
                    torch.ones(size, size), mesh, PLACEMENTS[:num_axes], run_check=False
                )
                for _ in range(2)
            )
            in_place.append(milliseconds(lambda a=a, b=b: a.add_(b)))
            out_of_place.append(milliseconds(lambda a=a, b=b: a + b))
            again.append(milliseconds(lambda a=a, b=b: a.add_(b)))
        # Without the first shape, which loads what is used.
        columns = [
            f"{statistics.median(ms):.1f} ({min(ms):.1f}-{max(ms):.1f})"
            for ms in (in_place[1:], out_of_place[1:])
        ]
        print(
            f"{num_axes:4}  {columns[0]:>25} {columns[1]:>25} {statistics.median(again[1:]):6.2f}"
        )


if __name__ == "__main__":
    main()
