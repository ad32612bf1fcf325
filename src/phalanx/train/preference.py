"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

    tokens of a row   | chosen 1 | rejected 1 | chosen 2 | rejected 2 | padding |
    document               0           1            2           3          4

    loss = -log sigmoid(beta ((logp_0 - ref_0) - (logp_1 - ref_1)))        of the first pair

The reference is the model that the run begins with. It is no second model: before the first step,
one pass without gradients computes ref_n of all documents, which the run folder keeps.

Legend: B rows, T tokens of a row, V vocabulary, N documents of a row, P = N / 2 pairs.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from phalanx.checkpoint import manifest
from phalanx.checkpoint.manifest import Checkpoint
from phalanx.comm.comm import Comm
from phalanx.comm.together import on_first_rank
from phalanx.data.loader import evaluation_batches
from phalanx.data.samples import Batch, Samples
from phalanx.errors import CheckpointError
from phalanx.models.attention import to_device
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.object_store import fetch
from phalanx.parallel.accumulate import Runner
from phalanx.storage import replace_file
from phalanx.train.notice import announce, notice_if_slow
from phalanx.train.objective import NextToken

FILE: Final = "reference.npy"
"""File of a run folder with the reference's log-probabilities."""

_REPORT_S: Final = 10.0


@dataclass(frozen=True)
class Preference(NextToken):
    """The loss of pairs of documents, chosen and rejected, by a `Decoder` on `Batch`es.

    Attributes:
        beta: how strongly the loss holds the model to its reference.
    """

    beta: float = 0.1

    def log_probabilities(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        """Return the sum of the log-probabilities of the labels of each document, float64 [B, N].

        A pipeline stage other than the last returns its activation.
        """
        assert microbatch.reference_BN is not None, "the samples are pairs"
        logits_BTV = model(microbatch.tokens_BT, **self.inputs(model, microbatch, step))
        if _is_passed_on(model):
            return logits_BTV
        labels_BT, device = microbatch.labels_BT, logits_BTV.device
        wide = torch.promote_types(logits_BTV.dtype, torch.float32)
        losses_BT = F.cross_entropy(
            logits_BTV.to(wide).flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE,
            reduction="none",
        ).view_as(labels_BT)  # fmt: skip
        documents_BT = torch.zeros_like(labels_BT)
        if microbatch.documents_BT is not None:
            documents_BT = to_device(microbatch.documents_BT, device)
        # A sum by a mask has one order on every device, unlike `scatter_add` on a GPU.
        numbers_N = torch.arange(microbatch.reference_BN.shape[1], device=device)
        is_of_BTN = documents_BT[..., None] == numbers_N
        return -(losses_BT.double()[..., None] * is_of_BTN).sum(1)

    @override
    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        """Return the sum of the losses of the pairs."""
        logps_BN = self.log_probabilities(model, microbatch, step)
        if _is_passed_on(model):
            return logps_BN
        chosen_BP, rejected_BP = self._rewards(logps_BN, microbatch)
        losses_BP = -F.logsigmoid(chosen_BP - rejected_BP)
        return losses_BP.where(_is_pair(microbatch, losses_BP), 0).sum()

    @override
    def num_valid(self, microbatch: Batch) -> Tensor:
        """Return the number of pairs."""
        return _num_documents(microbatch).div(2, rounding_mode="floor").sum()

    def metric_sums(self, model: nn.Module, microbatch: Batch) -> Mapping[str, Tensor] | Tensor:
        """Return the sums over the pairs of the measures that TRL's DPOTrainer logs."""
        logps_BN = self.log_probabilities(model, microbatch, 0)
        if _is_passed_on(model):
            return logps_BN
        chosen_BP, rejected_BP = self._rewards(logps_BN, microbatch)
        measures_BP = {
            "rewards/chosen": chosen_BP,
            "rewards/rejected": rejected_BP,
            "rewards/accuracies": (chosen_BP > rejected_BP).double(),
            "rewards/margins": chosen_BP - rejected_BP,
        }
        is_pair_BP = _is_pair(microbatch, chosen_BP)
        return {name: each.where(is_pair_BP, 0).sum() for name, each in measures_BP.items()}

    def _rewards(self, logps_BN: Tensor, microbatch: Batch) -> tuple[Tensor, Tensor]:
        assert microbatch.reference_BN is not None
        rewards_BN = self.beta * (logps_BN - microbatch.reference_BN)
        return rewards_BN[:, ::2], rewards_BN[:, 1::2]


def _is_passed_on(model: nn.Module) -> bool:
    """Return whether the output of the model is the input of the next pipeline stage."""
    return isinstance(model, Decoder) and model.stage is not None and not model.stage.is_last


def _num_documents(microbatch: Batch) -> Tensor:
    """Return the number of documents of each row, with padding as one; on the host."""
    documents_BT = microbatch.documents_BT
    if documents_BT is None:
        return torch.ones(len(microbatch.tokens_BT), dtype=torch.int64)
    return documents_BT.amax(1) + 1


def _is_pair(microbatch: Batch, like_BP: Tensor) -> Tensor:
    """Return which columns of a tensor [B, P] are pairs of the row."""
    second_P = 2 * torch.arange(like_BP.shape[1]) + 1
    return to_device(second_P < _num_documents(microbatch)[:, None], like_BP.device)


class Reference:
    """The reference's log-probabilities of the samples of a run; a part of its checkpoints.

    Attributes:
        objective: the objective, which computes them.
        digest: sha256 of FILE, which a checkpoint has; empty before it is known.
    """

    def __init__(self, objective: Preference) -> None:
        self.objective, self.digest = objective, ""

    def state_dict(self) -> dict[str, str]:
        """Return the digest."""
        return {"sha256": self.digest} if self.digest else {}

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Load the digest of the file that `fill` then reads."""
        self.digest = str(state_dict["sha256"])

    def fill(
        self,
        sets: Sequence[Samples],
        *,
        model: nn.Module,
        run: Runner,
        comm: Comm,
        microbatch: int,
        out: Path,
        start: Checkpoint | None,
    ) -> None:
        """Set `reference` of all sets: computed in a new run, else read; all ranks call this.

        Raises:
            CheckpointError: the run to resume has no file, or not the one of its checkpoint.
        """
        for samples in sets:  # pairs have two documents, and padding is one
            samples.reference = np.zeros((len(samples), -(-samples.most_documents() // 2) * 2))
        if start is not None:
            content = on_first_rank(lambda: self._read(start.folder), "cannot resume")
            numbers: npt.NDArray[np.float64] = np.load(io.BytesIO(content))
        else:
            model.eval()
            numbers = np.concatenate(
                [
                    _computed(samples, self.objective, model, run, comm, microbatch).ravel()
                    for samples in sets
                ]
            )
            model.train()
            buffer = io.BytesIO()
            np.save(buffer, numbers)
            content = buffer.getvalue()
            self.digest = hashlib.sha256(content).hexdigest()
        on_first_rank(lambda: replace_file(out / FILE, content), f"cannot write to {out}")
        for samples in sets:
            assert samples.reference is not None, "set above"
            part, numbers = np.split(numbers, [samples.reference.size])
            samples.reference = part.reshape(samples.reference.shape)

    def _read(self, checkpoint: Path) -> bytes:
        file = fetch((manifest.run_of(checkpoint) or checkpoint) / FILE)
        content = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise CheckpointError(
                f"{file}, the log-probabilities by the weights that the run began with, "
                f"{'is not the file that the checkpoint was made with' if content else 'is gone'}"
                "; start a new run, or put the file back"
            )
        return content


def _computed(
    samples: Samples, objective: Preference, model: nn.Module, run: Runner, comm: Comm, rows: int
) -> npt.NDArray[np.float64]:
    """Return the log-probabilities of all documents by the model, on every rank."""
    assert samples.reference is not None, "its shape is known"
    logps = torch.from_numpy(samples.reference.copy()).to(comm.device)
    reported_s, ranks = time.monotonic(), comm.size("data")
    with notice_if_slow("computing the log-probabilities of the reference"):
        for number, batch in enumerate(
            evaluation_batches(
                samples, np.arange(len(samples)), microbatch=rows, rank=comm.coord("data"),
                num_ranks=ranks,
            )
        ):  # fmt: skip
            found = run.infer(
                batch.to(comm.device), lambda each: objective.log_probabilities(model, each, 0)
            )
            if found is not None:  # of pipeline stages, the last has them
                is_row_B = batch.rows_B >= 0
                logps[batch.rows_B[is_row_B]] = found[is_row_B]
            if time.monotonic() - reported_s > _REPORT_S:
                reported_s = time.monotonic()
                done = min(len(samples), (number + 1) * rows * ranks)
                announce(f"reference: {done:,} of {len(samples):,} rows")
    comm.all_reduce(logps, "loss")
    return logps.cpu().numpy()
