"""What a kernel depends on besides its arguments: the default dtype, flags of backends, how many threads there are.

They are read at every operator or call of a module, as one tuple that is interned, so that what ran only refers to what
was the case then. Pointwise operators and those that move data ask no backend, so few flags are read for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch


class Flag(NamedTuple):
    """A flag of PyTorch's: the functions that read and write it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _flags(*names: tuple[str, str]) -> tuple[Flag, ...]:
    """Those of the pairs of functions of `torch._C` that this version has."""
    found = [(getattr(torch._C, read, None), getattr(torch._C, write, None)) for read, write in names]
    return tuple(Flag(read, write) for read, write in found if read is not None and write is not None)


def _precisions(*names: tuple[str, str]) -> tuple[Flag, ...]:
    """What float32 products are computed in, by backend and operator."""
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return tuple(Flag(partial(read, *name), partial(write, *name)) for name in names)


def _tuples(*names: tuple[str, str], as_list: bool = False) -> tuple[Flag, ...]:
    """Flags of several values each, which are read as a tuple and written as `write(*values)`, or as one list."""
    writes = (lambda write, values: write(list(values))) if as_list else (lambda write, values: write(*values))
    return tuple(Flag(partial(_as_tuple, flag.read), partial(writes, flag.write)) for flag in _flags(*names))


def _as_tuple(read: Callable[[], Any]) -> tuple[Any, ...]:
    value = read()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)  # one value in older versions


def _set_deterministic(value: bool) -> None:
    torch._C._set_deterministic_algorithms(value, warn_only=torch._C._get_deterministic_algorithms_warn_only())


_PLAIN = (
    Flag(torch.get_default_dtype, torch.set_default_dtype),
    Flag(torch.get_num_threads, torch.set_num_threads),  # a reduction's order of summation depends on it
    Flag(torch._C._get_deterministic_algorithms, _set_deterministic),
    *_flags(("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory")),
)
_BACKENDS = (
    *_PLAIN,
    *_flags(
        ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        ("_get_nnpack_enabled", "_set_nnpack_enabled"),
        ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        ("_get_math_sdp_enabled", "_set_sdp_use_math"),
        ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
        ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
        ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    ),
    *_tuples(("_get_sdp_priority_order", "_set_sdp_priority_order"), as_list=True),
    *_precisions(("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
_REDUCED = "reduced_precision_reduction"
if torch.backends.cuda.is_built():
    _BACKENDS += (
        *_flags(
            ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
            ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
            ("_get_cudnn_enabled", "_set_cudnn_enabled"),
            ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
            ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
            ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
            ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
        ),
        *_tuples(
            (f"_get_cublas_allow_fp16_{_REDUCED}", f"_set_cublas_allow_fp16_{_REDUCED}"),
            (f"_get_cublas_allow_bf16_{_REDUCED}", f"_set_cublas_allow_bf16_{_REDUCED}"),
        ),
        *_precisions(("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    )

Readers = tuple[Callable[[], Any], ...]
PLAIN: Readers = tuple(flag.read for flag in _PLAIN)
BACKENDS: Readers = tuple(flag.read for flag in _BACKENDS)
_ASK_NO_BACKEND = frozenset(
    "arange as_strided cat clone constant_pad_nd copy cumsum embedding embedding_dense_backward empty empty_like "
    "empty_strided expand fill flip full full_like gather index index_add index_put index_select max mean min "
    "nll_loss_backward nll_loss_forward ones ones_like rand randn scatter scatter_add select_backward slice_backward "
    "split stack sum var zeros zeros_like".split()
)


def readers_for(label: str, *, pointwise: bool) -> Readers:
    """What to read for an operator of this name."""
    return PLAIN if pointwise or label.strip("_") in _ASK_NO_BACKEND else BACKENDS


class Surroundings:
    """Flags as they were when operators ran. There is one object for each combination of values."""

    __slots__ = ("_flags", "_values")

    def __init__(self, flags: Sequence[Flag], values: tuple[Any, ...]) -> None:
        self._flags, self._values = flags, values

    def establish(self) -> list[tuple[Flag, Any]]:
        """Makes them so again; returns what was otherwise, for `put_back`."""
        others = [(flag, flag.read(), value) for flag, value in zip(self._flags, self._values, strict=True)]
        changed = []
        for flag, now, value in others:
            if now != value:
                flag.write(value)
                changed.append((flag, now))
        return changed

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are so."""
        changed = self.establish()
        try:
            yield
        finally:
            put_back(changed)


def put_back(changed: Sequence[tuple[Flag, Any]]) -> None:
    for flag, value in reversed(changed):
        flag.write(value)


def modes_now() -> list[Any]:
    """What functions and operators pass on their way now, `torch.device` and `torch.set_default_device` among it."""
    found = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    return [*found, *dispatch_modes()]


def dispatch_modes() -> list[Any]:
    """Without those that make tensors without data, or look on for remat: they come and go by themselves."""
    if not dispatch._len_torch_dispatch_stack():
        return []
    return [
        mode
        for mode in dispatch._get_current_dispatch_mode_stack()
        if getattr(mode, "_mode_key", None) is None and not type(mode).__module__.startswith("remat.")
    ]


def all_of(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Inside, all of them are entered, in their order."""
    return _entered(contexts) if contexts else nullcontext()


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def under(modes: Sequence[Any]) -> Iterator[None]:
    """Inside, these are in force, too: a backward runs without any."""
    now = modes_now()
    with ExitStack() as stack:
        for mode in modes:
            if any(mode is other for other in now):
                continue
            # Not by `with`, as they may have been entered elsewhere.
            if isinstance(mode, dispatch.TorchDispatchMode):
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            else:
                _push_mode(mode)
                stack.callback(_pop_mode)
        yield


def subclasses_heard() -> bool:
    """Whether subclasses of tensors have their say (`__torch_function__`); not while one of them runs a backward."""
    return torch._C._is_torch_function_enabled()


def hearing_subclasses(on: bool) -> AbstractContextManager[Any]:
    """Inside, they have their say, or not."""
    if on == subclasses_heard():
        return nullcontext()
    return torch._C._EnableTorchFunction() if on else torch._C.DisableTorchFunctionSubclass()


KNOWN: dict[tuple[Any, ...], Surroundings] = {}  # by values; those of the two sets of flags differ in length


def present() -> Surroundings:
    """As they are now, for all kinds of operators."""
    values = tuple([read() for read in BACKENDS])
    return KNOWN.get(values) or surroundings_of(values)


def surroundings_of(values: tuple[Any, ...]) -> Surroundings:
    """The one object for these values, as read by `PLAIN` or `BACKENDS`."""
    found = KNOWN.get(values)
    if found is None:
        flags = _PLAIN if len(values) == len(_PLAIN) else _BACKENDS
        found = KNOWN.setdefault(values, Surroundings(flags, values))
    return found
