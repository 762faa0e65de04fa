"""What the schema of an operator says about how to treat its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat.runtime.operators import is_collective, only_asks
from remat.runtime.surroundings import BACKENDS, Readers, readers_for

_OWN = (
    "aten",
    "prims",
    "prim",
    "c10d",
    "_c10d_functional",
    "_dtensor",
    "symm_mem",
)  # namespaces of PyTorch's own operators
INDEXING = ("index", "_unsafe_index")
PUTTING = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")


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
        random: it draws random numbers.
        repeatable: running it again does the same; collective communication does not.
        data_dependent: the size of its output may depend on data; `sized_by_data` says of a call whether it does.
        usual: it is none of all that.
        several: it returns more than one tensor; what these are may depend on whether gradients are on.
        reads: the flags that it may depend on besides its arguments.
        scalars: positions of numbers that it computes with elements of tensors.
        foreign: not an operator of PyTorch, so its tags may be missing.
    """

    label: str
    is_view: bool
    is_fresh: bool
    passes: bool
    writes: tuple[Argument, ...]
    statistics: tuple[Argument, ...]
    training: Argument | None
    random: bool
    repeatable: bool
    data_dependent: bool
    usual: bool = False
    several: bool = False
    reads: Readers = BACKENDS
    scalars: frozenset[int] = frozenset()
    foreign: bool = False

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
    """The traits of an operator (`torch._ops.OpOverload`), read from its schema and tags, once."""
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
    composite = not only_asks(function) and torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), "CompositeImplicitAutograd"
    )
    namespace, _, label = schema.name.partition("::")
    foreign = namespace not in _OWN
    traits = Traits(
        label,
        is_view=bool(aliases) and all(aliases) and not writes and not composite,
        is_fresh=label in ("lift_fresh", "lift"),
        passes=label in ("set_", "set_data", "record_stream"),
        writes=writes,
        statistics=statistics,
        training=next((argument for argument in arguments if argument.name in _TRAINING), None),
        random=foreign or torch.Tag.nondeterministic_seeded in tags,
        repeatable=not is_collective(namespace),
        data_dependent=torch.Tag.dynamic_output_shape in tags,
        several=len(schema.returns) > 1,
        reads=readers_for(label, pointwise=torch.Tag.pointwise in tags),
        scalars=_scalars(schema),
        foreign=foreign,
    )
    special = any(traits[1:6]) or traits.random or traits.data_dependent or not traits.repeatable
    return traits._replace(usual=not special)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what an operator takes or returns: a tensor, or (nested) lists and tuples of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
