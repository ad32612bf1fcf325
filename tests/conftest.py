"""What all tests share: ranks that stay, forked from a server that has the libraries loaded."""

import multiprocessing
import os
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

from namespaces import switch
from phalanx.launch import local
from warm_ranks import WARM

__all__ = ["switch"]  # a fixture

# No test bounds wall time.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")

MODELS = (
    *("llama", "gpt2", "bert", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3", "phi3"),
    "vit",
)
PRELOAD = [
    "phalanx.launch.preload",
    *("phalanx.train.job", "phalanx.verify.harness", "ranks_preload", "warm_ranks"),
    *("pytest", "hypothesis"),
    # Left out by themselves where transformers is not installed.
    *(f"transformers.models.{name}.modeling_{name}" for name in (*MODELS, "resnet")),
    "sklearn.datasets",
]


def pytest_configure(config: pytest.Config) -> None:
    has_workers = bool(config.getoption("numprocesses", None))
    if has_workers and not hasattr(config, "workerinput"):
        return  # the process that only deals the tests out
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        # The server finds ranks_preload by this alone; what it cannot import it passes over.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    local.start_ranks, local.end_ranks = WARM.start, WARM.end


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    WARM.is_off = item.get_closest_marker("fresh_ranks") is not None
    return (yield)


def pytest_sessionfinish() -> None:
    WARM.end_all()
