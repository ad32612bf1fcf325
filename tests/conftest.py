"""What all tests share: the server that their ranks are forked from has the libraries loaded."""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

from namespaces import switch

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
    *("phalanx.train.job", "phalanx.verify.harness", "ranks_preload"),
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
