"""What stands in autograd's graph for the tensors that it saved: full, or empty until their call is made again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from remat.errors import ReplayError
from remat.runtime.calls.tape import Value

if TYPE_CHECKING:
    from remat.runtime.calls.call import Call


class Owner(Protocol):
    """Who decides what of a call is in memory: a forward by a plan, or a block of DTR."""

    def have(self, saved: Saved) -> None:
        """Autograd needs a saved tensor: it is full from here on."""


class Saved:
    """A tensor that autograd saved in a call, as it stands in the graph.

    Attributes:
        owner: whom it asks where it is empty.
        call: that saved it.
        number: among what the call saves; -1 where it lies in memory that another call has made.
        tensor: it itself; None while it is empty.
        version: of the tensor when it was saved, or made again.
        storage: under DTR, whose memory it is; None where that is not known, or cannot be made again.
        value: how it looks at that.
    """

    __slots__ = ("__weakref__", "call", "number", "owner", "storage", "tensor", "value", "version")
    storage: Any
    value: Value

    def __init__(self, owner: Owner, call: Call, number: int, version: int, tensor: torch.Tensor | None = None) -> None:
        self.owner, self.call, self.number, self.version, self.tensor = owner, call, number, version, tensor

    def put(self, tensor: torch.Tensor) -> None:
        """It is full again."""
        self.tensor, self.version = tensor, tensor._version


Packed: TypeAlias = "Saved | tuple[torch.Tensor, int | None]"  # the latter of what is never empty, with its version


def changed(tensor: torch.Tensor, version: int | None, shape: torch.Size) -> RuntimeError:
    """The error that PyTorch has where no hook stands between, if a saved tensor had this version before."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {list(shape)} is at version {tensor._version}; expected version {version} instead"
    )


def unpack(packed: Packed) -> torch.Tensor:
    """The tensor that autograd has saved so.

    Raises:
        RuntimeError: it was changed since, as PyTorch says where no hook stands between.
    """
    if type(packed) is tuple:
        tensor, version = packed
        if version is not None and tensor._version != version:
            raise changed(tensor, version, tensor.shape)
        return tensor
    assert isinstance(packed, Saved)
    packed.owner.have(packed)
    found = packed.tensor
    if found is None:
        raise ReplayError("a tensor that autograd saved is missing; this is a bug of remat, please report it")
    if found._version != packed.version:
        raise changed(found, packed.version, found.shape)
    return found


def never(_: Any) -> torch.Tensor:
    """The unpack hook of a recomputation."""
    raise ReplayError(
        "backward() reached what a recomputation has made: a block puts a tensor that is part of the loss where remat "
        "does not look, such as a list that is a global variable, and a recomputation puts another there. Return it "
        "from the block, or train under remat.DTR(..., granularity='operator')"
    )
