"""Makes a bad program smaller: without blocks, fragments and events, as long as the same outcome remains."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from benchmarks.module_programs.judging import guarded, plain
from benchmarks.module_programs.program import Loop, Program, Stack, program_of

NOTHING = "nothing"


def _blocks(program: Program) -> Any:
    return program.model.blocks if isinstance(program.model, Stack) else program.model


def _smaller(program: Program) -> Iterator[Program]:
    loop = program.loop
    simple = Loop([0, 1, 2, 3, 3], 1, "once", {})
    for other in (simple, replace(loop, events={}), replace(loop, calls="once")):
        if other != loop:
            yield replace(program, loop=other)
    for index in range(len(_blocks(program))):
        if len(_blocks(program)) > 1:
            made = _copied(program)
            left = [block for number, block in enumerate(_blocks(made)) if number != index]
            if isinstance(made.model, Stack):
                made.model.blocks = nn.ModuleList(left)
            else:
                made.model = nn.Sequential(*left)
            yield made
    for index, block in enumerate(_blocks(program)):
        for part, name in enumerate(block.parts):
            if name != NOTHING:
                made = _copied(program)
                _blocks(made)[index].parts = [*block.parts[:part], NOTHING, *block.parts[part + 1 :]]
                yield made
    if isinstance(program.model, Stack):
        for key, value in {"masked": False, "outputs": 1, "autocast": -1}.items():
            if getattr(program.model, key) != value:
                made = _copied(program)
                setattr(made.model, key, value)
                yield made


def _copied(program: Program) -> Program:
    return replace(program, model=copy.deepcopy(program.model))


_FORK = multiprocessing.get_context("fork")


def _send(pipe: Connection, program: Program, way: str, share: float) -> None:
    torch.set_num_threads(1)
    expected, batch, why = plain(program)
    if expected is None:
        pipe.send(("skipped", why))
        return
    limit = int(share * (expected.peak + (batch if way == "plan" else 0)))
    found = guarded(program, way, limit, expected)
    pipe.send((found["outcome"], found["seen"]))


def reduced(seed: int, way: str, share: float, told: Callable[[str], None] = print) -> Program:
    program, outcome = program_of(seed), ""

    def outcome_of(candidate: Program) -> tuple[str, str]:
        """In a process of its own, since blocks learn."""
        mine, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_send, args=(theirs, candidate, way, share))
        process.start()
        theirs.close()
        try:
            found: tuple[str, str] = mine.recv()
        except EOFError:
            found = "raw", "crash"
        process.join()
        return found

    outcome, seen = outcome_of(program)
    told(f"{outcome}: {seen}")
    going = True
    while going:
        going = False
        for candidate in _smaller(program):
            found, text = outcome_of(candidate)
            if found == outcome:
                program, going = candidate, True
                told(f"{text[:160]} | {program}")
                break
    return program
