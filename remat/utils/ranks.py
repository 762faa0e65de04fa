"""`Ranks`: the processes that do something together, each in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from remat.errors import RematError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Ranks:
    """Processes that measure and plan for one model together; without a group this one alone.

    What a process finds by its own clock or memory, and what makes it run something, all have to find together: modules
    in shards are gathered by all at once.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._is_inside = False
        self._failed: RematError | None = None  # since when nobody asks the others any more

    @property
    def are_several(self) -> bool:
        """Whether a group was given, be it of one process."""
        return self._group is not None

    @contextmanager
    def together(self, *, tell: bool = True) -> Iterator[None]:
        """Inside, an error that ends the work of one process ends that of all.

        The others hear of it where they next ask each other, at the latest at the end of the block.

        Args:
            tell: False where they may wait for each other in the model, too: telling them would be taken for what the
                model sends. There it is the end of the process that ends the wait of the others.

        Raises:
            RematError: in the others, with what it was.
        """
        if not self.are_several or self._is_inside:
            yield
            return
        self._is_inside, self._failed = True, None
        try:
            yield
            self.all(None)
        except Exception as error:
            if tell and self._failed is None:
                with suppress(RuntimeError):  # processes that are gone hear nothing; here the error is the news
                    self._gathered(_Failure(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._is_inside = False

    def all(self, value: T) -> list[T]:
        """Each one's value, in the order of ranks.

        Raises:
            RematError: one of them has failed instead.
        """
        if not self.are_several:
            return [value]
        if self._failed is None:
            found = self._gathered(value)
            for rank, each in enumerate(found):
                if isinstance(each, _Failure):
                    self._failed = RematError(f"rank {rank} of the group failed: {each.text}")
                    break
            else:
                return found
        raise self._failed

    def first(self, find: Callable[[], T]) -> T:
        """What the first one finds; the others do not look for it.

        Raises:
            RematError: in all of them, what it raises in the first one.
        """
        found: Any = None
        if not self.are_several or self._number == 0:
            try:
                found = find()
            except RematError as error:
                found = error
        found = self.all(found)[0]
        if isinstance(found, RematError):
            raise found
        return found

    @property
    def _number(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self._group)

    def _gathered(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, self._group)
        return found


class _Failure(NamedTuple):
    """What a process says instead of a value."""

    text: str
