"""Send tensors to another process by value.

torch makes multiprocessing send each tensor as a file descriptor of shared memory. A new process
accepts at most 250 descriptors, and a host limits a process to a few thousand.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any

from typing_extensions import override


class ByValue:
    """A wrapper that unpickles to `value` itself, with a separate copy of each tensor."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        written = BytesIO()
        _PlainPickler(written).dump(self._value)
        return pickle.loads, (written.getvalue(),)


class _PlainPickler(ForkingPickler):
    """Pickler with the reducers of multiprocessing, such as for locks, but without torch's."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        known: Any = self.dispatch_table
        self.dispatch_table = {
            of: known[of] for of in known if not known[of].__module__.startswith("torch.")
        }

    @override
    def reducer_override(self, obj: Any, /) -> Any:
        """Send only the elements of a view, not its whole storage."""
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.layout != torch.strided:
            return NotImplemented
        if obj.untyped_storage().nbytes() <= obj.nbytes:
            return NotImplemented
        own = obj.detach().clone().requires_grad_(obj.requires_grad)
        return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
