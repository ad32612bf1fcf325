"""PEFT's own folder of a model's adapters, beside the checkpoints of its run.

<run>/adapter/adapter_config.json, adapter_model.safetensors    the adapter "default"
<run>/adapter/<name>/...                                        each other one, as PEFT does

`PeftModel.from_pretrained(base, "<run>/adapter")` loads it. It has the weights of the last save.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.comm.together import gather_on_first, on_first_rank
from phalanx.storage import new_folder, remove_folder

FOLDER: Final = "adapter"


def save_adapters(model: nn.Module, run: Path, num_stages: int = 1) -> None:
    """Write the adapters of a split model of PEFT beside its checkpoints; all ranks call this.

    Nothing happens if the model is not PEFT's. `num_stages` is the number of pipeline stages.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    peft: Any = sys.modules.get("peft")  # a model of PEFT has imported it
    adapted: Any = model
    if peft is None or not isinstance(model, peft.PeftModel):
        return
    state = model.state_dict()
    whole: dict[str, dict[str, Tensor]] = {}
    for name in adapted.peft_config:
        part = peft.get_peft_model_state_dict(
            model, state_dict=state, adapter_name=name, save_embedding_layers=False
        )
        whole[name] = {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
            for key, value in part.items()
        }
    stages: list[Any] = [whole]
    if num_stages > 1:  # each has the adapters of its own modules, as all its ranks do
        is_first = dist.get_rank() % (dist.get_world_size() // num_stages) == 0
        stages = [each for each in gather_on_first(whole if is_first else None) if each]
    final = run / FOLDER

    def write() -> None:
        with new_folder(final) as folder:
            for name, config in adapted.peft_config.items():
                where = folder / name if name != "default" else folder
                where.mkdir(exist_ok=True)
                weights = {k: v for stage in reversed(stages) for k, v in stage[name].items()}
                weights = {key: value.clone() for key, value in weights.items()}
                save_file(weights, where / "adapter_model.safetensors", {"format": "pt"})
                config = copy.copy(config)
                config.inference_mode = True
                base = adapted.get_base_model()
                config.base_model_name_or_path = (
                    config.base_model_name_or_path or vars(base).get("name_or_path") or None
                )
                config.save_pretrained(str(where))
            if any(final.rglob("adapter_config.json")):
                remove_folder(final)

    on_first_rank(write, f"cannot save {final}")
