"""What a step holds besides its stages' own, charged to the moments at which it is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import remat
from remat.profiling.carried import with_besides
from remat.profiling.whole_steps import recomputing_each
from remat.schedule import F_ALL, B, Schedule, store_all_operations
from support.chains import measured_chains


@given(st.data())
def test_it_counts_from_the_backward_of_the_next_stage_until_its_own_is_over(data: st.DataObject) -> None:
    chain = data.draw(measured_chains(6, with_options=True))
    besides = data.draw(st.lists(st.integers(0, 9), min_size=chain.length, max_size=chain.length))
    found = with_besides(chain, besides)
    in_part = [
        operation._replace(option=len(chain.options[operation.stage - 1])) if operation.kind == F_ALL else operation
        for operation in store_all_operations(chain.length)
    ]
    for operations in (recomputing_each(chain).operations, store_all_operations(chain.length), tuple(in_part)):
        schedule = Schedule(operations)
        moments = zip(remat.simulate(chain, schedule).timeline, remat.simulate(found, schedule).timeline, strict=True)
        pending = chain.length
        for operation, (before, now) in zip(operations, moments, strict=True):
            more = besides[pending - 1]
            if operation.kind != B and (pending == chain.length or not chain.grad_bytes[pending]):
                more = 0  # before all backwards, or no gradient that it could be added to
            assert now.peak_bytes - before.peak_bytes == more
            pending -= operation.kind == B
