"""What the schema of an operator says about how to treat its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train")


class Argument(NamedTuple):
    """Where a call has an argument: at `position` of the positional ones, or by name."""

    position: int
    name: str

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class Plan(NamedTuple):
    """How calls of one operator are treated.

    Attributes:
        label: what people call it.
        is_view: it only makes views and touches no data.
        is_fresh: it hands out a tensor that was made behind the dispatcher's back (`torch.tensor`).
        passes: it is none of ours to repeat and changes what a tensor is (`set_`); run it and forget it.
        writes: arguments that it changes.
        statistics: arguments that batch normalisation changes in training and whose old values do not matter then.
        training: the argument that says whether it is in training.
        random: it draws random numbers.
        repeatable: running it again does the same; collective communication does not.
        data_dependent: the size of its output depends on data.
        usual: it is none of all that.
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

    def trains(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call updates running statistics."""
        return bool(self.statistics) and (self.training is None or bool(self.training.of(args, kwargs)))


def plan_of(function: Any) -> Plan:
    """The plan of an operator (`torch._ops.OpOverload`), read from its schema and tags."""
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
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    namespace, _, label = schema.name.partition("::")
    plan = Plan(
        label,
        is_view=bool(aliases) and all(aliases) and not writes and not composite,
        is_fresh=label in ("lift_fresh", "lift"),
        passes=label in ("set_", "set_data", "record_stream"),
        writes=writes,
        statistics=statistics,
        training=next((argument for argument in arguments if argument.name in _TRAINING), None),
        random=torch.Tag.nondeterministic_seeded in tags,
        repeatable=not namespace.startswith(("c10d", "_c10d", "_dtensor")),
        data_dependent=torch.Tag.dynamic_output_shape in tags,
    )
    special = any(plan[1:4]) or any(plan[4:6]) or plan.random or plan.data_dependent or not plan.repeatable
    return plan._replace(usual=not special)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what an operator takes or returns: a tensor, or (nested) lists and tuples of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
