"""Guards what reads or writes a tensor's memory without an operator: NumPy, `tolist`, pickling, pointers.

Such a call knows nothing of evicted memory. While a DTR block runs, the methods of `torch.Tensor` that lead there first
have the tensor in memory, and, where they hand its memory out, keep it there. What reaches memory otherwise (a pointer
taken before the block, C++ code of an extension that asks no dispatcher) cannot be seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

_HANDS_OUT = {
    "tolist": False,  # it is done with the memory when it returns
    "__repr__": False,  # looks at elements with all modes off
    "numpy": True,
    "data_ptr": True,
    "untyped_storage": True,  # behind pickling, copy.deepcopy and shared memory
    "__dlpack__": True,
}
Expose: TypeAlias = Callable[[Tensor, bool], None]

_lock = threading.Lock()
_blocks: list[Expose] = []  # of all threads; the methods are replaced while there is any
_own: dict[str, Any] = {}  # what `torch.Tensor` itself had under these names


def guard(expose: Expose) -> None:
    """From now on `expose(tensor, hands_out)` is called before the memory of any tensor is touched."""
    with _lock:
        _blocks.append(expose)
        if len(_blocks) == 1:
            for name, hands_out in _HANDS_OUT.items():
                if name in Tensor.__dict__:
                    _own[name] = Tensor.__dict__[name]
                setattr(Tensor, name, _guarded(getattr(Tensor, name), hands_out))


def unguard(expose: Expose) -> None:
    """Ends what `guard` began."""
    with _lock:
        _blocks.remove(expose)
        if not _blocks:
            for name in _HANDS_OUT:
                delattr(Tensor, name)
                if name in _own:
                    setattr(Tensor, name, _own.pop(name))


def _guarded(method: Callable[..., Any], hands_out: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for expose in list(_blocks):
            expose(self, hands_out)
        return method(self, *args, **kwargs)

    return guarded
