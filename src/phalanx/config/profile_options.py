"""The settings of a profile, and their text form: `wait=1,warmup=1,active=2,record_shapes=true`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from phalanx.config.fields import Parts, Range


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Parts):
    """Which steps of a run are profiled, and what of them; the names are torch.profiler's.

    A cycle is `wait` steps that nothing observes, `warmup` steps whose observations are dropped,
    and `active` steps that are recorded.

    Attributes:
        repeat: number of cycles; with 0 they repeat until the run ends.
        record_shapes: whether the trace has the shapes of the inputs of operators.
        profile_memory: whether it has allocations, and the spans memory by kind, which compiled
            code hides; such steps take longer, and the trace has each operator twice.
        with_stack: whether it has the lines of source that called the operators.
        with_flops: whether it has the FLOPs of matrix products and convolutions.
    """

    KEY: ClassVar = "profile"
    wait: Annotated[int, Range(0)] = 1
    warmup: Annotated[int, Range(0)] = 1
    active: Annotated[int, Range(1)] = 1
    repeat: Annotated[int, Range(0)] = 1
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
