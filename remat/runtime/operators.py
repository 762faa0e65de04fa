"""What an operator is given, what it changes, and how calls of it are treated, by its schema and besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from remat.runtime.fakes import fake_mode, in_earnest
from remat.runtime.pytree import storage_of
from remat.runtime.surroundings import BACKENDS, Readers, readers_for

# Namespaces of PyTorch's own operators.
_OWN = ("aten", "prims", "prim", "c10d", "_c10d_functional", "_dtensor", "symm_mem")
INDEXING = ("index", "_unsafe_index")
PUTTING = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
EXPONENTIAL = "linalg_matrix_exp"
# No tag says of these that sizes depend on data; the last two make blocks.
MAKING_SPARSE = ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc")
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")
_HIDDEN = ("dropout_state", "dropout", "train")  # of recurrent layers by cuDNN and MIOpen


_COLLECTIVE = ("c10d", "_c10d", "_dtensor", "symm_mem")  # how namespaces of operators begin in which processes meet


def is_collective(namespace: str) -> bool:
    """Whether operators of a namespace wait for other processes: run again by one alone they would hang."""
    return namespace.startswith(_COLLECTIVE)


def waits_for_others(operator: Any) -> bool:
    """Whether processes meet in an operator; a wait for the result of such a one is none."""
    return is_collective(operator.namespace) and operator.overloadpacket.__name__ != "wait_tensor"


def only_asks(operator: Any) -> bool:
    """Whether an operator only looks up a property, such as the device of a fake tensor, or puts a tensor into one of a
    class that waits for it."""
    namespace = getattr(operator, "namespace", "")
    return namespace == "prim" or (
        namespace == "_c10d_functional" and operator.overloadpacket.__name__ == "_wrap_tensor_autograd"
    )


def only_views(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Whether an operator, which writes to nothing, only looks at its inputs in another way."""
    there = {storage_of(tensor)._cdata for tensor in inputs if tensor.layout == torch.strided}
    return all(tensor.layout == torch.strided and storage_of(tensor)._cdata in there for tensor in outputs)


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operator changes, by its schema."""
    return tensors_in([argument.of(args, kwargs) for argument in traits_of(operator).writes])


def statistics(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Running statistics among the arguments that batch normalisation changes, of which its schema says nothing."""
    traits = traits_of(operator)
    return (
        tensors_in([argument.of(args, kwargs) for argument in traits.statistics]) if traits.trains(args, kwargs) else []
    )


class EachOperator(TorchDispatchMode):
    """A mode that sees every operator; its `__torch_dispatch__` gives what is no `OpOverload` to `within`."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each call would pass through a wrapper that keeps the compiler out, at 4 us

    def within(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a higher-order operator; what flex attention consists of is seen, of others nothing."""
        if not (isinstance(operator, HigherOrderOperator) and operator.name().startswith("flex_attention")):
            return operator(*args, **kwargs)
        _push_mode(self)
        try:
            return operator.dispatch(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        finally:
            _pop_mode()


def not_of_plain(kind: type, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """What a mode for plain tensors answers where a subclass is among the arguments: these take the call apart, and
    its parts come. But one without data, as the compiler makes them to look, is none of the program's."""
    return operator(*args, **(kwargs or {})) if issubclass(kind, FakeTensor) else NotImplemented


def drawn_from(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Generator | Tensor]:
    """The random states that a call is given: generators; and the memory from which cuDNN's recurrent layers draw what
    they drop, which nobody else can reach and no schema speaks of."""
    found: list[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    if isinstance(operator, OpOverload) and (hidden := traits_of(operator).hidden):
        state, *switches = (argument.of(args, kwargs) for argument in hidden)
        if state is not None and state.numel() and all(switches):
            found.append(state)
    return found


class Argument(NamedTuple):
    """Where a call has an argument: at `position` of the positional ones, or by name."""

    position: int
    name: str

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class Traits(NamedTuple):
    """How calls of one operator are treated.

    Attributes:
        label: its name.
        is_view: it only makes views and touches no data.
        is_fresh: it hands out a tensor that was made behind the dispatcher's back (`torch.tensor`).
        passes: it is none of ours to repeat and changes what a tensor is (`set_`); run it and forget it.
        writes: arguments that it changes.
        statistics: arguments that batch normalisation changes in training and whose old values do not matter then.
        training: the argument that says whether it is in training.
        hidden: the argument with a random state that it alone can reach, and those that say whether it draws from it.
        random: it draws random numbers.
        repeatable: running it again does the same; collective communication does not.
        data_dependent: the size of its output may depend on data; `sized_by_data` says of a call whether it does.
        usual: it is none of all that.
        several: it returns more than one tensor; what these are may depend on whether gradients are on.
        reads: the flags that it may depend on besides its arguments.
        scalars: positions of numbers that it computes with elements of tensors, and scalar_names: their names.
        foreign: not an operator of PyTorch, so its tags may be missing.
        turns: what it changes of an argument is not its memory but how the tensor looks at it (`transpose_`).
    """

    label: str
    is_view: bool
    is_fresh: bool
    passes: bool
    writes: tuple[Argument, ...]
    statistics: tuple[Argument, ...]
    training: Argument | None
    hidden: tuple[Argument, ...]
    random: bool
    repeatable: bool
    data_dependent: bool
    usual: bool = False
    several: bool = False
    reads: Readers = BACKENDS
    scalars: frozenset[int] = frozenset()
    scalar_names: frozenset[str] = frozenset()
    foreign: bool = False
    turns: bool = False

    @property
    def may_run_twice(self) -> bool:
        """Whether a call that has failed may have left nothing behind; what it draws aside."""
        return self.repeatable and not (self.writes or self.statistics)

    def sized_by_data(self, args: Sequence[Any]) -> bool:
        """Whether the size of what a call makes, or of its scratch memory, depends on data. Indexing by numbers is
        among such operators by its tags, but only indexing by masks is one."""
        if not self.data_dependent and self.label not in PUTTING:
            return False
        if self.label in (*INDEXING, *PUTTING):
            return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))
        return True

    def trains(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call updates running statistics."""
        return bool(self.statistics) and (self.training is None or bool(self.training.of(args, kwargs)))


def traits_of(function: Any) -> Traits:
    """The traits of an operator (`OpOverload`), read from its schema and tags, once."""
    traits = _PLANS.get(function)
    if traits is None:
        traits = _PLANS[function] = _read(function)
    return traits


def _scalars(schema: Any) -> frozenset[int]:
    """Without a tensor among the arguments numbers may be sizes, as those of `arange` are."""
    kinds = [str(argument.type) for argument in schema.arguments]
    if not any(kind.startswith("Tensor") for kind in kinds):
        return frozenset()
    return frozenset(position for position, kind in enumerate(kinds) if kind in _COMPUTED_WITH)


_COMPUTED_WITH = ("number", "Optional[number]", "Tensor")  # a number may stand for a tensor
_PLANS: dict[Any, Traits] = {}
_SIZED_WITHOUT_DATA: set[Any] = set()  # operators of PyTorch, as they were seen to be


def _read(function: Any) -> Traits:
    schema, tags = function._schema, function.tags
    arguments = [Argument(position, argument.name) for position, argument in enumerate(schema.arguments)]
    statistics = tuple(argument for argument in arguments if argument.name in _STATISTICS)
    writes = tuple(
        argument
        for argument, declared in zip(arguments, schema.arguments, strict=True)
        if declared.alias_info is not None and declared.alias_info.is_write and argument not in statistics
    )
    aliases = [returned.alias_info is not None for returned in schema.returns]
    # A composite one that is seen whole (in inference mode) may copy although its schema speaks of a view.
    composite = not only_asks(function) and _is_composite(function)
    namespace, _, label = schema.name.partition("::")
    foreign = namespace not in _OWN
    hidden = tuple(argument for name in _HIDDEN for argument in arguments if argument.name == name)
    traits = Traits(
        label,
        is_view=bool(aliases) and all(aliases) and not writes and not composite,
        is_fresh=label in ("lift_fresh", "lift"),
        passes=label in ("set_", "set_data", "record_stream"),
        writes=writes,
        statistics=statistics,
        training=next((argument for argument in arguments if argument.name in _TRAINING), None),
        hidden=hidden if len(hidden) == len(_HIDDEN) else (),
        random=foreign or torch.Tag.nondeterministic_seeded in tags,
        repeatable=not is_collective(namespace),
        data_dependent=torch.Tag.dynamic_output_shape in tags or label in MAKING_SPARSE,
        several=len(schema.returns) > 1,
        reads=readers_for(label, pointwise=torch.Tag.pointwise in tags),
        scalars=_scalars(schema),
        scalar_names=frozenset(schema.arguments[position].name for position in _scalars(schema)),
        foreign=foreign,
        turns=torch.Tag.inplace_view in tags,
    )
    special = any(traits[1:6]) or bool(traits.hidden) or traits.random or traits.data_dependent or not traits.repeatable
    return traits._replace(usual=not special)


def looks_at_data(operator: Any, args: Sequence[Any]) -> bool:
    """Whether the host, or the size of a result, or of scratch memory, learns what a call's tensors hold."""
    traits = traits_of(operator)
    if traits.label == EXPONENTIAL:  # the larger the numbers, the more terms it sums up
        return True
    return torch.Tag.data_dependent_output in operator.tags or traits.sized_by_data(args)


def _is_composite(function: Any) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"))
    except RuntimeError:
        return False  # those of symbolic shapes, as of jagged tensors, are known to Python alone


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what an operator takes or returns: a tensor, or (nested) lists and tuples of them."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, Tensor):  # without a call of its own: this runs at each operator
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += tensors_in(item)
    return found


def on_meta(value: Any, shadows: dict[int, Tensor], floats: torch.dtype | None = None) -> Any:
    """`value` with tensors without data in the place of its tensors, the same for the same; `floats`: of this type
    those of floating-point numbers."""
    if isinstance(value, Tensor):
        if id(value) not in shadows:
            dtype = floats if floats is not None and value.is_floating_point() else value.dtype
            shadows[id(value)] = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
        return shadows[id(value)]
    if isinstance(value, (list, tuple)):
        return [on_meta(item, shadows, floats) for item in value]
    if isinstance(value, dict):
        return {name: on_meta(item, shadows, floats) for name, item in value.items() if name != "generator"}
    return torch.device("meta") if isinstance(value, torch.device) else value


def is_sized_by_data(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> bool:
    """Whether how the results of a call look may depend on what its arguments hold.

    It does not where an operator knows how they look without any data, whatever its tags say: those of others than
    PyTorch's own are often missing.
    """
    traits = traits_of(operator)
    if fake_mode() is not None:
        return traits.sized_by_data(args)
    if operator in _SIZED_WITHOUT_DATA:
        return False
    expected = _shapes_without_data(operator, args, kwargs)
    if expected is None:  # some are known for the type of numbers alone for which they are fastest (`_grouped_mm`)
        expected = _shapes_without_data(operator, args, kwargs, torch.bfloat16)
    if expected != [tensor.shape for tensor in tensors_in(output)]:
        return True
    if not traits.data_dependent and not traits.foreign and traits.label not in PUTTING:
        _SIZED_WITHOUT_DATA.add(operator)  # what others register may depend on more than the kind of operator
    return False


def _shapes_without_data(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], floats: torch.dtype | None = None
) -> list[torch.Size] | None:
    """Shapes of a call's results, were its floating-point numbers of this type; None where these need data."""
    shadows: dict[int, Tensor] = {}
    try:
        with in_earnest(), torch.no_grad():
            results = operator(*on_meta(args, shadows, floats), **on_meta(dict(kwargs), shadows, floats))
    except Exception:  # of any kind: it needs data, or nobody has said how its results look
        return None
    return [tensor.shape for tensor in tensors_in(results)]
