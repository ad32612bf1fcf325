"""Compare the logits of a converted model with the logits of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from phalanx.checkpoint.weights import Weights, load_decoder
from phalanx.errors import CheckpointError, ConfigError

TOLERANCE: Final = 1e-4
"""Largest accepted difference of two logits, as a fraction of the largest logit. Float32 rounding
causes about 1e-6 in a model of a few layers; a misnamed weight or a wrong constant far more."""

NUM_ROWS: Final = 2
MAX_LENGTH: Final = 256


@dataclass(frozen=True)
class Agreement:
    """Result of a comparison of logits; `theirs` is the name of the class in transformers."""

    theirs: str
    num_rows: int
    length: int
    largest_difference: float
    largest_logit: float

    @property
    def is_within(self) -> bool:
        """Whether the difference is within TOLERANCE; False if a logit is NaN."""
        return self.largest_difference <= TOLERANCE * self.largest_logit

    def __str__(self) -> str:
        verdict = "agree" if self.is_within else "do NOT agree"
        return (
            f"the logits of {self.theirs} of transformers and of Phalanx's decoder {verdict} on "
            f"{self.num_rows} x {self.length} random tokens in float32: they differ by at most "
            f"{self.largest_difference:.1e}, with a limit of {TOLERANCE * self.largest_logit:.1e} "
            f"for a largest logit of {self.largest_logit:.2f}"
        )


def require_transformers() -> None:
    """Raise ConfigError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise ConfigError(
            "--check needs the package transformers, which is not installed: "
            "pip install 'phalanx-train[hf]', or leave --check out"
        )


def compare_logits(weights: Weights, hugging_face: Path, dtype: torch.dtype) -> Agreement:
    """Compare the logits of our decoder and of transformers' model on the same random tokens.

    Both models compute in float32 with weights rounded to `dtype`, the dtype of the converted
    files, so a difference comes from the conversion. Both models are in memory at the same time.

    Raises:
        CheckpointError: transformers cannot load the folder `hugging_face`, or run its model.
    """
    shape = weights.shape
    generator = torch.Generator().manual_seed(0)
    length = min(MAX_LENGTH, shape.max_seq_len)
    tokens_BT = torch.randint(shape.vocab_size, (NUM_ROWS, length), generator=generator)
    with torch.no_grad():
        try:
            theirs = _transformers_model(hugging_face, dtype)
            expected_BTV: Tensor = theirs(tokens_BT).logits
        except Exception as error:  # transformers may raise any exception
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(
                f"written, but could not be checked: transformers cannot run {hugging_face}: "
                f"{first_line}"
            ) from error
        # Not cast to `dtype`: then both would compute in it, and its rounding would hide a wrong
        # constant.
        ours = _rounded(load_decoder(weights, torch.float32, "cpu"), dtype)
        actual_BTV = ours(tokens_BT)
        difference = (actual_BTV - expected_BTV).abs().max()
    return Agreement(
        theirs=type(theirs).__name__,
        num_rows=NUM_ROWS,
        length=length,
        largest_difference=float(difference),
        largest_logit=float(expected_BTV.abs().max()),
    )


def _rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Round the weights of a model to `dtype` in place; their own dtype stays."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    return model


def _transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    # A type checker takes 12 s to read the names in `transformers` itself.
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    from transformers.utils import logging

    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()
    return _rounded(model.eval(), dtype)
