"""The files by which transformers knows where a generated text ends, and how a batch is filled up.

config.json, generation_config.json    ids of the tokens that begin and end a text, and that pad
tokenizer_config.json                  the same tokens as texts, and how tokenizer.json is loaded
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from phalanx.checkpoint.foreign import write_json
from phalanx.data.tokenizer import end_of_text_id, load_tokenizer
from phalanx.errors import DataError
from phalanx.hugging_face.companions import TOKENIZER
from phalanx.hugging_face.origin import Ids

GENERATION: Final = "generation_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"


def ids_of_tokenizer(tokenizer: Path | None) -> Ids:
    """Return the ids by what a run puts between documents: the one token begins, ends and pads.

    All are None without a tokenizer, or if it has no token of a known name for that.
    """
    end: int | None = None
    with suppress(DataError):
        end = None if tokenizer is None else end_of_text_id(load_tokenizer(tokenizer))
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def write_missing(folder: Path, ids: Ids, max_seq_len: int) -> list[str]:
    """Write those of the files that are not there, and return their names.

    A file that came with the weights stays as it is. None is written where no token is known to end
    a text.
    """
    written: list[str] = []
    if ids["eos_token_id"] is None:
        return written
    if not (folder / GENERATION).exists():
        write_json(folder / GENERATION, ids, indent=2)
        written.append(GENERATION)
    if (folder / TOKENIZER).is_file() and not (folder / TOKENIZER_CONFIG).exists():
        tokens = _texts(folder / TOKENIZER, ids)
        # The class that takes tokenizer.json as it is, whatever the model type.
        content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
        write_json(folder / TOKENIZER_CONFIG, content | tokens, indent=2)
        written.append(TOKENIZER_CONFIG)
    return written


def _texts(tokenizer: Path, ids: Ids) -> dict[str, Any]:
    """Return the tokens of the ids as texts; of several that end a text, the first."""
    known = load_tokenizer(tokenizer)
    texts: dict[str, Any] = {}
    for name, value in ids.items():
        first = value[0] if isinstance(value, list) and value else value
        text = known.id_to_token(first) if isinstance(first, int) else None
        if text is not None:
            texts[name.removesuffix("_id")] = text
    return texts
