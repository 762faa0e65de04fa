"""`FoundChain`: which calls of a model's modules are the stages of its chains, and what they cover."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from remat.chain import Layout
from remat.formatting import format_bytes
from remat.runtime.calls.stages import describe_call, stage_name


@dataclass(frozen=True)
class FoundStage:
    """A stage of a chain that was found.

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
    """The chains of a model, as `find_chain` found them; shows itself in a terminal and in Jupyter.

    Attributes:
        model: name of its class.
        stages: in the order in which they run.
        outside: names of the outermost module calls that lie in no stage, and what autograd keeps of each, in bytes.
        memory_share: of all that autograd keeps for the backward, how much is kept for stages, 0 to 1.
        time_share: of the forward's time.
        aside: calls of modules of stages that are no part of any.
        uncalled: modules that this forward does not call.
    """

    model: str
    stages: tuple[FoundStage, ...]
    outside: tuple[tuple[str, int], ...]
    memory_share: float
    time_share: float
    aside: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()

    @property
    def chains(self) -> tuple[tuple[FoundStage, ...], ...]:
        """The stages, cut where one does not follow the one before it."""
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
        """How the stages lie on the model, measured with this call."""
        return Layout(tuple(map(len, self.calls)), describe_call(call), self.calls, self.aside, self.uncalled)

    def __str__(self) -> str:
        lines = [f"{self._summary()}"]
        for chain in self.chains:
            first, last = chain[0].name, chain[-1].name
            saved = sum(stage.saved_bytes for stage in chain)
            ends = first if len(chain) == 1 else f"{first} ... {last}"
            lines.append(f"  {ends}: {_count(len(chain), 'stage')}, {format_bytes(saved)} saved")
        lines += [f"  outside: {name}, {format_bytes(size)} saved" for name, size in self.outside if size]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for number, chain in enumerate(self.chains, 1):
            for stage in chain:
                cells = (f"{number}", escape(stage.name), format_bytes(stage.saved_bytes), f"{stage.fwd_seconds:.2g} s")
                rows.append(cells)
        rows += [("outside", escape(name), format_bytes(size), "") for name, size in self.outside if size]
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        head = "".join(f"<th>{title}</th>" for title in ("chain", "stage", "saved", "forward"))
        return f"<p>{escape(self._summary())}</p><table><tr>{head}</tr>{body}</table>"

    def _summary(self) -> str:
        return (
            f"{self.model}: {_count(len(self.stages), 'stage')} in {_count(len(self.chains), 'chain')}, with "
            f"{self.memory_share:.0%} of the activation memory and {self.time_share:.0%} of the forward's time"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
