"""Folders that transformers has written, and edits that break them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from small_models import model_of
from torch import Tensor

from phalanx.hugging_face.folder import WEIGHTS

GPT2: dict[str, Any] = {"norm": "layer", "position": "learned", "mlp": "gelu", "bias": True}
"""What sets a shape of GPT-2 apart from one of Llama."""


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    model_of(name).save_pretrained(folder, **options)
    return folder


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit
