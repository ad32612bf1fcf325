"""An independent decoder in plain PyTorch, as the reference for `models.decoder`.

Modules, parameters and forward arguments have the same names as in `Decoder`, so that its weights
can be loaded and modules compared one by one. All arithmetic is implemented here.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import CorpusConfig
from phalanx.data.samples import Batch
from phalanx.data.token_file import TokenFile
from phalanx.models.shape import ExpertShape, ModelShape, Yarn

_GOLDEN = 0x9E3779B97F4A7C15
_LEVELS = 1 << 16


class Norm(nn.Module):
    """RMSNorm or LayerNorm."""

    def __init__(self, width: int, shape: ModelShape) -> None:
        super().__init__()
        self.eps, self.is_less_one = shape.norm_eps, shape.norm == "rms+1"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if shape.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimension, in at least float32."""
        wide = x.double() if x.dtype == torch.float64 else x.float()
        if self.bias is not None:
            wide = wide - wide.mean(-1, keepdim=True)
        weight = 1 + self.weight if self.is_less_one else self.weight
        wide = wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight
        return (wide if self.bias is None else wide + self.bias).to(x.dtype)


class Dropout(nn.Module):
    """Dropout whose mask bits are SplitMix64 of (row, position, feature), in uint64 arithmetic."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.num_dropped = min(round(p * _LEVELS), _LEVELS - 1)

    def forward(self, x: Tensor, keys: Tensor | None, salt: int) -> Tensor:
        """Drop elements of x[B, T, D]."""
        if keys is None or not self.num_dropped:
            return x
        return _dropped(x, keys, salt, self.num_dropped)


class Masks:
    """Independent implementation of dropout masks keyed by sample, for each nn.Dropout of a model.

    An element's mask is SplitMix64 of (seed, module, step, row, number of earlier calls of the
    module on the batch, place in the row). Without a seed, or if the first dimension of a tensor
    is not the batch's rows, torch draws the mask.
    """

    def __init__(self, model: nn.Module, seed: int | None) -> None:
        self._step, self._rows = 0, torch.empty(0)
        self._calls: Counter[str] = Counter()
        if seed is None:
            return
        for name, module in model.named_modules():
            if type(module) is nn.Dropout:
                drop: Any = functools.partial(self._drop, module, name, _key(seed, name))
                module.forward = drop

    def begin(self, step: int, rows: Tensor) -> None:
        """Start a forward on these rows, numbered in the order of the samples."""
        self._step, self._rows = step, rows
        self._calls.clear()

    def _drop(self, module: nn.Dropout, name: str, stream: int, x: Tensor) -> Tensor:
        if not module.training or module.p == 0:
            return x
        if len(x) != len(self._rows) or x.ndim < 2:
            return nn.Dropout.forward(module, x)
        self._calls[name] += 1
        num_dropped = min(round(module.p * _LEVELS), _LEVELS - 1)
        keys = _row_keys(stream, self._step, self._rows)
        flat = x.reshape(len(x), -1, x.shape[-1])
        return _dropped(flat, keys, self._calls[name] - 1, num_dropped).view_as(x)


def _dropped(x: Tensor, keys: Tensor, salt: int, num_dropped: int) -> Tensor:
    with np.errstate(over="ignore"):
        rows = _split_mix(keys.cpu().numpy().view(np.uint64), np.uint64(salt))
        tokens = _split_mix(rows[:, None], np.arange(x.shape[1], dtype=np.uint64))
        quads = np.arange((x.shape[2] + 3) // 4, dtype=np.uint64)
        draws = _split_mix(tokens[:, :, None], quads).view(np.int16)[:, :, : x.shape[2]]
    kept = torch.from_numpy(draws >= num_dropped - _LEVELS // 2).to(x.device)
    return x * kept * (_LEVELS / (_LEVELS - num_dropped))


def _key(*parts: int | str) -> int:
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int(np.frombuffer(digest, dtype="<i8")[0])


def _row_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    stream = np.array([_key(seed, "dropout", step)], dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        keys = _split_mix(stream, rows.cpu().numpy().astype(np.int64).view(np.uint64))
    return torch.from_numpy(keys.view(np.int64)).to(rows.device)


def _split_mix(stream: np.ndarray[Any, Any], index: Any) -> np.ndarray[Any, Any]:
    """Return element `index` of each stream (Steele, Lea, Flood 2014, figure 17)."""
    z = stream + index * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Attention(nn.Module):
    """Grouped-query attention with a given mask."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.width, self.norms = shape.head_dim, shape.qk_norm
        heads, groups = shape.num_heads * self.width, shape.num_kv_heads * self.width
        reads = shape.bias in (True, "qkv")
        self.q = nn.Linear(shape.hidden, heads, reads)
        self.k = nn.Linear(shape.hidden, groups, reads)
        self.v = nn.Linear(shape.hidden, groups, reads)
        if self.norms is not False:
            widths = (heads, groups) if self.norms == "projection" else (self.width, self.width)
            self.q_norm, self.k_norm = (Norm(width, shape) for width in widths)
        self.output = nn.Linear(heads, shape.hidden, shape.bias is True)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, sees: Tensor) -> Tensor:
        """Map x[B, T, D] to y[B, T, D]; `sees[B, 1, T, T]` is True where a query sees a key."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.norms == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.width)) for y in (q, k, v))
        if self.norms is True:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = _rotate(q, *angles), _rotate(k, *angles)
        repeats = q.shape[2] // k.shape[2]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, sees)
        return self.output(mixed.transpose(1, 2).flatten(2))


class PlainLatentAttention(nn.Module):
    """Multi-head latent attention with a given mask, a head after another."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.latent is not None
        self.of, self.num_heads = shape.latent, shape.num_heads
        self.width = self.of.plain_dim + self.of.rope_dim
        yarn = shape.rope_scaling
        self.scale = yarn.score_scale if isinstance(yarn, Yarn) else 1.0
        if self.of.query_rank is not None:
            self.q_down = nn.Linear(shape.hidden, self.of.query_rank, False)
            self.q_latent_norm = Norm(self.of.query_rank, shape)
        self.q = nn.Linear(self.of.query_rank or shape.hidden, self.num_heads * self.width, False)
        self.kv_down = nn.Linear(shape.hidden, self.of.kv_rank + self.of.rope_dim, False)
        self.kv_latent_norm = Norm(self.of.kv_rank, shape)
        rows = self.num_heads * (self.of.plain_dim + self.of.value_dim)
        self.kv = nn.Linear(self.of.kv_rank, rows, False)
        self.output = nn.Linear(self.num_heads * self.of.value_dim, shape.hidden, False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, sees: Tensor) -> Tensor:
        """Map x[B, T, D] to y[B, T, D]; `sees[B, 1, T, T]` is True where a query sees a key."""
        assert angles is not None
        cos, sin = (angle[:, :, 0] for angle in angles)
        plain = self.of.plain_dim
        reads = x if self.of.query_rank is None else self.q_latent_norm(self.q_down(x))
        down = self.kv_down(x)
        latent = self.kv_latent_norm(down[..., : self.of.kv_rank])
        turned_key = _rotate(down[..., self.of.kv_rank :], cos, sin)
        mixed: list[Tensor] = []
        for q, kv in zip(
            self.q(reads).chunk(self.num_heads, -1),
            self.kv(latent).chunk(self.num_heads, -1),
            strict=True,
        ):
            turned = _rotate(q[..., plain:], cos, sin)
            scores = q[..., :plain] @ kv[..., :plain].mT + turned @ turned_key.mT
            scores = scores * (self.scale / math.sqrt(self.width))
            scores = scores.masked_fill(~sees[:, 0], -math.inf)
            mixed.append(scores.softmax(-1) @ kv[..., plain:])
        return self.output(torch.cat(mixed, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU, GEGLU, or GELU without a gate; GELU in the tanh approximation."""

    def __init__(self, shape: ModelShape, ffn: int) -> None:
        super().__init__()
        self.kind, has_bias = shape.mlp, shape.bias is True
        if self.kind != "gelu":
            self.gate = nn.Linear(shape.hidden, ffn, has_bias)
        self.up = nn.Linear(shape.hidden, ffn, has_bias)
        self.down = nn.Linear(ffn, shape.hidden, has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x[B, T, D] to y[B, T, D]."""
        if self.kind == "gelu":
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate = self.gate(x)
        if self.kind == "geglu":
            return self.down(F.gelu(gate, approximate="tanh") * self.up(x))
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class PlainRouter(nn.Module):
    """Selects the experts of each token; scores in at least float32.

    Attributes:
        replayed: experts [B, T, k], best first, that forwards take in place of those that the
            scores select; None to select. Positions beyond T are ignored.
        logits, chosen: of the last forward, [B, T, E] and bool [B, T, E].
        selected: bool [B, T, E], what the scores of the last forward select.
        margins: [B, T], how far the last selected score is above the next, of the experts or of
            their groups, relative to the token's largest score; infinite if none is rejected.
    """

    bias: Tensor
    replayed: Tensor | None = None

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.num_experts, shape.hidden))
        if experts.has_bias:
            self.register_buffer("bias", torch.empty(experts.num_experts))
        self.logits, self.chosen = torch.empty(0), torch.empty(0)
        self.selected, self.margins = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the experts of each token, best first, and their weights."""
        experts = self.experts
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.logits = x.to(wide) @ self.weight.to(wide).T
        scores = self.scores()
        numbers = scores.detach() + (self.bias if experts.has_bias else 0)
        self.margins = torch.full(numbers.shape[:-1], math.inf).to(numbers)
        if experts.num_groups > 1:
            groups = numbers.unflatten(-1, (experts.num_groups, -1)).sort(-1, True).values
            of_group = groups[..., : 1 if experts.group_score == "max" else 2].sum(-1)
            is_open = torch.zeros_like(of_group, dtype=torch.bool)
            is_open.scatter_(-1, _first_best(of_group, experts.top_groups), True)
            self.margins = _margins(of_group, experts.top_groups)
            size = experts.num_experts // experts.num_groups
            numbers = numbers.masked_fill(~is_open.repeat_interleave(size, -1), -math.inf)
        best = _first_best(numbers, experts.top_k)
        self.margins = torch.minimum(self.margins, _margins(numbers, experts.top_k))
        self.selected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        if self.replayed is not None:
            best = self.replayed[:, : x.shape[1]].to(best.device)
        self.chosen = torch.zeros_like(self.selected).scatter(-1, best, True)
        weights = scores.gather(-1, best)
        if experts.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return best, experts.scaling * weights

    def scores(self) -> Tensor:
        """Return the scores of the last forward."""
        if self.experts.score == "sigmoid":
            return torch.sigmoid(self.logits)
        return torch.exp(self.logits - self.logits.logsumexp(-1, keepdim=True))


def _first_best(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of the last dimension; equal ones in their order."""
    order = np.argsort(-scores.detach().cpu().numpy(), -1, kind="stable")
    return torch.from_numpy(order[..., :k].copy()).to(scores.device)


def _margins(scores: Tensor, k: int) -> Tensor:
    """Return the distance of the k-th largest score to the next, relative to the largest one."""
    if k == scores.shape[-1]:
        return torch.full_like(scores[..., 0], math.inf)
    ordered = scores.sort(-1, True).values
    largest = scores.masked_fill(scores == -math.inf, 0).abs().amax(-1)
    return (ordered[..., k - 1] - ordered[..., k]) / largest


class PlainExperts(nn.Module):
    """Stacked gated MLPs."""

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        self.kind, number, ffn = shape.mlp, experts.num_experts, experts.ffn
        self.gate = nn.Parameter(torch.empty(number, ffn, shape.hidden))
        self.up = nn.Parameter(torch.empty(number, ffn, shape.hidden))
        self.down = nn.Parameter(torch.empty(number, shape.hidden, ffn))

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Apply one expert to x[N, D]."""
        gate, up = x @ self.gate[number].T, x @ self.up[number].T
        if self.kind == "geglu":
            return (F.gelu(gate, approximate="tanh") * up) @ self.down[number].T
        return (gate * torch.sigmoid(gate) * up) @ self.down[number].T


class PlainMoE(nn.Module):
    """Experts in place of an MLP: a loop over all of them, each for the tokens that chose it."""

    def __init__(self, shape: ModelShape, experts: ExpertShape) -> None:
        super().__init__()
        self.router = PlainRouter(shape, experts)
        self.experts = PlainExperts(shape, experts)
        if experts.shared_ffn:
            self.shared = MLP(shape, experts.shared_ffn)
        if experts.has_shared_gate:
            self.shared_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x[B, T, D] to y[B, T, D]."""
        shape = self.router.experts
        best, weights = self.router(x)
        if self.training and shape.capacity is not None:
            weights = weights * self._fits(best, shape.capacity)
        y = torch.zeros_like(x)
        for number in range(shape.num_experts):
            row, place, slot = (best == number).nonzero(as_tuple=True)
            fed = self.experts(x[row, place], number)
            fed = (fed * weights[row, place, slot][:, None]).to(x.dtype)
            y = y.index_put((row, place), fed, accumulate=True)
        if shape.shared_ffn:
            share = torch.sigmoid(self.shared_gate(x)) if shape.has_shared_gate else 1
            y = y + share * self.shared(x)
        return y

    def _fits(self, best: Tensor, capacity: float) -> Tensor:
        """Return 0 where an expert has its most tokens, from earlier positions, else 1."""
        num_rows, length, top_k = best.shape
        most = math.ceil(Fraction(str(capacity)) * top_k * length / len(self.experts.gate))
        fits = torch.ones_like(best)
        for row in range(num_rows):
            taken = Counter[int]()
            for place in range(length):
                for slot, number in enumerate(best[row, place].tolist()):
                    fits[row, place, slot] = taken[number] < most
                    taken[number] += 1
        return fits


class Block(nn.Module):
    """Attention and MLP on the residual stream."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.dropout = Dropout(shape.dropout)
        before, after = shape.norm_at != "output", shape.norm_at != "input"
        self.attention_norm = Norm(shape.hidden, shape) if before else None
        self.attention = (Attention if shape.latent is None else PlainLatentAttention)(shape)
        self.attention_output_norm = Norm(shape.hidden, shape) if after else None
        self.mlp_norm = Norm(shape.hidden, shape) if before else None
        experts = shape.experts
        if experts is None or index < experts.first_dense:
            self.mlp = MLP(shape, shape.ffn)
        else:
            self.mlp = PlainMoE(shape, experts)
        self.mlp_output_norm = Norm(shape.hidden, shape) if after else None

    def forward(self, x: Tensor, angles: Any, sees: Tensor, keys: Tensor | None) -> Tensor:
        """Map x[B, T, D] to y[B, T, D]."""
        mixed = self.attention(_normed(self.attention_norm, x), angles, sees)
        x = x + self.dropout(_normed(self.attention_output_norm, mixed), keys, 1)
        fed = self.mlp(_normed(self.mlp_norm, x))
        return x + self.dropout(_normed(self.mlp_output_norm, fed), keys, 2)


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Head(nn.Module):
    """The output projection and the summed cross-entropy."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        size = (shape.vocab_size, shape.hidden)
        self.weight = None if shape.tied else nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor, labels: Tensor | None, tied: Tensor | None) -> Tensor:
        """Return the sum of the losses over valid tokens; without labels, the logits."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None
        logits = F.linear(x, weight)
        if labels is None:
            return logits
        wide = logits.double() if x.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")


class PlainDecoder(nn.Module):
    """Reference implementation of `models.decoder.Decoder`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        if shape.position == "learned":
            self.position_embedding = nn.Embedding(shape.max_seq_len, shape.hidden)
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, index) for index in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape)
        self.output = Head(shape)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        dropout_keys_B: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the losses; without labels, the logits."""
        if positions_BT is None:
            positions_BT = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if self.training:
            self.is_counted = labels >= 0 if labels is not None else torch.zeros_like(tokens).bool()
        else:
            dropout_keys_B = None
        x = self.embedding(tokens)
        if self.shape.scaled_embedding:
            x = x * self.shape.hidden**0.5
        if self.shape.position == "learned":
            x = x + self.position_embedding(positions_BT)
        x = self.dropout(x, dropout_keys_B, 0)
        for index, block in enumerate(self.blocks):
            sees = self._sees(index, tokens, documents_BT)
            angles = self._angles(index, positions_BT, x.dtype)
            x = block(x, angles, sees[:, None], _layer_keys(dropout_keys_B, index))
        tied = self.embedding.weight if self.shape.tied else None
        return self.output(self.norm(x), labels, tied)

    def auxiliary_loss(self) -> Tensor:
        """Return the balancing and z losses of the last forward, over the tokens that count."""
        experts, is_valid = self.shape.experts, self.is_counted
        total = torch.zeros((), dtype=torch.float64, device=is_valid.device)
        if experts is None or not is_valid.any():
            return total
        routers = [module for module in self.modules() if isinstance(module, PlainRouter)]
        loads, means = list[Tensor](), list[Tensor]()
        for router in routers:
            scores = router.scores()[is_valid]
            loads.append(router.chosen[is_valid].double().mean(0))
            means.append((scores / scores.sum(-1, keepdim=True)).mean(0))
            squares = torch.logsumexp(router.logits[is_valid], -1) ** 2
            total = total + experts.z_loss * squares.mean()
        if experts.pools_layers:
            loads, means = ([torch.stack(each).mean(0)] for each in (loads, means))
        for load, mean in zip(loads, means, strict=True):
            total = total + experts.aux_loss * experts.num_experts * (load * mean).sum()
        return total

    @torch.no_grad()
    def update_biases(self) -> None:
        """Move the bias of each expert toward the mean load, after an update of the weights."""
        for router in self.modules():
            if isinstance(router, PlainRouter) and router.experts.has_bias:
                load = router.chosen[self.is_counted].sum(0).double()
                router.bias += router.experts.bias_rate * torch.sign(load.mean() - load)

    def _has_window(self, layer: int) -> bool:
        every = self.shape.full_every
        return self.shape.window is not None and (every is None or layer % every != every - 1)

    def _sees(self, layer: int, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Return the attention mask, [B, T, T], True where a query position sees a key position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        distance = places[:, None] - places
        sees = distance >= 0
        if self._has_window(layer):
            assert self.shape.window is not None
            sees = sees & (distance < self.shape.window)
        sees = sees[None].expand(len(tokens), -1, -1)
        if documents is not None:
            sees = sees & (documents[:, :, None] == documents[:, None, :])
        return sees

    def _angles(
        self, layer: int, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        shape = self.shape
        if shape.position != "rope":
            return None
        theta, scaling = shape.rope_theta, shape.rope_scaling
        if self._has_window(layer) and shape.window_theta is not None:
            theta, scaling = shape.window_theta, None
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        width = shape.head_dim if shape.latent is None else shape.latent.rope_dim
        pairs = torch.arange(width // 2, dtype=torch.float64, device=positions.device)
        frequency = 1 / theta ** (2 * pairs / width)
        stretch = 1.0
        if isinstance(scaling, Yarn):
            frequency, stretch = _yarn(scaling, frequency, theta), scaling.rotation_scale
        elif scaling is not None:
            factor, low, high, length = scaling
            wave = 2 * math.pi / frequency
            smooth = ((length / wave - low) / (high - low)).clamp(0, 1)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        angle = positions.double()[:, :, None, None] * frequency
        return (stretch * angle.cos()).to(wide), (stretch * angle.sin()).to(wide)


def _yarn(of: Yarn, frequency: Tensor, theta: float) -> Tensor:
    """Return the frequencies of YaRN."""
    num_pairs = len(frequency)
    # The pair, as a real number, that turns as often as each border in a row of pre-training.
    first, last = (
        num_pairs * math.log(of.original_length / (2 * math.pi * turns), theta)
        for turns in (of.beta_fast, of.beta_slow)
    )
    if of.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, 2.0 * num_pairs - 1)
    width = 0.001 if first == last else last - first
    slow = [min(max((pair - first) / width, 0.0), 1.0) for pair in range(num_pairs)]
    return frequency * frequency.new_tensor([1 - part + part / of.factor for part in slow])


def _layer_keys(keys: Tensor | None, layer: int) -> Tensor | None:
    if keys is None:
        return None
    with np.errstate(over="ignore"):
        of_layer = _split_mix(keys.cpu().numpy().view(np.uint64), np.uint64(layer + 1))
    return torch.from_numpy(of_layer.view(np.int64)).to(keys.device)


@dataclass(frozen=True)
class PlainNextToken:
    """The objective of a `PlainDecoder`; `seed` fixes the dropout masks."""

    seed: int
    dropout: float

    def loss_sum(self, model: nn.Module, microbatch: Batch, step: int) -> Tensor:
        """Return the sum of the losses in nats."""
        return model(
            microbatch.tokens_BT,
            microbatch.labels_BT,
            positions_BT=microbatch.positions_BT,
            documents_BT=microbatch.documents_BT,
            dropout_keys_B=_row_keys(self.seed, step, microbatch.rows_B) if self.dropout else None,
        )

    def num_valid(self, microbatch: Batch) -> int:
        """Count the labels that are not negative."""
        return int((microbatch.labels_BT >= 0).sum())


def plain_batch(file: TokenFile, samples: Any, rows: Any, corpus: CorpusConfig) -> Batch:
    """Return a batch of samples of a file: T tokens each, with the next tokens as labels.

    With a document mask, positions restart at 0 at each separator that is not the first token.
    """
    text, length = file.map(), corpus.seq_len
    tokens, positions, documents = (np.zeros((len(samples), length), np.int64) for _ in range(3))
    labels = np.full_like(tokens, -100)  # which cross_entropy ignores
    for row, number in enumerate(samples):
        window = text[number * length : (number + 1) * length + 1]
        size = len(window) - 1
        tokens[row, :size], labels[row, :size] = window[:-1], window[1:]
        first = document = 0
        for at in range(length):
            if corpus.document_mask and 0 < at < size and window[at] == file.end_id:
                first, document = at, document + 1
            positions[row, at], documents[row, at] = at - first, document
    made = (tokens, labels, positions, documents, np.asarray(rows, np.int64))
    return Batch(*(torch.from_numpy(each) for each in made))
