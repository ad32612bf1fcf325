"""Groups open the connections that they use, and a job with too many for a rank is told."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import join
from phalanx.comm.comm import Ranks
from phalanx.comm.meshes import job_mesh
from phalanx.comm.together import gather_objects, gather_on_first
from phalanx.errors import ConfigError
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.shape import ModelShape
from phalanx.parallel.plan import Plan
from phalanx.strategy import Strategy

resource = pytest.importorskip("resource")


@pytest.fixture
def limits() -> Generator[tuple[int, int]]:
    """The limits of open files, as they are put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_open(kind: str = "") -> int:
    """Return how many files this process has open whose name begins so."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of listdir itself
            continue
        count += target.startswith(kind)
    return count


def counts(text: str) -> dict[str, int]:
    """Return what this rank has open before and after a mesh and all kinds of calls."""
    sockets = num_open("socket:")
    comm = Ranks(Strategy.parse(text))
    for axis in comm.axes:
        dist.all_reduce(torch.ones(1000), group=comm.mesh.get_group(axis))
    connected = num_open("socket:")
    gather_objects("x" * 1000)
    gather_on_first("x" * 1000)
    dist.broadcast_object_list([None], src=0)
    dist.all_reduce(torch.ones(100_000))
    return {
        "joined": sockets,
        "connected": connected,
        "used": num_open("socket:"),
        "files": num_open(),
        "mapped": num_open("/memfd:phalanx"),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
@pytest.mark.fresh_ranks
@pytest.mark.parametrize("text, num_peers", [("fsdp2", 1), ("dp2,fsdp2", 2), ("dp4,tp2", 4)])
def test_a_rank_connects_to_few_ranks_and_never_later(text: str, num_peers: int) -> None:
    strategy = Strategy.parse(text)
    axes = {name: axis.degree for name, axis in strategy.axes() if axis.degree > 1}
    ranks = run_ranks(counts, strategy.num_ranks, text, threads=1)
    for found in ranks:
        assert found["used"] == found["connected"]
        assert found["mapped"] == 2 + num_peers
        assert found["files"] <= join.num_files(axes, strategy.num_ranks, "cpu")
    # To the ranks 1, 2 and 4 away, to listen, twice to the store and to the parent.
    assert all(found["joined"] <= 5 + 1 + 3 for found in ranks)


def test_connections_grow_with_the_logarithm_of_the_ranks() -> None:
    axes = {"dp": 64, "fsdp": 8, "tp": 8}
    store = join.STORE_CONNECTIONS * 4096
    on_cpu = join.num_files(axes, 4096, "cpu") - store - join.RESERVED_FILES
    assert on_cpu == 2 * 12 + (2 * 6 + 7 + 7) + 4 * join.GROUP_FILES + 2 + (63 + 7 + 7)
    assert join.num_files(axes, 4096, "cuda") - store == join.RESERVED_FILES


def test_the_files_that_the_system_allows_are_used(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 256), limits[1]))
    join.raise_file_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard or (sys.platform == "darwin" and soft > 256)


def test_a_job_too_large_for_the_files_is_refused_with_the_most_that_fit(
    limits: tuple[int, int],
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    with pytest.raises(ConfigError, match=r"4096 ranks need \d+ open files .* may open 1024") as at:
        join.check_files({}, 4096, "cuda")
    fits = int(re.findall(r"at most (\d+) ranks", str(at.value))[0])
    assert join.num_files({}, fits, "cuda") <= 1024
    assert join.num_files({}, fits + 1, "cuda") > 1024
    join.check_files({}, fits, "cuda")


def test_groups_of_others_are_connected_as_ever() -> None:
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    with join.lazily_connected():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


def meshes_and_a_split(text: str) -> list[bool]:
    sizes = {"vocab_size": 16, "num_layers": 1, "hidden": 16, "num_heads": 2, "num_kv_heads": 2}
    shape = ModelShape(**sizes, head_dim=8, ffn=16, max_seq_len=8)
    axes = Strategy.parse(text).mesh_axes()
    first, second = job_mesh(axes), job_mesh(dict(axes))
    alone = job_mesh({"dp": 4})
    for seed in range(2):  # the second model of the same split, in the same job
        model = Decoder(shape)
        model.initialize(seed)
        Plan(Strategy.parse(text), model).build(Ranks(Strategy.parse(text)))
        model(torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64)).backward()
    return [first is second, alone is not first]


def test_a_job_has_one_mesh_of_the_same_axes() -> None:
    """FSDP2 refuses a parameter whose mesh is only equal to the one that it is given."""
    assert run_ranks(meshes_and_a_split, 4, "fsdp2,tp2") == [[True, True]] * 4


def groups_beside(num_models: int) -> tuple[set[str], float]:
    """Ask for a second group of each axis, as one model after another does, and sum over one."""
    comm = Ranks({"dp": 2, "fsdp": 2})
    others = [comm.with_separate_groups("data") for _ in range(num_models)]
    names = {other._engines[axis].group.group_name for other in others for axis in ("dp", "fsdp")}
    assert names.isdisjoint(group.group_name for group in comm._job.groups.values())
    return names, float(others[-1].all_reduce(torch.ones(()), "data"))


def test_a_job_has_one_second_group_of_an_axis() -> None:
    for names, total in run_ranks(groups_beside, 4, 3, threads=1):
        assert len(names) == 2
        assert total == 4
