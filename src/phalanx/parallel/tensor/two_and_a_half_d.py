"""Tensor parallelism in two and a half dimensions (Tesseract).

Idea      `depth` layers of a q x q mesh hold the same weights, and each layer computes different
          rows (Wang et al., Tesseract, 2021, arXiv 2105.14500, section 3): less is broadcast than
          on one larger square, but every layer stores a copy of the weights.
Layout    residual x[B_depth,row, T, D_col]  inner y[B_depth,row, T, F_col]  column W[F_col, D_row]
          row W[D_row, F_col]; weights are replicated over depth
Forward, Backward  see two_d.py, in each layer; then dW{sum depth} -> all_reduce, once a step
Cost      two_d.py with B / depth rows, and 2 (depth-1)/depth of each weight's gradient
Limits    q must divide D, heads, key-value heads and F. B is padded to a multiple of q depth.
"""

from __future__ import annotations

from phalanx.parallel.tensor.spec import Spec
from phalanx.parallel.tensor.two_d import TwoD


class TwoAndAHalfD(TwoD):
    """The Tesseract layout; see the module docstring."""

    residual = Spec("B[depth row] T D[col]")
    inner = Spec("B[depth row] T F[col]")
    ids = Spec("B[depth] T")
