"""Isolating a stage for measuring: stand-ins for the stages before it and for everything after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.errors import UnsupportedModel
from remat.runtime.accelerator import rounded
from remat.runtime.pytree import map_tensors, storage_of, tensors


class StageOutput(NamedTuple):
    """Something that a stage returned and that has a gradient; `position` 0 is its activation."""

    stage: int
    position: int


class Source(torch.autograd.Function):
    """A stand-in for the stages before: returns its input unchanged and discards the gradient.

    A leaf would keep or copy the gradient, which does not happen between the stages of a real backward. But that of a
    stage's input is held as long as the graph, as it is in a step, for the stage before, while the rest of the backward
    runs (to weights that were cast before the stage ran, say). The output is not a view, because code may modify it in
    place, and its graph does not keep the input alive. Called by `cut_off`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        on_gradient: Callable[[torch.Tensor], None] | None,
        label: Any,
        tensor: torch.Tensor,
    ) -> Any:
        ctx.on_gradient, ctx.label = on_gradient, label
        ctx.is_inside = anchor is INSIDE
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.on_gradient is not None:
            ctx.on_gradient(gradient)
        if ctx.is_inside:
            ctx.held = gradient
        return None, None, None, None


# Anchors, which make the outputs of `Source` require gradients. OUTSIDE marks stage outputs that code outside the
# stages uses; INSIDE marks the inputs of a stage.
OUTSIDE, INSIDE = (torch.empty((), requires_grad=True) for _ in range(2))


def cut_off(
    tensor: torch.Tensor,
    anchor: torch.Tensor = INSIDE,
    on_gradient: Callable[[torch.Tensor], None] | None = None,
    label: Any = None,
) -> torch.Tensor:
    """The same data as the output of a new graph, whose only leaf is `anchor`.

    Args:
        on_gradient: called with the gradient that comes back.
        label: what `made_of` says of the node of this graph.
    """
    return Source.apply(anchor, on_gradient, label, tensor.detach())


def made_of(node: Any) -> StageOutput | None:
    """The stage output that was cut off at this node of the graph; None for any other node."""
    return node.label if drops_gradients(node) else None


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a stage's output whose graph was cut."""
    return tensor.grad_fn is not None and drops_gradients(tensor.grad_fn)


def cut(
    output: Any,
    on_gradient: Callable[[int, torch.Tensor], None] | None = None,
    anchor: torch.Tensor = INSIDE,
    *,
    made_by: int | None = None,
) -> Any:
    """The same output with each tensor that requires a gradient cut from its graph, in a separate new graph.

    In one common graph, a reference to one tensor would keep the memory of all alive.

    Args:
        on_gradient: called with the position of a tensor and its gradient.
        made_by: the stage that returned the output, for `made_of`.
    """
    handed = {}
    for position, tensor in enumerate(tensors(output)):
        if tensor.requires_grad and id(tensor) not in handed:
            back = None if on_gradient is None else partial(on_gradient, position)
            made = None if made_by is None else StageOutput(made_by, position)
            handed[id(tensor)] = cut_off(tensor, anchor, back, made)
    return map_tensors(lambda tensor: handed.get(id(tensor), tensor), output)


def with_graph_of_its_own(value: Any) -> Any:
    """The value with each non-leaf tensor cut from its graph, through which the caller may still run a backward."""
    return map_tensors(lambda tensor: tensor if tensor.grad_fn is None else cut_off(tensor), value)


def drops_gradients(node: Any) -> bool:
    """Whether no gradient gets past this node of a graph."""
    return isinstance(node, Source._backward_cls)


def nodes_of(ends: Iterable[torch.Tensor], stops: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """The nodes of the graph behind `ends`, but for those behind a node that `stops(node)`."""
    seen: set[Any] = {None}
    todo: list[Any] = [end.grad_fn for end in ends]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if not stops(node):
                todo.extend(before for before, _ in node.next_functions)


class Sink(torch.autograd.Function):
    """A stand-in for everything after a stage: a scalar whose backward passes `make_gradients()` to the given tensors.

    The gradients are allocated when the backward begins, and only autograd holds them, as in a real backward. The node
    saves nothing, so the tensors can be freed earlier.
    """

    @staticmethod
    def forward(ctx: Any, make_gradients: Callable[[], tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> Any:
        ctx.make_gradients = make_gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, *ctx.make_gradients())


def differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that a gradient flows from.

    Raises:
        UnsupportedModel: there are none.
    """
    found = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if not found:
        raise UnsupportedModel(
            "nothing in the model's output requires a gradient, so there is no step to run: all parameters are frozen, "
            "or the model returns something detached"
        )
    return found


def fixed_gradients(like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Random gradients for the given tensors, in their memory format, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for tensor in like:
        dtype = tensor.dtype if tensor.dtype.is_complex else torch.float32
        values = torch.randn(tensor.shape, generator=generator, dtype=dtype)
        gradients.append(torch.empty_like(tensor).copy_(values))
    return gradients


class Form(NamedTuple):
    """The memory layout of a gradient, which may be transposed, or a view of a larger storage.

    Attributes:
        elements: number of elements in its storage.
        bytes: size of its storage, rounded as by the allocator.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    elements: int
    bytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        memory = storage_of(tensor).nbytes()
        return cls(
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            memory // tensor.element_size(),
            rounded(memory, tensor.device),
            tensor.dtype,
            tensor.device,
        )

    def make(self) -> torch.Tensor:
        """A random gradient that lies in memory like this one."""
        whole = torch.empty(self.elements, dtype=self.dtype, device=self.device).normal_()
        return whole.as_strided(self.shape, self.stride, self.offset)


def contiguous_forms(value: Any) -> tuple[Form | None, ...]:
    """Forms of contiguous gradients for the tensors that require one; empty where these lie so anyway."""
    found = [tensor for tensor in tensors(value) if tensor.requires_grad]
    if all(tensor.is_contiguous() for tensor in found):
        return ()
    return tuple(Form.of(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)) for tensor in found)


def _normal(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_()


class RandomGradients:
    """Makes random gradients for given tensors when called; holds no memory until then.

    They are random because some kernels treat zeros differently. Their memory layout is that of the known gradient, or
    else of the tensor, because some kernels copy gradients of another layout.

    Args:
        forms: for each tensor the form of its gradient, None where that is not known.
    """

    def __init__(self, like: Iterable[torch.Tensor], forms: Sequence[Form | None] = ()) -> None:
        self._make: list[Callable[[], torch.Tensor]] = []
        for position, tensor in enumerate(like):
            form = forms[position] if position < len(forms) else None
            if form is not None and (form.shape, form.dtype) == (tensor.shape, tensor.dtype):
                self._make.append(form.make)
            else:
                stride = torch.empty_like(tensor, device="meta").stride()
                self._make.append(partial(_normal, tensor.shape, stride, tensor.dtype, tensor.device))

    def __call__(self) -> tuple[torch.Tensor, ...]:
        return tuple(make() for make in self._make)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The unpack hook of a forward that keeps what it would."""
    return tensor


def no_backward(_: None) -> torch.Tensor:
    """The unpack hook of a forward that keeps nothing."""
    raise UnsupportedModel("the model runs a backward in its forward, so remat cannot measure it; use remat.DTR")


def saving_nothing(unpack: Callable[[None], torch.Tensor] = no_backward) -> saved_tensors_hooks:
    """Inside, a forward computes the same, but saves nothing for a backward; `unpack` raises if one is run."""
    return saved_tensors_hooks(lambda tensor: None, unpack)
