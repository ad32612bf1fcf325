"""Time what PyTorch's DTensor takes to add two tensors of a shape it has not added before.

    python benchmarks/tensor/dtensor_add.py

It plans such an addition over all axes of the mesh at once. No rank is started: the process group
is PyTorch's fake one.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    print("axes  first addition of a shape, ms (min-max of 5)  again, ms")
    for num_axes in range(1, 5):
        sizes = (2,) * (num_axes - 1) + (2 ** (5 - num_axes),)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abcd"[:num_axes]))
        placements = [Shard(0), Shard(1), Shard(0), Shard(1)][:num_axes]
        first_ms, again_ms = [], []
        for size in range(4, 10):
            a, b = (
                DTensor.from_local(torch.ones(size, size), mesh, placements, run_check=False)
                for _ in range(2)
            )
            for times in (first_ms, again_ms):
                began = time.perf_counter()
                a.add_(b)
                times.append(1e3 * (time.perf_counter() - began))
        del first_ms[0], again_ms[0]  # with what is loaded at the first use
        print(
            f"{num_axes:4}  {statistics.median(first_ms):.1f} "
            f"({min(first_ms):.1f}-{max(first_ms):.1f})  {statistics.median(again_ms):.2f}"
        )


if __name__ == "__main__":
    main()
