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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from phalanx.checkpoint import manifest
from phalanx.comm.together import on_first_rank
from phalanx.data.loader import evaluation_batches
from phalanx.data.samples import Batch, Samples
from phalanx.errors import CheckpointError
from phalanx.models.attention import to_device
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.object_store import fetch
from phalanx.storage import replace_file
from phalanx.train.notice import announce
from phalanx.train.objective import NextToken

if TYPE_CHECKING:
    from phalanx.train.text import TextSession

FILE: Final = "reference.npy"
"""File of a run folder with the reference's log-probabilities, float64."""


@dataclass(frozen=True)
class Preference(NextToken):
    """The loss of pairs of documents, chosen and rejected, by a `Decoder` on `Batch`es.

    Attributes:
        beta: how strongly the loss holds the model to its reference.
    """

    beta: float = 0.1

    def log_probabilities(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        """Return the log-probability of the labels of each document, float64 [B, N].

        A pipeline stage other than the last returns its activation.
        """
        logits_BTV = model(microbatch.tokens_BT, **self.inputs(model, microbatch, step))
        if _is_passed_on(model):
            return logits_BTV
        labels_BT, documents_BT = microbatch.labels_BT, microbatch.documents_BT
        wide = torch.promote_types(logits_BTV.dtype, torch.float32)
        how: dict[str, Any] = {"ignore_index": IGNORE, "reduction": "none"}
        losses_N = F.cross_entropy(logits_BTV.to(wide).flatten(0, 1), labels_BT.flatten(), **how)
        # A sum by a mask has one order on every device, unlike `scatter_add` on a GPU.
        numbers_N = torch.arange(_reference(microbatch).shape[1], device=labels_BT.device)
        numbers_BT = torch.zeros(1, 1) if documents_BT is None else documents_BT
        is_of_BTN = to_device(numbers_BT, labels_BT.device)[..., None] == numbers_N
        return -(losses_N.view_as(labels_BT).double()[..., None] * is_of_BTN).sum(1)

    @override
    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        """Return the sum of the losses of the pairs."""
        sums = self._sums(model, microbatch, step)
        return sums if isinstance(sums, Tensor) else sums["loss"]

    @override
    def num_valid(self, microbatch: Batch) -> Tensor:
        """Return the number of pairs."""
        return (~_reference(microbatch)[:, ::2].isnan()).sum()

    def metric_sums(self, model: nn.Module, microbatch: Batch) -> Mapping[str, Tensor] | Tensor:
        """Return the sums over the pairs of the measures that TRL's DPOTrainer logs."""
        sums = self._sums(model, microbatch, 0)
        return sums if isinstance(sums, Tensor) else {n: sums[n] for n in sums if n != "loss"}

    def _sums(self, model: nn.Module, microbatch: Batch, step: int) -> dict[str, Tensor] | Tensor:
        logps_BN = self.log_probabilities(model, microbatch, step)
        if _is_passed_on(model):
            return logps_BN
        reference_BN = _reference(microbatch)
        rewards_BN = self.beta * (logps_BN - reference_BN.nan_to_num())
        chosen_BP, rejected_BP = rewards_BN[:, ::2], rewards_BN[:, 1::2]
        of_pairs_BP = {
            "loss": -F.logsigmoid(chosen_BP - rejected_BP),
            "rewards/chosen": chosen_BP,
            "rewards/rejected": rejected_BP,
            "rewards/accuracies": (chosen_BP > rejected_BP).double(),
            "rewards/margins": chosen_BP - rejected_BP,
        }
        is_pair_BP = ~reference_BN[:, ::2].isnan()
        return {name: each.where(is_pair_BP, 0).sum() for name, each in of_pairs_BP.items()}


def _reference(microbatch: Batch) -> Tensor:
    assert microbatch.reference_BN is not None, "the session has set it"
    return microbatch.reference_BN


def _is_passed_on(model: nn.Module) -> bool:
    """Return whether the output of the model is the input of the next pipeline stage."""
    return isinstance(model, Decoder) and model.stage is not None and not model.stage.is_last


@dataclass
class Reference:
    """The log-probabilities of a run's samples by its reference; a part of its checkpoints."""

    objective: Preference
    digest: str = ""

    def state_dict(self) -> dict[str, str]:
        """Return the sha256 of FILE; nothing before it is known."""
        return {"sha256": self.digest} if self.digest else {}

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Load the sha256 of the file that `fill` then reads."""
        self.digest = str(state_dict["sha256"])

    def fill(self, session: TextSession) -> None:
        """Set the reference of all samples: computed in a new run, else read; all ranks call this.

        Raises:
            CheckpointError: the run to resume has no file, or not the one of its checkpoint.
        """
        sets, start, out = [session.job.samples, session.validation], session.start, session.out
        for samples in sets:
            num_B1 = samples.num_documents()[:, None] // 2 * 2  # padding is no pair
            numbers_N = np.arange(num_B1.max(initial=0))
            samples.reference = np.where(numbers_N < num_B1, 0.0, np.nan)
        buffer = io.BytesIO()
        if start is None:
            np.save(buffer, np.concatenate([self._computed(s, session) for s in sets], None))

        def kept() -> bytes:
            content = buffer.getvalue()
            if start is not None:
                file = fetch((manifest.run_of(start.folder) or start.folder) / FILE)
                content = file.read_bytes() if file.is_file() else b""
                if hashlib.sha256(content).hexdigest() != self.digest:
                    raise CheckpointError(
                        f"{file}, the log-probabilities by the weights that the run began with, is "
                        "missing or not the one that the checkpoint was saved with; put it back"
                    )
            replace_file(out / FILE, content)
            return content

        content = on_first_rank(kept, f"cannot keep {FILE} in {out}")  # the same on every rank
        self.digest = hashlib.sha256(content).hexdigest()
        numbers: npt.NDArray[np.float64] = np.load(io.BytesIO(content))
        for samples in sets:
            assert samples.reference is not None, "set above"
            part, numbers = np.split(numbers, [samples.reference.size])
            samples.reference = part.reshape(samples.reference.shape)

    def _computed(self, samples: Samples, session: TextSession) -> npt.NDArray[np.float64]:
        """Return the log-probabilities of all documents by the present weights, on every rank."""
        comm, model = session.comm, session.model
        assert samples.reference is not None, "its shape is known"
        logps = torch.zeros(samples.reference.shape, dtype=torch.float64)
        reported_s = time.monotonic()
        rows, ranks = session.job.batch.microbatch, comm.size("data")
        how = {"microbatch": rows, "rank": comm.coord("data"), "num_ranks": ranks}
        model.eval()
        for number, batch in enumerate(evaluation_batches(samples, np.arange(len(samples)), **how)):
            found = session.step.run.infer(
                batch.to(comm.device), lambda each: self.objective.log_probabilities(model, each, 0)
            )
            if found is not None:  # of pipeline stages, the last has them
                is_row_B = batch.rows_B >= 0
                logps[batch.rows_B[is_row_B]] = found.cpu()[is_row_B]
            if time.monotonic() - reported_s > 10:
                reported_s = time.monotonic()
                announce(f"reference: {number * rows * ranks:,} of {len(samples):,} rows")
        model.train()
        summed = comm.all_reduce(logps.to(comm.device), "loss").cpu().numpy()
        return np.where(np.isnan(samples.reference), np.nan, summed)
