"""A small model folder as Hugging Face has it: weights, a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.models.shape import ModelShape
from small_run import tokenizer_of

SHAPE = ModelShape(
    num_layers=1, hidden=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn=24, vocab_size=300,
    max_seq_len=128,
)  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_folder(
    folder: Path, template: str | None = CHATML, seed: int = 7, shape: ModelShape = SHAPE
) -> Path:
    """Write the folder of a small model, by default a Llama, of random weights."""
    # Here, because collecting tests imports no torch.
    import torch

    from phalanx.checkpoint.tensor_file import TensorInfo
    from phalanx.checkpoint.weights import sizes_of
    from phalanx.hugging_face.config import config_to_hf
    from phalanx.hugging_face.families import family_of
    from phalanx.hugging_face.folder import write_folder
    from phalanx.hugging_face.names import table
    from phalanx.models.decoder import Decoder

    folder.mkdir(parents=True)
    model = Decoder(shape)
    model.initialize(seed)
    weights = dict(model.named_parameters())
    links = {link.theirs: link for link in table(shape, family_of(shape))}
    config = config_to_hf(shape, "float32", family_of(shape), {"eos_token_id": 258})
    sizes = sizes_of(shape)
    tensors = {n: TensorInfo(torch.float32, link.join_sizes(sizes)) for n, link in links.items()}
    write_folder(
        folder,
        config,
        tensors,
        lambda name: links[name].join([weights[part].detach() for part in links[name].ours]),
        1 << 30,
    )
    tokenizer = Tokenizer.from_str(tokenizer_of(257))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    assert tokenizer.token_to_id("<|im_end|>") == 258
    tokenizer.save(str(folder / "tokenizer.json"))
    content: dict[str, Any] = {
        "eos_token": "<|im_end|>",
        "extra_special_tokens": {"voice": "<|voice|>"},
        "added_tokens_decoder": {"260": {"content": "<|late|>", "special": True, "lstrip": True}},
    }
    content |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder
