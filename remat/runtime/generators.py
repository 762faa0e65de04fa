"""Random number generators: those of PyTorch's devices, and those that a program has made and its modules hold."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from remat.errors import NoChain, UnsupportedModel
from remat.runtime.accelerator import default_generator
from remat.runtime.fakes import in_earnest
from remat.runtime.pytree import is_plain

_DEPTH = 4  # how far into what a module holds
_CALLS_DEEP = 2  # functions that call each other, in which generators are looked for
_LIBRARIES = ("torch", "numpy", "random", "math")  # whose functions draw from generators that are known
OWN = frozenset(vars(nn.Module()))  # attributes that every module has; children are modules of their own
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, nn.Module, type)
Path = tuple[Any, ...]  # keys and names, from the attributes of a module on
# Of modules that look so, where they hold generators, and what gives those that their functions refer to.
_paths: weakref.WeakKeyDictionary[nn.Module, tuple[Look, tuple[Path, ...], tuple[Callable[[], Any], ...]]] = (
    weakref.WeakKeyDictionary()
)
_states: dict[int, tuple[Any, Hashable, Any]] = {}  # of generators, by `id`, what was in memory, and the state


def is_generator(value: Any) -> bool:
    """Whether random numbers can be drawn from it: by PyTorch, Python or NumPy."""
    of_numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *(() if of_numpy is None else (of_numpy.Generator, of_numpy.RandomState)))
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)  # which never draws the same again


class Look:
    """The names and kinds of a module's attributes, and how much is in lists and dictionaries among them."""

    __slots__ = ("_counts", "_kinds", "_names")

    def __init__(self, module: nn.Module) -> None:
        attributes = vars(module)
        self._names, self._kinds = (*attributes,), (*map(type, attributes.values()),)
        self._counts = [
            (name, len(value))
            for name, value in attributes.items()
            if (type(value) is list or type(value) is dict) and name not in OWN
        ]

    def is_of(self, module: nn.Module) -> bool:
        """Whether the module still looks so. Asked before and after each call, so it looks at no more than it must."""
        attributes = vars(module)
        if (*attributes,) != self._names or (*map(type, attributes.values()),) != self._kinds:
            return False
        return all([len(attributes[name]) == count for name, count in self._counts])


def held_by(modules: Iterable[nn.Module], passed: Any = ()) -> list[Any]:
    """The generators that modules hold now in places where they held some before, and those that a call is passed.

    Modules also have those that their classes hold, and that global variables refer to of which their code speaks.
    """
    found = {} if is_plain(passed) else {id(each): each for _, each in _generators(passed, (), set())}
    for module in modules:
        look, paths, elsewhere = _paths.get(module, (None, (), ()))
        if look is None or not look.is_of(module):  # a forward may have set some up where there was nothing
            held = {name: value for name, value in vars(module).items() if name not in OWN}
            paths = tuple(path for path, _ in _generators(held, (), set()))
            elsewhere = (*_of_class(type(module)), *_of_functions(held.values()))  # type: ignore[arg-type]
            _paths[module] = Look(module), paths, elsewhere
        values = [*(_at(vars(module), path) for path in paths), *(get() for get in elsewhere)]
        found.update({id(each): each for each in values if is_generator(each)})
    return list(found.values())


def may_hold(module: nn.Module) -> bool:
    """Whether generators are to be looked for at the module by `held_by`, as long as its attributes are as they are."""
    look, paths, elsewhere = _paths.get(module, (None, (), ()))
    return look is None or not look.is_of(module) or bool(paths or elsewhere)


@cache
def _of_class(kind: Any) -> tuple[Callable[[], Any], ...]:
    """Give the generators, or nothing yet, that a class of modules and its methods refer to."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    found = [partial(vars(base).get, name) for base in own for name, value in vars(base).items() if is_generator(value)]
    return (*found, *_of_functions([value for base in own for value in vars(base).values()]))


def _of_functions(values: Iterable[Any]) -> Iterator[Callable[[], Any]]:
    """The same of functions among these values, of those in them, and of those that they call."""
    todo = [(value, _CALLS_DEEP) for value in values]
    seen: set[CodeType] = set()
    while todo:
        value, deep = todo.pop()
        if isinstance(value, property):
            todo += [(each, deep) for each in (value.fget, value.fset)]
        function = getattr(value, "__func__", value)  # of a static or class method, or a bound one
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        known = function.__globals__
        for name in names_in(function.__code__):
            found = known.get(name)
            if name in known and (found is None or is_generator(found)):
                yield partial(known.get, name)
            elif deep and isinstance(found, (ModuleType, type)) and not _name_of(found).startswith(_LIBRARIES):
                todo += [(vars(found).get(each), deep - 1) for each in names_in(function.__code__)]
            elif deep:
                todo.append((found, deep - 1))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it refers to nothing yet
                if is_generator(cell.cell_contents):
                    yield partial(getattr, cell, "cell_contents")
                else:
                    todo.append((cell.cell_contents, deep))


def _name_of(holder: ModuleType | type) -> str:
    return holder.__module__ if isinstance(holder, type) else holder.__name__


def names_in(code: CodeType) -> Iterator[str]:
    """Names that a function speaks of, or an expression or a function in it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from names_in(each)


def of_python() -> list[Any]:
    """Those that `random` and `numpy.random` draw from."""
    of_numpy = sys.modules.get("numpy.random")
    found: list[Any] = [random._inst]
    return found if of_numpy is None else [*found, of_numpy.mtrand._rand]


def foreign(drawn_from: Iterable[torch.Generator | torch.Tensor], known: Iterable[Any]) -> bool:
    """Whether one of the random states is neither a device's own nor among those that are known."""
    # Operators are given other Python objects for the same generators.
    found = {each._cdata: each.device for each in drawn_from}  # type: ignore[union-attr]
    for each in known:
        found.pop(getattr(each, "_cdata", None), None)
    return any(generator != default_generator(device)._cdata for generator, device in found.items())  # type: ignore[attr-defined]


def refuse_foreign(drawn_from: Iterable[torch.Generator | torch.Tensor], known: Iterable[Any], name: str) -> None:
    """Raises UnsupportedModel where code has drawn from a random state that nobody could set back."""
    drawn_from = list(drawn_from)
    if any(isinstance(each, torch.Tensor) for each in drawn_from):
        raise NoChain(
            f"{name} has a recurrent layer with dropout, whose random state only cuDNN can reach, so a recomputation "
            "would drop other elements. Put nn.Dropout between layers of one (dropout=0), or train under remat.DTR, "
            "which keeps what such a layer saves",
            "dropout in a recurrent layer, whose random state only cuDNN can reach",
        )
    if foreign(drawn_from, known):
        raise UnsupportedModel(
            f"{name} draws from a torch.Generator that is neither an attribute of a module nor passed to a call, so a "
            "recomputation would draw other numbers; make it an attribute of the module, or an argument"
        )


def _generators(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """Generators that can be reached from a value, each with the way there."""
    if is_generator(value):
        yield path, value
    elif isinstance(value, _PLAIN) or len(path) > _DEPTH or id(value) in seen:
        return
    else:
        seen.add(id(value))
        for key, item in _items(value):
            yield from _generators(item, (*path, key), seen)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def _at(value: Any, path: Path) -> Any:
    for key in path:
        try:
            value = value[key] if isinstance(value, (Mapping, list, tuple)) else vars(value)[key]
        except (KeyError, IndexError, TypeError):
            return None  # no longer there
    return value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.device):
        generator = default_generator(generator)
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    known, memory = _states.get(id(generator)), _memory_of(generator)
    if known is not None and known[0] is generator and known[1] == memory:
        return known[2]
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif hasattr(generator, "bit_generator"):
        state = pickle.dumps(generator.bit_generator.state)
    else:
        state = pickle.dumps(generator.get_state(legacy=False))
    if memory is not None and memory == _memory_of(generator):  # no other thread has drawn meanwhile
        _states[id(generator)] = generator, memory, state
    return state


def _memory_of(generator: Any) -> Hashable:
    """All that the generator of `random` or `numpy.random` has in memory; None for others.

    While that is the same its state is, too. To ask NumPy for its state takes 70 us, and Python 15: in a transformer's
    training step, twice a block.
    """
    if generator is random._inst and type(generator) is random.Random:
        return vars(generator)["gauss_next"], _bytes_of(generator)
    of_numpy = sys.modules.get("numpy.random")
    if of_numpy is None or generator is not of_numpy.mtrand._rand:
        return None
    bits = generator._bit_generator
    if type(bits) is not of_numpy.MT19937 or not 0 < bits.ctypes.state_address - id(bits) < type(bits).__basicsize__:
        return None
    return id(bits), _bytes_of(generator), _bytes_of(bits)


def _bytes_of(value: Any) -> bytes:
    """What an object has in memory, without its header."""
    header = object.__basicsize__
    return ctypes.string_at(id(value) + header, type(value).__basicsize__ - header)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.device):
        generator = default_generator(generator)
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))


class RandomState:
    """States of generators, kept outside of PyTorch's memory: of accelerators' ones, of the CPU's, and of others.

    Attributes:
        states: the device or the generator, and its state.
    """

    __slots__ = ("states",)

    def __init__(self, devices: Iterable[torch.device] = (), own: Iterable[Any] = (), *, of_cpu: bool = True) -> None:
        found = [*devices, *([torch.default_generator] if of_cpu else ()), *own]
        with in_earnest():  # not what blocks count as the program's
            self.states: list[tuple[Any, Any]] = [(each, _state_of(each)) for each in found]

    def now(self) -> RandomState:
        """The states that the same generators are in now."""
        return RandomState((), [each for each, _ in self.states], of_cpu=False)

    def keep_changed(self, now: RandomState) -> bool:
        """Lets go of the states that are the same `now`; returns whether there are others."""
        pairs = zip(self.states, now.states, strict=True)
        self.states = [before for before, after in pairs if before[1] is not after[1] and before[1] != after[1]]
        return bool(self.states)

    def restore(self) -> None:
        with in_earnest():
            for each, state in self.states:
                _set_state(each, state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the generators are in these states; afterwards in the ones that they were in."""
        present = self.now()
        try:
            self.restore()
            yield
        finally:
            present.restore()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self.states == other.states

    __hash__ = None  # type: ignore[assignment]  # states are compared, never looked up
