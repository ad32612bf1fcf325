"""Initial weights: a pure function of (seed, parameter name, position in the parameter)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from phalanx.models.random import fill_normal, key
from phalanx.models.shape import ModelShape

_STD = 0.02
_OVER_THE_VOCABULARY = ("embedding.weight", "output.weight")
_INTO_RESIDUAL = (
    *("attention.output.weight", "mlp.down.weight"),
    *("mlp.experts.down", "mlp.shared.down.weight"),
)


def fill_initial(
    shape: ModelShape,
    seed: int,
    out: Tensor,
    name: str,
    full: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> Tensor:
    """Fill a parameter or buffer of a Decoder, or a shard of one, with its initial values.

    Matrices are normal with a standard deviation of 0.02. The standard deviation of matrices that
    write into the residual stream is divided by sqrt(2 num_layers), because 2 num_layers branches
    add up there (Radford et al. 2019, section 2.3). For embedding and output projection it is
    sqrt(2 / (5 hidden)) (Nguyen and Salazar 2019, section 2.2): 0.02 at a width of 1,000, and more
    for narrow models, which then learn faster. Norms initially multiply by 1, and biases are 0.
    Of an adapter, A is uniform within 1 / sqrt(in) and B is 0, as PEFT initializes them.

    `name` is the name in the decoder, such as "blocks.3.attention.q.weight". `full` is the shape of
    the full parameter, in which the shard `out` begins at `offset`; without them, `out` is the full
    parameter.
    """
    if name.endswith(("bias", "lora_B.weight")):
        return out.detach().zero_()
    if name.endswith("norm.weight"):
        return out.detach().fill_(0 if shape.norm == "rms+1" else 1)
    if name.endswith("lora_A.weight"):
        std, sizes = 1 / math.sqrt(3 * (full or out.shape)[-1]), {"shape": full, "offset": offset}
        return fill_normal(out, key(seed, name), std, **sizes, is_uniform=True)
    if name in _OVER_THE_VOCABULARY:
        std = math.sqrt(2 / (5 * shape.hidden))
    elif name.endswith(_INTO_RESIDUAL):
        std = _STD / math.sqrt(2 * shape.num_layers)
    else:
        std = _STD
    return fill_normal(out, key(seed, name), std, shape=full, offset=offset)
