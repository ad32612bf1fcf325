"""Our decoder in place of a model of transformers that is in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.hugging_face.config import shape_from_hf
from phalanx.hugging_face.names import reader
from phalanx.models.decoder import Decoder


def decoder_of(model: nn.Module) -> Decoder:
    """Return our decoder with the weights of a causal language model of transformers.

    The weights are copied, in their data types; `phalanx convert` writes a trained run back.

    Args:
        model: such as `LlamaForCausalLM(config)`, whole on one device.

    Raises:
        ConfigError: its config describes what Decoder does not compute, named.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"decoder_of takes a model of transformers, and this is a {type(model).__name__}; "
            "expected one such as LlamaForCausalLM"
        )
    shape = shape_from_hf(config.to_dict())
    tensors = model.state_dict()
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    read = reader(shape, config.model_type, sizes, tensors.__getitem__)
    with torch.device("meta"):
        decoder = Decoder(shape)
    weights = {name: read(name).detach().clone() for name, _ in decoder.named_parameters()}
    decoder.load_state_dict(weights, assign=True)
    return decoder
