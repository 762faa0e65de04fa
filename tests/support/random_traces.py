"""Traces of programs that nobody would write."""

from __future__ import annotations

from hypothesis import strategies as st

from remat.runtime.dtr.trace import Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release, Trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Constants, calls with several results and views, mutations, copies and releases; repeated arguments."""
    instructions: list[Instruction] = [Constant("c0", draw(st.integers(0, 5))), Constant("c1", draw(st.integers(0, 5)))]
    alive = ["c0", "c1"]
    for number in range(draw(st.integers(1, 14))):
        what = draw(st.sampled_from(["call", "call", "call", "view", "mutate", "copy", "copy_from", "release"]))
        arguments = tuple(draw(st.lists(st.sampled_from(alive), min_size=1, max_size=3)))
        cost = draw(st.sampled_from([*range(1, 10), 10**5]))
        if what == "call":
            results = tuple(f"x{number}_{i}" for i in range(draw(st.integers(1, 3))))
            sizes = tuple(draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 700])) for _ in results)
            instructions.append(Call("f", arguments, results, cost, sizes, (-1,) * len(results)))
            alive += results
        elif what == "view":
            of = draw(st.integers(0, len(arguments) - 1))
            mixed = draw(st.booleans())
            results = (f"v{number}", f"w{number}") if mixed else (f"v{number}",)
            instructions.append(
                Call("view", arguments, results, cost, (3, 2)[: len(results)], (of, -1)[: len(results)])
            )
            alive += results
        elif what == "mutate":
            indices = tuple(sorted(draw(st.sets(st.integers(0, len(arguments) - 1), min_size=1))))
            if len({arguments[index] for index in indices}) == len(indices):
                instructions.append(Mutate("f_", arguments, cost, indices))
        elif what == "copy":
            instructions.append(Copy(f"y{number}", arguments[0]))
            alive.append(f"y{number}")
        elif what == "copy_from" and len(arguments) > 1:
            instructions.append(CopyFrom(arguments[1], arguments[0]))
        elif what == "release" and len(alive) > 1:
            instructions.append(Release(arguments[0]))
            alive.remove(arguments[0])
    return Trace(tuple(instructions))
