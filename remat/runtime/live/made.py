"""What calls of operators and of modules have made: storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.runtime.accelerator import bytes_of
from remat.runtime.live.versions import Source, Version
from remat.runtime.operators import tensors_in
from remat.runtime.pytree import storage_of

NUMBER_BYTES = 16  # of the largest, a complex one


def new_storages(result: Any, taken: set[int]) -> list[torch.UntypedStorage]:
    """The storages of what an operator returned that are not in `taken` (`id`s), each once, but for empty ones."""
    found: list[torch.UntypedStorage] = []
    for tensor in tensors_in(result):
        for part in parts_of(tensor):
            storage = storage_of(part)
            if id(storage) not in taken and storage.nbytes():
                found.append(storage)
                taken.add(id(storage))
    return found


def sizes_of(values: Any) -> list[tuple[torch.UntypedStorage, int]]:
    """The storages of dense tensors, each once, and what was given for them."""
    found = {id(storage_of(each)): storage_of(each) for each in tensors_in(values) if each.layout == torch.strided}
    return [(storage, bytes_of(storage)) for storage in found.values()]


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor may stand for a number of Python's that is computed with: autograd makes and keeps such."""
    return tensor.layout == torch.strided and storage_of(tensor).nbytes() <= NUMBER_BYTES


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """The dense tensors that a sparse one consists of; a dense one itself."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def can_be_evicted(result: Any, made: Sequence[torch.UntypedStorage]) -> bool:
    """Whether what a call returned can be freed and put back: no parts of sparse tensors, no mapped files."""
    if isinstance(result, Tensor) and result.layout == torch.strided:
        return all(storage.resizable() for storage in made)
    strided = all(tensor.layout == torch.strided for tensor in tensors_in(result))
    return strided and all(storage.resizable() for storage in made)


def storages_made(
    result: Any, sources: Sequence[Source], versions: Mapping[int, Version]
) -> list[torch.UntypedStorage]:
    """Storages that a call has made: those that were neither ours nor the program's before."""
    if isinstance(result, Tensor) and result.layout == torch.strided:
        storage = storage_of(result)
        if id(storage) in versions or not storage.nbytes():
            return []
        return [storage] if all(source.storage() is not storage for source in sources) else []
    taken = {id(used) for source in sources if (used := source.storage()) is not None}
    return [storage for storage in new_storages(result, taken) if id(storage) not in versions]
