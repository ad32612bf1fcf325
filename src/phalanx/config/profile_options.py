"""The settings of a profile, and their text form: `wait=1,warmup=1,active=2,record_shapes=true`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from phalanx.config.fields import Range, check_value, read_text, settings
from phalanx.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
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

    wait: Annotated[int, Range(0)] = 1
    warmup: Annotated[int, Range(0)] = 1
    active: Annotated[int, Range(1)] = 1
    repeat: Annotated[int, Range(0)] = 1
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False

    @classmethod
    def parse(cls, text: str) -> ProfileOptions:
        """Return the options of a text such as `wait=1,warmup=1,active=2`.

        Raises:
            ConfigError: a part is not NAME=VALUE with a known name and a legal value.
        """
        known = {setting.key: setting for setting in settings(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, has_value, value = (word.strip() for word in part.partition("="))
            if not has_value or name not in known or name in values:
                twice = f", but {name} is set before" if name in values else ""
                near = "" if name in known else nearest(name, list(known))
                raise ConfigError(
                    f"profile: '{part}' in '{text}'{twice}; expected NAME=VALUE once for each "
                    f"name, with a name of {', '.join(known)}{near}"
                )
            try:
                values[name] = read_text(known[name].hint, value)
            except ConfigError as error:
                raise ConfigError(f"profile: {name} is {error}") from None
            try:
                check_value(known[name], values[name])
            except ConfigError as error:
                raise ConfigError(f"profile: {error}") from None
        return cls(**values)
