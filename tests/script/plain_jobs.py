"""The plain scripts that are a job for the trainer: a model, a loss, data and an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plain_models import (
    Autoencoder,
    Boxes,
    Checkpointed,
    Heads,
    LoRA,
    Named,
    Residual,
    Scaled,
    Shared,
    Stream,
    TwoHeads,
    UNet,
    ViT,
    as_lists,
    mlp,
    rows_of,
)
from plain_text_models import (
    Bag,
    Encoder,
    Recurrent,
    Sentences,
    Tied,
    Translator,
    as_padded,
    in_one_row,
)
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx


def rows(batch: Any) -> int:
    return len(batch[1])


@dataclass(frozen=True)
class Sum:
    """The sum of a function over the rows of a batch, or over what `count` says."""

    loss: Callable[..., Tensor]
    count: Callable[[Any], Any] = rows

    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return self.loss(model, microbatch)

    def num_valid(self, microbatch: Any) -> Any:
        return self.count(microbatch)


class InTurns(Sum):
    def loss_sum(self, model: nn.Module, microbatch: Any, step: int) -> Tensor:
        return F.cross_entropy(model(microbatch[0], step % 2), microbatch[1], reduction="sum")


def classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0].float()), batch[1], reduction="sum")


def pairs(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    apart = (model(x) - model(x.flip(1))).square().sum(1)
    return torch.where(y > 2, apart, (1 - apart).relu()).sum()


def taught(model: nn.Module, batch: Any) -> Tensor:
    torch.manual_seed(11)
    teacher = mlp(6, 16, 5)
    wanted = teacher(batch[0]).detach().softmax(1)
    return F.kl_div(model(batch[0]).log_softmax(1), wanted, reduction="sum")


def student() -> nn.Module:
    mlp(6, 16, 5)  # the teacher is made first
    return mlp(6, 6, 5)


def hardest(model: nn.Module, batch: Any) -> Tensor:
    z, y = model(batch[0]), batch[1]
    apart = (z[:, None] - z[None]).square().sum(2)
    is_same = y[:, None] == y[None]
    farthest = torch.where(is_same, apart, -1e9).amax(1)
    return F.relu(farthest - torch.where(is_same, 1e9, apart).amin(1) + 1).sum()


def triplets(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    every = model(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return F.triplet_margin_loss(*every.unbind(1), reduction="sum")


def two_tasks(model: nn.Module, batch: Any) -> Tensor:
    logits, number = model(batch[0])
    of_numbers = F.smooth_l1_loss(number, batch[0].sum(1), reduction="sum")
    return F.cross_entropy(logits, batch[1], reduction="sum") + 0.5 * of_numbers


def labels(model: nn.Module, batch: Any) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 3.0, 1.0]).double()
    wanted = (batch[0][:, :4] > 0).double()
    return F.binary_cross_entropy_with_logits(
        model(batch[0]), wanted, pos_weight=weight, reduction="sum"
    ).div(4)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[0].sum(1), reduction="sum")


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0]).double()


def weighted(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, WEIGHT, label_smoothing=0.1, reduction="sum")


def weights(batch: Any) -> Tensor:
    return WEIGHT[batch[1]].sum()


def again(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0], reduction="none").mean(1).sum()


def pixels(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    loss = F.binary_cross_entropy_with_logits(model(x), (x > 0.3).double(), reduction="none")
    return loss.mean((1, 2, 3)).sum()


def boxes(model: nn.Module, batch: Any) -> Tensor:
    centers = model(batch[0])
    losses = [(c - b).abs().sum() for c, b in zip(centers, batch[1], strict=True)]
    return torch.stack([centers.sum() * 0, *losses]).sum()


def num_boxes(batch: Any) -> int:
    return sum(map(len, batch[1]))


def named(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    extra = 0.01 * out.features.square().mean(1).sum()
    return F.cross_entropy(out.logits, batch[1], reduction="sum") + extra


def pooled(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    lengths = 1 + (x[:, 0, 0].abs() * 3).long().clamp(max=6)
    return F.cross_entropy(model(x, lengths), y, reduction="sum")


def tokens_of(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    tokens = (x.abs() * 3).long().clamp(max=10)
    return tokens, tokens.roll(-1, 1).masked_fill(torch.arange(9) > y[:, None] + 2, -100)


def next_tokens(model: nn.Module, batch: Any) -> Tensor:
    tokens, wanted = tokens_of(batch)
    return F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten(), reduction="sum")


def num_tokens(batch: Any) -> Tensor:
    return (tokens_of(batch)[1] != -100).sum()


def translated(model: nn.Module, batch: Any) -> Tensor:
    source = (batch[0].abs() * 4).long().clamp(1, 10)
    return model(source, source).sum()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss * len(batch["labels"])


def num_labels(batch: Any) -> int:
    return len(batch["labels"])


def bags(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch[1:]), batch[0], reduction="sum")


def num_bags(batch: Any) -> int:
    return len(batch[0])


def residual() -> nn.Module:
    model: Any = Residual()
    model.chain = ["first", "blocks.0", "blocks.1", "blocks.2", "last"]
    return model


def doubles(kind: type[nn.Module]) -> nn.Module:
    return kind().double()


def lora() -> nn.Module:
    layers = [LoRA(nn.Linear(6, 10)), nn.Tanh(), LoRA(nn.Linear(10, 10)), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(10, 5)).double()


def normalized() -> nn.Module:
    model = mlp(6, 10, 10, 5)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return model


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02)


def hooked() -> nn.Module:
    model = mlp(6, 10, 5)
    for parameter in model.parameters():
        parameter.register_hook(clamped)
    return model


def marked() -> nn.Module:
    model = residual()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            setattr(module.bias, "no_weight_decay", True)  # noqa: B010
    return model


def by_marks(parameters: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
    for parameter in parameters:
        groups[not getattr(parameter, "no_weight_decay", False)]["params"].append(parameter)
    return torch.optim.AdamW(groups, 0.05, weight_decay=0.5)


def tied() -> nn.Module:
    model: Any = Tied().double()
    model.chain = ["table", "middle", "head"]
    return model


def singles() -> nn.Module:
    return residual().float()


sgd = functools.partial(functools.partial, torch.optim.SGD)
adam = functools.partial(functools.partial, torch.optim.Adam)
adamw = functools.partial(functools.partial, torch.optim.AdamW)


def job(
    build: Any, loss: Any, optimizer: Any, data: Any = None, batch_size: int = 8, **options: Any
) -> Callable[[], phalanx.Trainer]:
    """Return what makes a job, with the microbatches of a pipeline."""

    def make() -> phalanx.Trainer:
        make = functools.partial(doubles, build) if isinstance(build, type) else build
        given: dict[str, Any] = {"accumulation": 2, "shuffle": False, **options}
        return phalanx.Trainer(
            make,
            loss if isinstance(loss, Sum) else Sum(loss),
            rows_of(6) if data is None else data,
            optimizer,
            batch_size=batch_size,
            seed=11,
            **given,
        )

    return make


MLP = functools.partial(mlp, 6, 10, 5)
SHUFFLED: dict[str, Any] = {"shuffle": True}
WHOLE: dict[str, Any] = {"accumulation": 1}

JOBS: dict[str, Callable[[], phalanx.Trainer]] = {
    "epoch means": job(
        MLP, classes, sgd(lr=0.1, momentum=0.9, nesterov=True), batch_size=9, epochs=2, **SHUFFLED
    ),
    "accuracy of the step": job(residual, classes, sgd(lr=0.1)),
    "inference mode": job(
        residual, classes, adam(lr=0.02), epochs=3, validation=rows_of(6, num_rows=11)
    ),
    "read ahead": job(Checkpointed, classes, adam(lr=0.02), **SHUFFLED),
    "plateau": job(
        MLP, classes, sgd(lr=2.0), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau
    ),
    "meters": job(
        functools.partial(mlp, 6, 10, 9),
        classes,
        sgd(lr=0.1, momentum=0.9, weight_decay=1e-4),
        rows_of(6, classes=9),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.1),
        epochs=2,
        **SHUFFLED,
    ),
    "siamese": job(residual, pairs, sgd(lr=0.02)),
    "distillation": job(student, taught, functools.partial(torch.optim.Adagrad, lr=0.05)),
    "tasks in turns": job(TwoHeads, InTurns(classes), adam(lr=0.02), **SHUFFLED),
    "hardest triplets": job(
        functools.partial(mlp, 6, 10, 4), hardest, sgd(lr=0.1), batch_size=12, **WHOLE, **SHUFFLED
    ),
    "triplets": job(functools.partial(mlp, 6, 10, 4), triplets, adam(lr=0.02), rows_of(3, 6)),
    "two tasks": job(Heads, two_tasks, adamw(lr=0.02), epochs=2, **SHUFFLED),
    "multi-label": job(
        functools.partial(mlp, 6, 10, 4), labels, adam(lr=0.05), batch_size=9, epochs=2, **SHUFFLED
    ),
    "regression": job(
        functools.partial(mlp, 6, 10, 1), squares, adam(lr=0.02), **SHUFFLED
    ),
    "weighted classes": job(residual, Sum(weighted, weights), sgd(lr=0.1), **SHUFFLED),
    "autoencoder with skip": job(Autoencoder, again, adam(lr=0.02), batch_size=9),
    "learned scale": job(Scaled, classes, adamw(lr=0.02), batch_size=9),
    "LoRA": job(lora, classes, adamw(lr=0.02), batch_size=9, epochs=2, max_norm=0.5, **SHUFFLED),
    "U-Net": job(UNet, pixels, adam(lr=0.01), rows_of(1, 8, 8)),
    "ViT": job(ViT, classes, adamw(lr=0.01), rows_of(1, 8, 8)),
    "detection": job(
        functools.partial(mlp, 6, 10, 2), Sum(boxes, num_boxes), adam(lr=0.02), Boxes(), 5,
        epochs=2, collate=as_lists, **WHOLE, **SHUFFLED,
    ),
    "normalized weights": job(
        normalized, classes, sgd(lr=0.1), batch_size=9, epochs=2, **WHOLE, **SHUFFLED
    ),
    "named outputs": job(Named, named, adamw(lr=0.02)),
    "shared modules": job(
        Shared, classes, adamw(lr=0.02), batch_size=9, epochs=2, max_norm=1.0, **SHUFFLED
    ),
    "recurrent with masks": job(Recurrent, pooled, adamw(lr=0.01), rows_of(7, 3)),
    "language model": job(
        tied, Sum(next_tokens, num_tokens), functools.partial(torch.optim.NAdam, lr=0.02),
        rows_of(9), **SHUFFLED,
    ),
    "translation": job(Translator, translated, adam(lr=0.01), rows_of(7)),
    "dict batches": job(
        Encoder, Sum(own_loss, num_labels), adamw(lr=0.02), Sentences(),
        epochs=2, collate=as_padded, **SHUFFLED,
    ),
    "bag of words": job(
        Bag, Sum(bags, num_bags), sgd(lr=1.0), Sentences(), collate=in_one_row, **WHOLE
    ),
    "marked parameters": job(marked, classes, by_marks),
    "hooked gradients": job(
        hooked, classes, sgd(lr=1.0), batch_size=9, epochs=2, **WHOLE, **SHUFFLED
    ),
    "L-BFGS": job(functools.partial(mlp, 6, 5, 5), classes, torch.optim.LBFGS),
    "Adafactor": job(MLP, classes, functools.partial(torch.optim.Adafactor, lr=0.02)),
    "autocast": job(singles, in_bfloat16, adamw(lr=0.01), **SHUFFLED),
    "stream": job(
        MLP, classes, functools.partial(torch.optim.Adamax, lr=0.02), Stream(), steps=10
    ),
}  # fmt: skip
"""By the names of the scripts, whose losses they have."""
