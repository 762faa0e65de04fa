"""`FoundChain`: which calls of a model's modules are the stages of its chains, and what they cover."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from remat.formatting import count, format_bytes, format_seconds, table
from remat.layout import Layout
from remat.runtime.calls.stages import describe_call, stage_name

_SMALL = 0.001  # of all that autograd keeps
MOST_OF_IT = 0.9  # in one stage


@dataclass(frozen=True)
class FoundStage:
    """One stage of a chain found by `find_chain`.

    Attributes:
        calls: the module calls that make it up: the module's name, with `#2` behind it for its second call.
        follows: it works on the activation of the stage before it, with nothing in between.
        saved_bytes: what autograd keeps of it for the backward.
        fwd_seconds: of its forward.
    """

    calls: tuple[str, ...]
    follows: bool
    saved_bytes: int
    fwd_seconds: float

    @property
    def name(self) -> str:
        return stage_name(self.calls)


@dataclass(frozen=True)
class FoundChain:
    """The chains of a model found by `find_chain`; print it, or show it in Jupyter.

    Attributes:
        model: name of its class.
        stages: in the order in which they run.
        outside: names of the outermost module calls outside the stages, and the bytes that autograd saves for each.
        memory_share: the stages' share of all bytes that autograd saves for the backward, 0 to 1.
        time_share: the stages' share of the forward's time.
        aside: calls that belong to no stage, although another call of the same module does.
        uncalled: modules that this forward does not call.
        skips: what stages take besides their activation: the stage that makes it, the one that takes it, and bytes.
        crossing: which tensor is in the way where one stage holds most of the memory.
        logits: the layer that computes logits outside of the stages, and their bytes; an empty name: none of note.
    """

    model: str
    stages: tuple[FoundStage, ...]
    outside: tuple[tuple[str, int], ...]
    memory_share: float
    time_share: float
    aside: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    skips: tuple[tuple[str, str, int], ...] = ()
    crossing: str = ""
    logits: tuple[str, int] = ("", 0)

    @property
    def chains(self) -> tuple[tuple[FoundStage, ...], ...]:
        """The stages, grouped into chains in which each follows the one before it."""
        chains: list[list[FoundStage]] = []
        for stage in self.stages:
            if stage.follows and chains:
                chains[-1].append(stage)
            else:
                chains.append([stage])
        return tuple(map(tuple, chains))

    @property
    def calls(self) -> tuple[tuple[str, ...], ...]:
        """The calls of each stage of the whole model, as `Layout.calls` has them: code between stages has none."""
        calls: list[tuple[str, ...]] = []
        for stage in self.stages:
            if not stage.follows:
                calls.append(())
            calls.append(stage.calls)
        return (*calls, ())

    def layout(self, call: object) -> Layout:
        """The layout of these stages, for a measurement with this call."""
        return Layout(tuple(map(len, self.calls)), describe_call(call), self.calls, self.aside, self.uncalled)

    @property
    def saved_bytes(self) -> int:
        """All bytes that autograd saves for the backward."""
        return sum(stage.saved_bytes for stage in self.stages) + sum(size for _, size in self.outside)

    def __str__(self) -> str:
        lines = [self._summary()]
        for chain in self.chains:
            first, last = chain[0].name, chain[-1].name
            ends = first if len(chain) == 1 else f"{first} ... {last}"
            saved = sum(stage.saved_bytes for stage in chain)
            lines.append(f"  {ends}: {count(len(chain), 'stage')}, {self._saved(saved)}")
        lines += [f"  skip: {maker} -> {user}, {format_bytes(size)}" for maker, user, size in self.skips]
        lines += [f"  outside: {name}, {self._saved(size)}" for name, size in self._worth_telling()]
        if self.logits[0]:
            lines.append(f"  {self._remedy()}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (escape(stage.name), f"chain {number}", format_bytes(stage.saved_bytes), format_seconds(stage.fwd_seconds))
            for number, chain in enumerate(self.chains, 1)
            for stage in chain
        ]
        rows += [
            (f"{escape(maker)} &rarr; {escape(user)}", "skip", format_bytes(size), "")
            for maker, user, size in self.skips
        ]
        rows += [(escape(name), "outside", format_bytes(size), "") for name, size in self._worth_telling()]
        said = f"{self._summary()}. {self._remedy()}" if self.logits[0] else self._summary()
        return f"<p>{escape(said)}</p>{table(('stage', '', 'saved', 'forward'), rows)}"

    def _summary(self) -> str:
        largest = max((stage.saved_bytes for stage in self.stages), default=0)
        if largest > MOST_OF_IT * self.saved_bytes:
            return (
                f"{self.model}: {count(len(self.stages), 'stage')} in {count(len(self.chains), 'chain')}, of which one "
                f"holds {largest / max(self.saved_bytes, 1):.0%} of the {format_bytes(self.saved_bytes)} that autograd "
                "saves for the backward. Plans that recompute whole stages free next to nothing; remat.fit trains such "
                f"a model under DTR where no part of that stage can be kept{self._crossing()}"
            )
        return (
            f"{self.model}: {count(len(self.stages), 'stage')} in {count(len(self.chains), 'chain')}. Plans can free "
            f"up to {self.memory_share:.0%} of the {format_bytes(self.saved_bytes)} that autograd saves for the "
            f"backward, by recomputing up to {self.time_share:.0%} of the forward"
        )

    def _remedy(self) -> str:
        name, size = self.logits
        return (
            f"logits: {name} computes {format_bytes(size)} of them, and a loss as much again; "
            "fit(..., chunk_head=True) has a part of them at a time"
        )

    def _crossing(self) -> str:
        return f". It cannot be cut: {self.crossing}" if self.crossing else ""

    def _saved(self, size: int) -> str:
        return f"{format_bytes(size)} saved ({size / max(self.saved_bytes, 1):.0%})"

    def _worth_telling(self) -> list[tuple[str, int]]:
        """What lies outside of the chains, without what is too small to matter."""
        return [(name, size) for name, size in self.outside if size > _SMALL * self.saved_bytes]
