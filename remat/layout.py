"""`Layout`: which modules are the stages of a chain; `Option`: what can be kept of one; `Skip`: what joins two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from remat.formatting import format_bytes


@dataclass(frozen=True)
class Layout:
    """Which modules of a model are the stages of a chain, and the input that they were measured with.

    Attributes:
        modules: for each stage but the loss, how many consecutive modules of the flattened `nn.Sequential` it runs.
        inputs: one line per tensor of the sample: its dtype, shape and device type, `float32[8, 3, 32, 32] cpu`.
        calls: for a chain found in any other model, the module calls of each stage but the loss: the module's name,
            with `#2` behind it for its second call in a forward. A stage without calls is what the model computes
            between the others. None for an `nn.Sequential`.
        aside: calls that belong to no stage, although another call of the same module does.
        uncalled: modules that the sample's forward does not call; a forward that calls one differs from the plan.
        ends_early: for each stage but the loss, whether a recomputation may end with the last tensor that it saves;
            empty: none may.
        dropped: for each stage but the loss, and each of its options, the saved tensors that are not kept, as indices
            from 0 in the order in which autograd saves them; empty: no stage has options.
        offloaded: the same for the saved tensors that are offloaded; empty: none are.
        variants: the same for what compiled blocks are compiled for (`Option.variant`); empty: as they were compiled.
    """

    modules: tuple[int, ...]
    inputs: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...] | None = None
    aside: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    ends_early: tuple[bool, ...] = ()
    dropped: tuple[tuple[frozenset[int], ...], ...] = ()
    offloaded: tuple[tuple[frozenset[int], ...], ...] = ()
    variants: tuple[tuple[float | None, ...], ...] = ()

    def to_fields(self) -> dict[str, Any]:
        calls = None if self.calls is None else [list(names) for names in self.calls]
        own = {"modules": list(self.modules), "inputs": list(self.inputs)}
        others = {"aside": list(self.aside), "uncalled": list(self.uncalled), "ends_early": list(self.ends_early)}
        numbers = {
            name: [[sorted(each) for each in options] for options in getattr(self, name)]
            for name in ("dropped", "offloaded")
        }
        return {**own, "calls": calls, **others, **numbers, "variants": [list(each) for each in self.variants]}

    @classmethod
    def from_fields(cls, content: dict[str, Any] | None) -> Layout | None:
        if content is None:
            return None
        calls = content.get("calls")
        named = None if calls is None else tuple(map(tuple, calls))
        others = {name: tuple(content.get(name, ())) for name in ("aside", "uncalled", "ends_early")}
        numbers: dict[str, Any] = {
            name: tuple(tuple(map(frozenset, options)) for options in content.get(name, ()))
            for name in ("dropped", "offloaded")
        }
        variants = tuple(map(tuple, content.get("variants", ())))
        return cls(tuple(content["modules"]), tuple(content["inputs"]), named, **others, **numbers, variants=variants)


@dataclass(frozen=True)
class Option:
    """A way for F_all to keep a part of a stage's saved tensors; the rest is recomputed right before its backward.

    An option may also offload tensors to the host's memory. They are copied out during the next forward operation,
    their device memory is freed when it ends, and they are copied back during the next stage's backward
    (`remat.simulation`). Of a compiled block an option may be another variant of it, which saves less and whose
    backward computes more; that more is its replay.

    Attributes:
        saved_bytes: size of the tensors kept on the device, with the stage's output, without its input.
        save_overhead_bytes: scratch memory of this F_all beyond its input and what it keeps, here and on the host.
        bwd_overhead_bytes: what the replay and the backward need beyond what is kept, here and on the host, a_{l-1},
            grad_l and grad_{l-1}.
        replay_seconds: how long the replay takes.
        without: names of the operators whose results are not kept, for display: "native_layer_norm, gelu".
        host_bytes: size of the offloaded tensors.
        link_seconds: time to copy them over the link, one way.
        variant: of a compiled block: the compiler's `activation_memory_budget` that it is compiled for.
    """

    saved_bytes: int
    save_overhead_bytes: int
    bwd_overhead_bytes: int
    replay_seconds: float
    without: str = ""
    host_bytes: int = 0
    link_seconds: float = 0.0
    variant: float | None = None

    def described(self, saved_bytes: int, fwd_seconds: float) -> str:
        """The option in words, for a stage of these costs: "without gelu: keeps 48% of the bytes, ..."."""
        kept = self.saved_bytes / saved_bytes if saved_bytes else 1.0
        if self.variant is not None:
            more = f", takes {self.replay_seconds / fwd_seconds:.0%} of the forward more" if fwd_seconds else ""
            return f"compiled for a budget of {self.variant:g}: keeps {kept:.0%} of the bytes{more}"
        again = f", reruns {self.replay_seconds / fwd_seconds:.0%} of the forward" if fwd_seconds else ""
        if self.host_bytes:
            away = f"offloads {format_bytes(self.host_bytes)}: keeps {kept:.0%} of the bytes"
            return away if not self.without else f"{away}, without {self.without}{again}"
        return f"without {self.without or 'a part'}: keeps {kept:.0%} of the bytes{again}"


class Skip(NamedTuple):
    """A tensor that a stage takes besides its activation, such as the skip connection of a U-Net.

    It is kept from the stage that makes it to the backward of the one that takes it, whatever the plan, and its
    gradient from there on to the maker's backward. Both are in the terms of the stages between.

    Attributes:
        maker, user: numbers of the stages, from 1 on; code between stages is a stage too.
        size_bytes: of the tensor, and of its gradient.
    """

    maker: int
    user: int
    size_bytes: int
