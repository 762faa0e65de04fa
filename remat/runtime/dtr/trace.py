"""`Trace`: what a program did to its tensors, in the log format of the DTR paper (Kirisame et al., Appendix C.6)."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from remat.chain import Chain
from remat.errors import InvalidTrace
from remat.files import write_whole


class Constant(NamedTuple):
    """A tensor that cannot be computed: a parameter or an input."""

    name: str
    size_bytes: int


class Call(NamedTuple):
    """An operator. `aliases[i]` is the index of the argument that result i is a view of, -1 for none; a view's size is
    not counted."""

    operator: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    nanoseconds: int
    sizes_bytes: tuple[int, ...]
    aliases: tuple[int, ...]


class Mutate(NamedTuple):
    """An operator in place; `mutated` are indices of its arguments."""

    operator: str
    arguments: tuple[str, ...]
    nanoseconds: int
    mutated: tuple[int, ...]


class Copy(NamedTuple):
    """A new name for a tensor: y = x."""

    target: str
    source: str


class CopyFrom(NamedTuple):
    """A known name for another tensor: y = x, where y named one before."""

    target: str
    source: str


class Release(NamedTuple):
    """A name that is gone."""

    name: str


class Annotate(NamedTuple):
    """A mark of the program: START, BACKWARD, and remat's own, which other tools for these logs pass over.

    "LOCK x" and "UNLOCK x": in between, x stays in memory. "SCRATCH n" and "OVERWRITE n": bytes that the operator that
    follows needs besides its outputs, and bytes of its outputs that take the place of inputs; "AGAIN n": nanoseconds
    that it takes when it runs again. "HELD": the program holds what operators make, so that recomputing it takes its
    bytes twice for a moment; "DROP x": it no longer holds x; "HOLD x": it does again. "FORGET x": nothing will ever ask
    for x again, not even a recomputation.
    """

    text: str


Instruction: TypeAlias = Constant | Call | Mutate | Copy | CopyFrom | Release | Annotate


# remat's own annotations: those of a tensor, which are instructions of the core too, and those of what comes next.
OF_TENSORS = ("LOCK", "UNLOCK", "DROP", "HOLD", "FORGET", "EVICT", "RETAIN")
_MARKS = frozenset((*OF_TENSORS, "HELD", "SCRATCH", "OVERWRITE", "AGAIN"))
REPLAY = "_replay"  # under which a trace keeps what the simulator made of it


@dataclass(frozen=True)
class Trace:
    """A sequence of instructions.

    Attributes:
        instructions: in the order in which the program gave them.
    """

    instructions: tuple[Instruction, ...]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files are of the instructions, not of what was made of them."""
        return {name: value for name, value in self.__dict__.items() if name != REPLAY}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads a log: a plain file, one that ends in `.gz`, or a member of a zip file, `logs.zip/unet.log`.

        Raises:
            InvalidTrace: a line is not an instruction; the message names its number and what was expected.
            FileNotFoundError: no such file or member.
        """
        with _opened(Path(path)) as lines:
            return cls(tuple(read_instructions(lines, str(path))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the log to `path`, compressed where that ends in `.gz`; whole or not at all."""
        text = "".join(line + "\n" for line in self.lines()).encode()
        write_whole(path, gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)

    @property
    def as_in_paper(self) -> Trace:
        """The same trace without remat's own marks, as the paper's simulator reads it: without the scratch memory of
        operators, and without what a running program still holds."""
        kept = (a for a in self.instructions if not (isinstance(a, Annotate) and a.text.partition(" ")[0] in _MARKS))
        return Trace(tuple(kept))

    def lines(self) -> Iterator[str]:
        """The log, line by line."""
        for instruction in self.instructions:
            for fields in _fields(instruction):
                yield json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_chain(cls, chain: Chain) -> Trace:
        """The trace of a step of a chain without recomputation, to compare DTR and planners on the same numbers.

        saved_l is one storage that holds a_l and all else that B_l needs, computed from saved_{l-1}. The gradients of
        activations are storages of their own; B_l is computed from grad_l, saved_l and saved_{l-1}. Overheads are left
        out: a trace has no scratch memory. The input and the first gradient are constants; a gradient stays in memory
        until its backward has run. Seconds become nanoseconds.
        """
        return cls(tuple(_instructions_of_chain(chain)))


def _instructions_of_chain(chain: Chain) -> Iterator[Instruction]:
    def nanoseconds(seconds: float) -> int:
        return round(seconds * 1e9)

    last = chain.length
    yield Annotate("START")
    yield Constant("a0", chain.act_bytes[0])
    yield Constant(f"grad{last}", chain.grad_bytes[last])
    before = "a0"
    for stage in range(1, last + 1):
        name = f"saved{stage}"
        time = nanoseconds(chain.fwd_seconds[stage - 1])
        yield Call(f"forward{stage}", (before,), (name,), time, (chain.saved_bytes[stage - 1],), (-1,))
        before = name
    yield Annotate("BACKWARD")
    for stage in range(last, 0, -1):
        saved = f"saved{stage}"
        earlier = f"saved{stage - 1}" if stage > 1 else "a0"
        gradient = f"grad{stage - 1}"
        time = nanoseconds(chain.bwd_seconds[stage - 1])
        arguments = (f"grad{stage}", saved, earlier)
        yield Call(f"backward{stage}", arguments, (gradient,), time, (chain.grad_bytes[stage - 1],), (-1,))
        yield Annotate(f"LOCK {gradient}")
        if stage < last:
            yield Annotate(f"UNLOCK grad{stage}")
        yield Release(f"grad{stage}")
        yield Release(saved)


def read_instructions(lines: Iterable[str], name: str = "trace") -> Iterator[Instruction]:
    """The instructions that the lines of a log spell; a line is looked at when its turn comes.

    Raises:
        InvalidTrace: as `Trace.load`.
    """
    reader = _Reader(iter(lines), name)
    while (fields := reader.next_fields()) is not None:
        yield reader.instruction(fields)


class _Reader:
    """Takes lines one by one and knows where it is."""

    def __init__(self, lines: Iterator[str], name: str) -> None:
        self.lines, self.name, self.number = lines, name, 0

    def next_fields(self) -> dict[str, Any] | None:
        """The fields of the next line that is not blank; None at the end."""
        for line in self.lines:
            self.number += 1
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise self.wrong(f"not a JSON object ({error})") from None
            if not isinstance(fields, dict) or not isinstance(fields.get("INSTRUCTION"), str):
                raise self.wrong('expected an object with an "INSTRUCTION"')
            return fields
        return None

    def wrong(self, what: str) -> InvalidTrace:
        return InvalidTrace(f"{self.name}, line {self.number}: {what}", line=self.number)

    def instruction(self, fields: dict[str, Any]) -> Instruction:
        kind = fields["INSTRUCTION"]
        if kind == "CALL":
            results = self.names(fields, "RESULT")
            arguments = self.names(fields, "ARGS")
            call = (self.text(fields, "NAME"), arguments, results, self.count(fields, "TIME"))
            following = [self.result(name, len(arguments)) for name in results]
            return Call(*call, tuple(size for size, _ in following), tuple(alias for _, alias in following))
        if kind == "CONSTANT":
            name = self.text(fields, "NAME")
            return Constant(name, self.memory(name))
        if kind == "MUTATE":
            arguments = self.names(fields, "ARGS")
            mutated = fields.get("MUTATE")
            if not isinstance(mutated, list) or not all(_is_index(index, len(arguments)) for index in mutated):
                raise self.wrong(
                    f'"MUTATE" must be a list of indices into the {len(arguments)} ARGS, found {mutated!r}'
                )
            return Mutate(self.text(fields, "NAME"), arguments, self.count(fields, "TIME"), tuple(map(int, mutated)))
        if kind in ("COPY", "COPY_FROM"):
            names = self.text(fields, "DST"), self.text(fields, "SRC")
            return Copy(*names) if kind == "COPY" else CopyFrom(*names)
        if kind == "RELEASE":
            return Release(self.text(fields, "NAME"))
        if kind == "ANNOTATE":
            return Annotate(self.text(fields, "ANNOTATION"))
        if kind in ("MEMORY", "ALIAS"):
            raise self.wrong(f"a {kind} without its CONSTANT or CALL")
        raise self.wrong(
            f"unknown instruction {kind!r}; expected ANNOTATE, CALL, CONSTANT, COPY, COPY_FROM, MUTATE or RELEASE"
        )

    def result(self, name: str, arguments: int) -> tuple[int, int]:
        """The MEMORY and ALIAS lines of a result: its size, and the argument that it is a view of or -1."""
        size = self.memory(name)
        fields = self.following("ALIAS", name)
        try:
            alias = int(fields.get("ALIAS"))  # type: ignore[arg-type]  # None is caught below
        except (TypeError, ValueError):
            alias = -2
        if not -1 <= alias < arguments:
            raise self.wrong(f'"ALIAS" must be -1 or an index into the {arguments} ARGS, found {fields.get("ALIAS")!r}')
        return size, alias

    def memory(self, name: str) -> int:
        return self.count(self.following("MEMORY", name), "MEMORY")

    def following(self, kind: str, name: str) -> dict[str, Any]:
        """The next line, which must be of this kind and about `name`."""
        fields = self.next_fields()
        if fields is None:
            raise self.wrong(f"the log ends where the {kind} of {name!r} was expected")
        if (fields["INSTRUCTION"], fields.get("NAME")) != (kind, name):
            raise self.wrong(
                f"expected the {kind} of {name!r}, found {fields['INSTRUCTION']} of {fields.get('NAME')!r}"
            )
        return fields

    def text(self, fields: dict[str, Any], key: str) -> str:
        if not isinstance(fields.get(key), str):
            raise self.wrong(f'"{key}" must be a string, found {fields.get(key)!r}')
        return fields[key]

    def names(self, fields: dict[str, Any], key: str) -> tuple[str, ...]:
        value = fields.get(key)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(f'"{key}" must be a list of names, found {value!r}')
        return tuple(value)

    def count(self, fields: dict[str, Any], key: str) -> int:
        """Bytes or nanoseconds: a whole number that is not negative, written as a string or a number."""
        try:
            number = int(fields.get(key))  # type: ignore[arg-type]  # None is caught below
        except (TypeError, ValueError):
            number = -1
        if number < 0:
            raise self.wrong(f'"{key}" must be an int of at least 0, found {fields.get(key)!r}')
        return number


def _is_index(value: Any, length: int) -> bool:
    return isinstance(value, (int, str)) and str(value).isdecimal() and int(value) < length


def _fields(instruction: Instruction) -> Iterator[dict[str, Any]]:
    """The lines of an instruction, with keys in alphabetical order as the paper's logs have them."""
    match instruction:
        case Constant(name, size):
            yield {"INSTRUCTION": "CONSTANT", "NAME": name}
            yield {"INSTRUCTION": "MEMORY", "MEMORY": str(size), "NAME": name}
        case Call(operator, arguments, results, nanoseconds, sizes, aliases):
            yield {
                "ARGS": list(arguments),
                "INSTRUCTION": "CALL",
                "NAME": operator,
                "RESULT": list(results),
                "TIME": str(nanoseconds),
            }
            for name, size, alias in zip(results, sizes, aliases, strict=True):
                yield {"INSTRUCTION": "MEMORY", "MEMORY": str(size), "NAME": name}
                yield {"ALIAS": str(alias), "INSTRUCTION": "ALIAS", "NAME": name}
        case Mutate(operator, arguments, nanoseconds, mutated):
            yield {
                "ARGS": list(arguments),
                "INSTRUCTION": "MUTATE",
                "MUTATE": list(mutated),
                "NAME": operator,
                "TIME": str(nanoseconds),
            }
        case Copy(target, source):
            yield {"DST": target, "INSTRUCTION": "COPY", "SRC": source}
        case CopyFrom(target, source):
            yield {"DST": target, "INSTRUCTION": "COPY_FROM", "SRC": source}
        case Release(name):
            yield {"INSTRUCTION": "RELEASE", "NAME": name}
        case Annotate(text):
            yield {"ANNOTATION": text, "INSTRUCTION": "ANNOTATE"}


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """The lines of a plain file, a `.gz` one, or a member of a zip file."""
    archive = next((parent for parent in (path, *path.parents) if parent.suffix == ".zip" and parent.is_file()), None)
    if archive is not None:
        with zipfile.ZipFile(archive) as opened:
            member = path.relative_to(archive).as_posix()
            names = opened.namelist()
            if member == "." and len(names) == 1:
                member = names[0]
            if member not in names:
                raise FileNotFoundError(f"{archive} contains {', '.join(names)}; use for example {archive}/{names[0]}")
            with opened.open(member) as raw, io.TextIOWrapper(raw, encoding="utf-8") as lines:
                yield lines
    elif path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield lines
    else:
        with path.open(encoding="utf-8") as lines:
            yield lines
