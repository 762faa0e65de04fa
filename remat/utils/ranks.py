"""`Ranks`: the processes that do something together, each in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """Processes that measure one model together; without a group this one alone.

    What a process finds by its own clock or memory, and what makes it run something, all have to find together: modules
    in shards are gathered by all at once.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group

    def all(self, value: Any) -> list[Any]:
        """Each one's value, in the order of ranks."""
        if self._group is None:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, self._group)
        return found

    def first(self, value: Any) -> Any:
        """That of the first one."""
        return self.all(value)[0]
