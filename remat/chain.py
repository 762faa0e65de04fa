"""`Chain`: what each stage of a model costs, in bytes and seconds (Beaumont et al., Section 3.1)."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import Any

from remat import files
from remat.errors import InvalidChain, InvalidFile
from remat.formatting import bar, card, count, format_bytes, format_seconds, table, text_table
from remat.layout import Layout, Option, Skip
from remat.simulation import store_all_peak
from remat.utils.moved import deprecated

# How each field is merged when several processes share one plan: the largest or the smallest value of any process, a
# value that must be the same in all, or a value that each process keeps for itself.
_LARGEST, _SMALLEST, _SAME, _OWN = ({"merged": rule} for rule in ("largest", "smallest", "same", "own"))


@dataclass(frozen=True)
class Chain:
    """The memory and time of the stages 1..L and of the loss, which is stage L+1.

    Attributes:
        act_bytes: L+2 sizes of the activations a_0 (the input) .. a_{L+1} (the loss).
        saved_bytes: L+1 sizes of the tensors that a stage saves for its backward, with its output, without its input.
        fwd_overhead_bytes: L+1 sizes of the scratch memory of a stage's forward beyond its input and what it leaves.
        bwd_overhead_bytes: the same for its backward, beyond saved_l, a_{l-1}, grad_l and grad_{l-1}; negative if the
            backward has freed some of these when it reaches its peak.
        fwd_seconds, bwd_seconds: L+1 durations.
        grad_bytes: L+2 sizes of the gradients of the activations, by default `act_bytes`; 0 where none flows.
        save_overhead_bytes: L+1 sizes of the scratch memory of F_all, by default `fwd_overhead_bytes`. It is often
            smaller, because F_all saves tensors that F_ck and F_none only hold temporarily.
        replay_seconds: L+1 durations of a recomputation by F_all right before the stage's backward: it ends with the
            last tensor that it saves. By default `fwd_seconds`.
        again_seconds: L+1 durations that a recomputation by F_all takes besides, to put back what the first run met and
            to fill what it has left empty. By default 0.
        options: L+1 tuples of the `Option`s of each stage, without number 0, which keeps everything. Options that
            offload come last. By default no stage has options.
        reserve_bytes: what the executor may hold on top of the activations: buffer snapshots and RNG states.
        unneeded_bytes: the part of `reserve_bytes` that a step without recomputation does not use.
        names: L+1 names of stages.
        draws_random: L+1 flags: the stage draws random numbers, so a recomputation restores their generator.
        changes_buffers: L+1 flags: the stage changes buffers of its own (BatchNorm), which happens only once.
        fixed: L+1 flags: the stage is code between the found stages. It is never recomputed; its only forward
            operation is F_all.
        skips: the tensors that stages take besides their activation. Their bytes are in the sizes above already.
        layout: how the stages lie on the model they were measured on; None for chains made by hand.

    Raises:
        InvalidChain: wrong lengths, negative or non-integer sizes, negative, infinite or NaN times.
    """

    act_bytes: tuple[int, ...] = field(metadata=_LARGEST)
    saved_bytes: tuple[int, ...] = field(metadata=_LARGEST)
    fwd_overhead_bytes: tuple[int, ...] = field(metadata=_LARGEST)
    bwd_overhead_bytes: tuple[int, ...] = field(metadata=_LARGEST)
    fwd_seconds: tuple[float, ...] = field(metadata=_LARGEST)
    bwd_seconds: tuple[float, ...] = field(metadata=_LARGEST)
    grad_bytes: tuple[int, ...] = field(default=(), kw_only=True, metadata=_LARGEST)
    save_overhead_bytes: tuple[int, ...] = field(default=(), kw_only=True, metadata=_LARGEST)
    replay_seconds: tuple[float, ...] = field(default=(), kw_only=True, metadata=_LARGEST)
    again_seconds: tuple[float, ...] = field(default=(), kw_only=True, metadata=_LARGEST)
    options: tuple[tuple[Option, ...], ...] = field(default=(), kw_only=True, metadata=_SAME)
    reserve_bytes: int = field(default=0, kw_only=True, metadata=_LARGEST)
    unneeded_bytes: int = field(default=0, kw_only=True, metadata=_SMALLEST)
    names: tuple[str, ...] = field(default=(), kw_only=True, metadata=_SAME)
    draws_random: tuple[bool, ...] = field(default=(), kw_only=True, metadata=_LARGEST)
    changes_buffers: tuple[bool, ...] = field(default=(), kw_only=True, metadata=_LARGEST)
    fixed: tuple[bool, ...] = field(default=(), kw_only=True, metadata=_SAME)
    skips: tuple[Skip, ...] = field(default=(), kw_only=True, metadata=_OWN)
    layout: Layout | None = field(default=None, kw_only=True, metadata=_OWN)

    VERSION = 7

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the way a frozen dataclass normalises its own fields
        set_field(self, "act_bytes", _sizes("act_bytes", self.act_bytes))
        stages = len(self.act_bytes) - 1
        if stages < 1:
            raise InvalidChain(
                f"act_bytes has {len(self.act_bytes)} entries; it needs at least two, for the input and the loss "
                "(L+2 for L stages)"
            )
        for name in ("saved_bytes", "fwd_overhead_bytes", "bwd_overhead_bytes"):
            sizes = _sizes(name, getattr(self, name), signed=name == "bwd_overhead_bytes")
            set_field(self, name, _of_length(name, sizes, stages, "L+1"))
        for name in ("fwd_seconds", "bwd_seconds"):
            set_field(self, name, _of_length(name, _times(name, getattr(self, name)), stages, "L+1"))
        replays = _times("replay_seconds", self.replay_seconds) or self.fwd_seconds
        set_field(self, "replay_seconds", _of_length("replay_seconds", replays, stages, "L+1"))
        besides = _times("again_seconds", self.again_seconds) or (0.0,) * stages
        set_field(self, "again_seconds", _of_length("again_seconds", besides, stages, "L+1"))
        for index, (replay, forward) in enumerate(zip(replays, self.fwd_seconds, strict=True)):
            if replay > forward:
                raise InvalidChain(
                    f"replay_seconds[{index}] is {replay}, above fwd_seconds[{index}], {forward}, which includes it"
                )
        grads = _sizes("grad_bytes", self.grad_bytes) or self.act_bytes
        set_field(self, "grad_bytes", _of_length("grad_bytes", grads, stages + 1, "L+2"))
        overheads = _sizes("save_overhead_bytes", self.save_overhead_bytes) or self.fwd_overhead_bytes
        set_field(self, "save_overhead_bytes", _of_length("save_overhead_bytes", overheads, stages, "L+1"))
        for name in ("reserve_bytes", "unneeded_bytes"):
            set_field(self, name, _sizes(name, [getattr(self, name)])[0])
        names = tuple(map(str, self.names)) or (*(f"stage {i}" for i in range(1, stages)), "loss")
        set_field(self, "names", _of_length("names", names, stages, "L+1"))
        for name in ("draws_random", "changes_buffers", "fixed"):
            flags = tuple(map(bool, getattr(self, name))) or (False,) * stages
            set_field(self, name, _of_length(name, flags, stages, "L+1"))
        set_field(self, "options", _of_length("options", _options(self.options) or ((),) * stages, stages, "L+1"))
        self._check_options()
        set_field(self, "skips", tuple(Skip(*each) for each in self.skips))
        self._check_skips()
        if self.layout is not None:
            for name in ("dropped", "offloaded"):
                named = getattr(self.layout, name)
                if named and [*map(len, named)] != [*map(len, self.options[:-1])]:
                    raise InvalidChain(f"layout.{name} does not have one entry for each of `options`")
            _of_length("layout.modules", self.layout.modules, stages - 1, "L")
            if self.layout.ends_early:
                _of_length("layout.ends_early", self.layout.ends_early, stages - 1, "L")

    def _check_options(self) -> None:
        stages = self.length
        for index, options in enumerate(self.options):
            if options and (index == stages - 1 or self.fixed[index]):
                raise InvalidChain(f"options[{index}] must be empty: this stage never runs again")
            away = [option.host_bytes > 0 for option in options]
            if any(away) and (index >= stages - 2 or self.fixed[index + 1]):
                raise InvalidChain(
                    f"options[{index}] offloads, but no later stage can hide the copy: the next one is the loss, or "
                    "fixed"
                )
            if away != sorted(away):
                raise InvalidChain(f"options[{index}]: options that offload must come last")

    def _check_skips(self) -> None:
        for skip in self.skips:
            if not 0 < skip.maker < skip.user <= self.length or skip.size_bytes < 0:
                raise InvalidChain(f"skips: {skip} does not lead from one of {self.length} stages to a later one")

    @property
    def length(self) -> int:
        """Number of stages, including the loss: L+1."""
        return len(self.saved_bytes)

    @property
    def without_options(self) -> Chain:
        """The same chain without partial recomputation, as in the paper: F_all keeps everything."""
        if not any(self.options):
            return self
        layout = None if self.layout is None else replace(self.layout, dropped=(), offloaded=(), variants=())
        return replace(self, options=(), layout=layout)

    @property
    def without_offload(self) -> Chain:
        """The same chain without offloading; its options have the same numbers."""
        counts = [sum(not option.host_bytes for option in options) for options in self.options]
        if counts == [*map(len, self.options)]:
            return self

        def those(each: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
            return tuple(options[:count] for options, count in zip(each, counts, strict=False))

        layout = self.layout
        if layout is not None:
            layout = replace(layout, dropped=those(layout.dropped), offloaded=())
        return replace(self, options=those(self.options), layout=layout)

    @property
    def store_all_seconds(self) -> float:
        """Seconds of a step without recomputation: each forward and each backward once."""
        return math.fsum(self.fwd_seconds) + math.fsum(self.bwd_seconds)

    @property
    def store_all_bytes(self) -> int:
        """Peak without recomputation; budgets in fractions refer to it."""
        return store_all_peak(self)

    def minimum_budget(self, solver: str = "persistent") -> int:
        """Deprecated: `remat.minimum_budget(chain, solver)`."""
        return deprecated("Chain.minimum_budget", "minimum_budget")(self, solver)

    def plot(self, budget: int | str | float = 0.5, **options: Any) -> Any:
        """Deprecated: `remat.plot_chain(chain, budget)`."""
        return deprecated("Chain.plot", "plot_chain")(self, budget, **options)

    def __str__(self) -> str:
        columns = ("stage", "forward", "backward", "output", "saved", "scratch", "in backward", "")
        rows = [
            (
                name,
                format_seconds(self.fwd_seconds[index]),
                format_seconds(self.bwd_seconds[index]),
                format_bytes(self.act_bytes[index + 1]),
                format_bytes(self.saved_bytes[index]),
                format_bytes(self.fwd_overhead_bytes[index]),
                format_bytes(self.bwd_overhead_bytes[index]),
                ", ".join(self._marks(index)),
            )
            for index, name in enumerate(self.names)
        ]
        lines = [f"{self._title}: plain PyTorch needs {self._plain}", *text_table(columns, rows)]
        lines += [
            f"skips {self.names[skip.maker - 1]} -> {self.names[skip.user - 1]}: {format_bytes(skip.size_bytes)}"
            for skip in self.skips
        ]
        if min(self.bwd_overhead_bytes) < 0:
            lines.append("(below 0: at its peak, the backward has freed some saved tensors)")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def _title(self) -> str:
        return f"Chain of {count(self.length - 1, 'stage')} and the loss"

    @property
    def _plain(self) -> str:
        return f"{format_bytes(self.store_all_bytes)} and {format_seconds(self.store_all_seconds)} a step"

    def _marks(self, index: int) -> list[str]:
        """What is special about a stage."""
        marks = {
            "random": self.draws_random[index],
            "buffers": self.changes_buffers[index],
            "no gradient": self.grad_bytes[index + 1] == 0 and index < self.length - 1,
            "kept": self.fixed[index],
        }
        ways = [count(len(self.options[index]), "part")] if self.options[index] else []
        return [*(name for name, there in marks.items() if there), *ways]

    def _repr_html_(self) -> str:
        most = max(self.saved_bytes, default=0) or 1
        rows = [
            (
                escape(name),
                format_seconds(self.fwd_seconds[index]),
                format_seconds(self.bwd_seconds[index]),
                format_bytes(self.act_bytes[index + 1]),
                format_bytes(self.saved_bytes[index]),
                bar(self.saved_bytes[index] / most),
                ", ".join(self._marks(index)),
            )
            for index, name in enumerate(self.names)
        ]
        facts = [
            ("plain PyTorch needs", self._plain),
        ]
        units: dict[tuple[Option, ...], list[int]] = {}
        for index, options in enumerate(self.options):
            if options:
                units.setdefault(options, []).append(index)
        parts = "".join(
            f"<details><summary>Parts of {escape(_listed([self.names[index] for index in members]))} that can be kept"
            "</summary>"
            + "<br>".join(
                escape(option.described(self.saved_bytes[members[0]], self.fwd_seconds[members[0]]))
                for option in options
            )
            + "</details>"
            for options, members in units.items()
        )
        if self.skips:
            between = [f"{self.names[maker - 1]} to {self.names[user - 1]}" for maker, user, _ in self.skips]
            facts.append(
                ("taken besides", f"{', '.join(between)}: {format_bytes(sum(e.size_bytes for e in self.skips))}")
            )
        columns = ("stage", "forward", "backward", "output", "saved", "", "")
        return card(self._title, facts, table(columns, rows) + parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the chain to `path` as JSON."""
        files.write(path, "Chain", self.VERSION, self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        """What `save` writes."""
        content: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layout"}
        content["options"] = [[asdict(option) for option in options] for options in self.options]
        content["layout"] = None if self.layout is None else self.layout.to_fields()
        return content

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Chain:
        """Reads a chain that `save` wrote.

        Raises:
            InvalidFile: another kind of file, another version, or missing fields.
            InvalidChain: numbers that describe no chain.
        """
        # Version 2 has no `replay_seconds`, none before 4 has `options`, in 4 nothing goes to the host, none before 6
        # has `skips`, and only 7 has `again_seconds`.
        content = files.read(path, "Chain", cls.VERSION, oldest=2)
        try:
            return cls.from_fields(content)
        except (KeyError, TypeError) as error:
            raise InvalidFile(f"{path}: not the fields of a Chain ({error})") from error

    @classmethod
    def from_fields(cls, content: dict[str, Any]) -> Chain:
        """The chain with these fields, as `to_fields` returns them.

        Raises:
            KeyError, TypeError, InvalidChain: they are not those of a chain.
        """
        options = tuple(tuple(Option(**option) for option in each) for each in content.get("options", ()))
        return cls(**{**content, "layout": Layout.from_fields(content["layout"]), "options": options})


def _listed(names: list[str]) -> str:
    """Names of stages that are alike: the first and the last, and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} stages)"


def _sizes(name: str, values: Iterable[Any], *, signed: bool = False) -> tuple[int, ...]:
    sizes = []
    for index, value in enumerate(values):
        try:
            if isinstance(value, bool):
                raise TypeError
            size = operator.index(value)
        except TypeError:
            raise InvalidChain(
                f"{name}[{index}] is {value!r}; a size is an int in bytes (round up if needed)"
            ) from None
        if size < 0 and not signed:
            raise InvalidChain(f"{name}[{index}] is {size}; a size cannot be negative")
        sizes.append(size)
    return tuple(sizes)


def _options(stages: Iterable[Iterable[Option]]) -> tuple[tuple[Option, ...], ...]:
    found = []
    for index, options in enumerate(stages):
        checked = []
        for number, option in enumerate(options, start=1):
            if not isinstance(option, Option):
                raise InvalidChain(f"options[{index}] contains {option!r}; it must be a tuple of remat.Option")
            name = f"options[{index}][{number - 1}]."
            kept, save, host = _sizes(name, (option.saved_bytes, option.save_overhead_bytes, option.host_bytes))
            (extra,) = _sizes(name, (option.bwd_overhead_bytes,), signed=True)
            seconds, link = _times(name, (option.replay_seconds, option.link_seconds))
            checked.append(Option(kept, save, extra, seconds, option.without, host, link, option.variant))
        found.append(tuple(checked))
    return tuple(found)


def _times(name: str, values: Iterable[Any]) -> tuple[float, ...]:
    times = []
    for index, value in enumerate(values):
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            raise InvalidChain(f"{name}[{index}] is {value!r}; a time is a number of seconds") from None
        if not math.isfinite(seconds) or seconds < 0:
            raise InvalidChain(f"{name}[{index}] is {seconds}; a time is finite and not negative")
        times.append(seconds)
    return tuple(times)


def _of_length(name: str, values: tuple[Any, ...], expected: int, formula: str) -> tuple[Any, ...]:
    if len(values) != expected:
        raise InvalidChain(f"{name} has {len(values)} entries, expected {expected} ({formula}, when act_bytes has L+2)")
    return values
