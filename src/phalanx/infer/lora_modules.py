"""Low-rank adapters by name beside the served model, any mix of them in one step.

The adapters become one, whose rank is the sum of theirs. A mask keeps, of A x for each token, the
features of the adapter that its request names:

    features of A x     a a a a | b b | c c c c      adapters a, b, c of ranks 4, 2 and 4
    a token of b        0 0 0 0 | b b | 0 0 0 0      then B x as in training
    a token of none     0 0 0 0 | 0 0 | 0 0 0 0

So a step runs the same products for any mix, and tp splits them as it does in training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.checkpoint.weights import Weights, sizes_of
from phalanx.errors import ConfigError
from phalanx.hugging_face.convert import read_adapters
from phalanx.models.decoder import Decoder
from phalanx.models.layers import Linear
from phalanx.models.shape import Lora, linear_maps
from phalanx.parallel.tensor.layout import Layout


@dataclass(frozen=True)
class AdapterSet:
    """The names of the served adapters, and which features of A x are theirs.

    Attributes:
        names: name of each adapter; requests and features number them from 1, and 0 is none.
        owners: number of the adapter of each feature.
    """

    names: tuple[str, ...]
    owners: tuple[int, ...]


def stacked(base: Weights, modules: Sequence[str]) -> tuple[Weights, AdapterSet]:
    """Return the weights of `base` with the adapters of `modules`, each NAME=FOLDER, as one.

    Raises:
        ConfigError: an entry has another form, a name twice, or an adapter of another map.
        CheckpointError: a folder is damaged, or of another model.
    """
    folders: dict[str, Path] = {}
    for entry in modules:
        name, _, folder = entry.partition("=")
        if not name or not folder or name in folders:
            raise ConfigError(f"lora_modules has {entry!r}; expected NAME=FOLDER, each name once")
        folders[name] = Path(folder)
    known = linear_maps(base.shape.mlp, base.shape.experts is not None)
    adapters = [read_adapters(folder, base) for folder in folders.values()]
    for name, adapter in zip(folders, adapters, strict=True):
        for weight in adapter:
            if weight.split(".", 2)[-1].removesuffix(".weight") not in known:
                raise ConfigError(
                    f"lora_modules: {name} adapts '{weight}', but the server adapts only linear "
                    f"maps of blocks; phalanx convert {folders[name]} DST merges it into a model"
                )
    starts, owners = list[int](), list[int]()
    for number, adapter in enumerate(adapters, 1):
        starts.append(len(owners))
        owners += [number] * max(len(each.A) for each in adapter.values())
    used = {weight.split(".", 2)[-1] for adapter in adapters for weight in adapter}
    targets = tuple(target for target in known if f"{target}.weight" in used)
    lora, sizes = Lora(rank=len(owners), alpha=len(owners), targets=targets), sizes_of(base.shape)

    def read(name: str) -> Tensor:
        module, _, letter = name.removesuffix(".weight").rpartition(".lora_")
        if not module:
            return base.read(name)
        num_out, num_in = sizes[f"{module}.weight"]
        lora_A = torch.zeros(len(owners), num_in, dtype=torch.float64)
        lora_B = torch.zeros(num_out, len(owners), dtype=torch.float64)
        for start, adapter in zip(starts, adapters, strict=True):
            if (each := adapter.get(f"{module}.weight")) is not None:
                features = slice(start, start + len(each.A))
                lora_A[features], lora_B[:, features] = each.A, each.B.double() * each.scaling
        return lora_A if letter == "A" else lora_B

    shape = dataclasses.replace(base.shape, lora=lora)
    return dataclasses.replace(base, shape=shape, read=read), AdapterSet((*folders,), (*owners,))


class AdapterMask:
    """Keeps of the adapters of a decoder, for each token of a step, the one of its request."""

    def __init__(self, model: Decoder, adapters: AdapterSet, layout: Layout | None) -> None:
        """Mask the inputs of all maps B of `model`, which `layout` splits if it is not None."""
        self._owners_R = torch.tensor(adapters.owners, device=next(model.parameters()).device)
        self._layout, self._masks = layout, list[Tensor]()
        for name, module in model.named_modules():
            if isinstance(module, Linear) and module.lora_B is not None:
                is_row = name.endswith(("output", "down"))
                module.lora_B.register_forward_pre_hook(functools.partial(self._masked, is_row))

    def set(self, numbers: Sequence[int]) -> None:
        """Set the number of the adapter of each token of the next step; 0 for none."""
        mask_1NR = torch.tensor(numbers, device=self._owners_R.device)[None, :, None]
        mask_1NR = mask_1NR == self._owners_R
        self._masks = [mask_1NR, mask_1NR]
        if (tp := self._layout) is not None:  # after a row map a rank has a part of the tokens
            self._masks[1] = tp.positions_of(mask_1NR, tp.residual, 1)

    def _masked(self, is_row: bool, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        return (inputs[0].where(self._masks[is_row], 0),)
