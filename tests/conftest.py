"""What all tests share: ranks that stay, forked from a server that has the libraries loaded."""

import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

import forks
from namespaces import switch
from phalanx.launch import local
from phalanx.launch.process_memory import collect_as_usual, collect_rarely
from warm_ranks import WARM

__all__ = ["switch"]  # a fixture

# No test bounds wall time.
settings.register_profile("phalanx", deadline=None, max_examples=50)
settings.load_profile("phalanx")

MODELS = (
    *("llama", "gpt2", "bert", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3", "phi3"),
    *("vit", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
)
IMPORTED = [
    *("torch.distributed.fsdp", "torch.nn.parallel", "torch.utils.tensorboard", "torch.utils.data"),
    *("phalanx.comm.join", "torch._dynamo", "torch.distributed.tensor"),
    *("phalanx.train.job", "phalanx.verify.harness", "phalanx.script.proof", "phalanx.show.topics"),
    *("phalanx.infer.app", "phalanx.planner.search", "phalanx.account.activations"),
]
"""What the process that deals the tests out imports for the workers, which are its forks."""

PRELOAD = [
    "phalanx.launch.preload",
    *("phalanx.train.job", "phalanx.verify.harness", "phalanx.script.proof"),
    *("ranks_preload", "warm_ranks"),
    *("pytest", "hypothesis"),
]
OF_LIBRARIES = {
    "transformers": [f"transformers.models.{name}.modeling_{name}" for name in (*MODELS, "resnet")],
    "sklearn": ["sklearn.datasets"],
}
"""What the server loads where a test that was collected has loaded the library."""


def uses_gpu(config: pytest.Config) -> bool:
    return "gpu" in config.getoption("markexpr")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Load for the workers what they all use, once."""
    if sys.platform == "linux" and not uses_gpu(config):
        for name in (*IMPORTED, *chain.from_iterable(OF_LIBRARIES.values())):
            with suppress(ImportError):  # the test that needs it will fail
                importlib.import_module(name)
        gc.collect()
        gc.freeze()
        forks.fork_workers()


def pytest_configure(config: pytest.Config) -> None:
    """Let tests find no GPU but with `-m gpu`: a default device must be the same on every host."""
    if not uses_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):  # what runs keep is not the user's, nor of another day
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="phalanx-tests-")
    local.start_ranks, local.end_ranks = WARM.start, WARM.end
    collect_rarely()  # while tests are imported


def pytest_collection() -> None:
    """Start no threads of OpenMP, which the forks of this process would wait for in vain."""
    import torch

    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of the ranks; not in the process that only deals the tests out."""
    if session.config.option.collectonly:
        return
    gc.freeze()  # full collections then visit what tests make alone
    collect_as_usual()
    loaded = [names for library, names in OF_LIBRARIES.items() if library in sys.modules]
    preload = [*PRELOAD, *chain.from_iterable(loaded), "ranks_started"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    with pytest.MonkeyPatch.context() as patch:
        # The server finds ranks_preload by this alone; what it cannot import it passes over.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        if sys.platform == "linux" and not uses_gpu(session.config):
            forks.start_server_of_ranks()
        else:
            forkserver.ensure_running()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute on one thread: of small operators several wait for one another longer than they work.

    Ranks have as many as their job says.
    """
    import torch  # not in the process that only deals the tests out

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def short_measurements() -> None:
    from short_measurements import shorten  # not in the process that only deals the tests out

    shorten()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    WARM.is_off = item.get_closest_marker("fresh_ranks") is not None
    return (yield)


def pytest_sessionfinish() -> None:
    WARM.end_all()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Hold the clock of this process: a test moves its only element."""
    held = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: held[0])
    return held
