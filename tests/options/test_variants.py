"""Compiled blocks: variants of them that save less are options, and a plan runs the ones that it chose."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import remat
from remat.comparison.bench import Bench
from remat.errors import PlanMismatch
from remat.layout import Layout
from remat.options.variants import MOST
from remat.runtime.drawing_once import DrawingOnce
from remat.runtime.patching import is_compiled
from remat.runtime.variants import compiled_for, draws_once, has_variants, offer_variants
from remat.simulation import store_all_peak
from support.compiled_models import BACKEND, Model, compiled, in_a_row, left_by, loss

SAMPLE = torch.randn(256, 16)


@pytest.fixture(autouse=True)
def _no_code_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def where_variants_pay(chain: remat.Chain) -> remat.Chain:
    """With times that do not depend on the machine: what a variant makes again takes a part of the forward."""
    options = [
        tuple(replace(option, replay_seconds=0.2 * number) for number, option in enumerate(options, start=1))
        for options in chain.options
    ]
    each = [1.0] * len(chain.fwd_seconds)
    return replace(chain, options=tuple(options), fwd_seconds=each, replay_seconds=each, bwd_seconds=each)


@pytest.mark.parametrize("make", [Model, in_a_row])
def test_plans_choose_among_variants(make: Any) -> None:
    """Bits are those of the compiled blocks, peaks within the limit, and little runs twice."""
    torch.manual_seed(0)
    model = compiled(make())
    plain = left_by(model, SAMPLE)
    chain = where_variants_pay(remat.profile(model, SAMPLE, loss=loss))
    options = next(filter(None, chain.options))
    assert options and all(option.variant is not None for option in options)
    saved = [option.saved_bytes for option in options]
    assert saved == sorted(saved, reverse=True) and saved[-1] < 0.5 * max(chain.saved_bytes)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    chosen, ran_twice = 0, False
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        limit = int(least + share * (most - least))
        schedule = remat.solve(chain, limit)
        with Bench(model, SAMPLE, loss) as bench:
            assert bench.peak_bytes(bench.step(schedule)) <= limit
        applied = remat.apply(model, schedule)
        found = left_by(applied, SAMPLE)
        if applied is model:  # an nn.Sequential is left as it is
            remat.remove(model)
        assert all(map(torch.equal, found, plain)) and len(found) == len(plain)
        chosen += schedule.parts
        ran_twice |= schedule.recomputations > 0
    assert chosen >= 6 and ran_twice
    assert all(map(torch.equal, left_by(model, SAMPLE), plain))


def test_a_stage_that_runs_again_does_so_as_its_variant() -> None:
    """Autograd waits for what the variant of the first run saves."""
    model = compiled(Model())
    plain = left_by(model, SAMPLE)
    chain = remat.profile(model, SAMPLE, loss=loss)
    last, variant = chain.length, len(chain.options[1])
    forward = [f"F_all{stage}" for stage in range(1, last + 1)]
    forward[1] = "F_ck2"
    backward = [f"B{stage}" for stage in range(last, 0, -1)]
    backward.insert(backward.index("B2"), f"F_all2/{variant}")
    operations = remat.Schedule.parse(" ".join([*forward, *backward])).operations
    schedule = remat.Schedule(operations, layout=chain.layout)
    left = left_by(remat.apply(model, schedule), SAMPLE)
    assert all(map(torch.equal, left, plain))


@pytest.mark.slow
def test_of_blocks_with_dropout_pytorchs_own_compiler_makes_variants() -> None:
    """Which drop out what the compiled blocks do."""
    torch.manual_seed(0)
    model = compiled(Model(1, dropout=0.3), "inductor")
    plain = left_by(model, SAMPLE)
    chain = remat.profile(model, SAMPLE, loss=loss)
    assert [option.variant for options in chain.options for option in options][-1] == 0
    ways = [f"/{len(options)}" if options else "" for options in chain.options]
    forward = [f"F_all{stage}{way}" for stage, way in enumerate(ways, start=1)]
    backward = [f"B{stage}" for stage in range(chain.length, 0, -1)]
    schedule = replace(remat.Schedule.parse(" ".join([*forward, *backward])), layout=chain.layout)
    assert all(map(torch.equal, left_by(remat.apply(model, schedule), SAMPLE), plain))


def test_what_takes_the_place_of_our_pass_leaves_blocks_with_dropout_without_variants() -> None:
    ways: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        ({"options": {"joint_custom_post_pass": None}}, False),
        ({"backend": BACKEND}, False),
    ]
    for how, expected in ways:
        model = Model(1)
        model.blocks[0].compile(**how)
        offer_variants(model)
        assert draws_once(model.blocks[0]) is expected


def _drawing() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    rows = graph.call_function(torch.ops.aten.rand.default, ([4],))
    again = graph.call_function(torch.ops.aten.rand.default, ([4],))
    again.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (rows, again)))
    return graph


def test_what_draws_is_marked_as_to_be_saved() -> None:
    """But for what the block checkpoints itself; what the user has set runs first."""
    ran: list[str] = []
    for before in (None, lambda _: ran.append("alone"), [lambda _: ran.append("of two"), DrawingOnce(None)]):
        graph = _drawing()
        DrawingOnce(before)(graph)
        marks = [node.meta.get("recompute") for node in graph.nodes]
        assert marks == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, None, None]
    assert ran == ["alone", "of two"]
    assert DrawingOnce(None).uuid() and DrawingOnce(DrawingOnce(None)).uuid() != DrawingOnce(None).uuid()
    assert DrawingOnce(print).uuid() is None


def test_whatever_draws_is_marked() -> None:
    import torch._inductor.inductor_prims as made_by_the_compiler

    aten, graph = torch.ops.aten, torch.fx.Graph()
    drawing = [
        *(
            aten.rand_like.default,
            aten.randn.default,
            aten.native_dropout.default,
            aten.bernoulli.p,
            aten.randint.default,
        ),
        *(aten.bernoulli.p, aten.exponential.default, aten.multinomial.default, aten.normal_functional.default),
        *(aten.randperm.default, aten.rrelu_with_noise.default, aten._scaled_dot_product_flash_attention.default),
        *(made_by_the_compiler.seed, made_by_the_compiler.seeds),
    ]
    others = [aten.mm.default, aten.gelu.default, made_by_the_compiler.lookup_seed, made_by_the_compiler.random]
    for target in (*drawing, *others):
        graph.call_function(target)
    DrawingOnce(None)(graph)
    marked = [node.target for node in graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    assert marked == drawing


def test_variants_that_would_drop_out_other_numbers_are_none() -> None:
    """At low budgets another backend makes dropout anew in the backward, from numbers that come next."""
    torch.manual_seed(0)
    model: Any = compiled(Model(dropout=0.3))
    plain = left_by(model, SAMPLE)
    offer_variants(model)
    with compiled_for(0.0):
        wrong = left_by(model, SAMPLE)
    assert not all(map(torch.equal, wrong, plain))
    chain = remat.profile(model, SAMPLE, loss=loss)
    assert not any(chain.options)
    least, most = remat.minimum_budget(chain), store_all_peak(chain)
    for share in (0.0, 0.3, 0.6, 0.9):
        remat.fit(model, SAMPLE, int(least + share * (most - least)), loss, quiet=True)
        assert all(map(torch.equal, left_by(model, SAMPLE), plain))
        remat.remove(model)


def test_blocks_that_torch_compile_returned() -> None:
    """As torchtitan has them."""
    torch.manual_seed(0)
    model = Model()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=BACKEND)  # type: ignore[call-overload]
    plain = left_by(model, SAMPLE)
    chain = remat.profile(model, SAMPLE, loss=loss)
    assert any(chain.options)
    remat.fit(model, SAMPLE, 0.6, loss, quiet=True)
    assert all(map(torch.equal, left_by(model, SAMPLE), plain))
    remat.remove(model)
    assert all(map(torch.equal, left_by(copy.deepcopy(model), SAMPLE), plain))


def test_blocks_alike_share_what_is_compiled() -> None:
    """As many graphs as one block has variants, and the one that it was compiled for, with gradients and without."""
    from torch._dynamo.backends.registry import lookup_backend

    counts = []
    for depth in (2, 6):
        graphs = []

        def counting(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return lookup_backend(BACKEND)(graph, inputs)

        assert any(remat.profile(compiled(Model(depth), counting), SAMPLE, loss=loss).options)
        counts.append(len(graphs))
    assert counts[0] == counts[1] and 2 <= counts[0] <= MOST + 2


def test_a_backend_without_budgets_has_no_variants() -> None:
    chain = remat.profile(compiled(Model(), "eager"), SAMPLE, loss=loss)
    assert not any(chain.options)


def test_without_a_choice_a_block_runs_as_it_was_compiled() -> None:
    model: Any = compiled(Model(1))
    expected = left_by(model, SAMPLE)
    offer_variants(model)
    block = model.blocks[0]
    assert has_variants(block) and is_compiled(block)
    assert all(map(torch.equal, left_by(model, SAMPLE), expected))
    with compiled_for(0.0):
        assert all(map(torch.equal, left_by(model, SAMPLE), expected))
    assert not is_compiled(copy.deepcopy(model).blocks[0])
    offer_variants(model)
    assert not has_variants(block.norm)


def test_files_hold_them(tmp_path: Path) -> None:
    model = compiled(Model())
    chain = remat.profile(model, SAMPLE, loss=loss)
    chain.save(tmp_path / "chain.json")
    again = remat.Chain.load(tmp_path / "chain.json")
    assert again == chain and isinstance(again.layout, Layout) and any(again.layout.variants)
    schedule = remat.solve(where_variants_pay(again), int(0.6 * store_all_peak(again)))
    assert schedule.parts
    schedule.save(tmp_path / "schedule.json")
    left = left_by(remat.apply(model, remat.Schedule.load(tmp_path / "schedule.json")), SAMPLE)
    assert all(map(torch.equal, left, left_by(model, SAMPLE)))


def test_a_plan_with_variants_needs_compiled_blocks() -> None:
    chain = remat.profile(compiled(Model()), SAMPLE, loss=loss)
    ways = [f"/{len(options)}" if options else "" for options in chain.options]  # by whatever times were measured
    assert any(ways)
    forward = [f"F_all{stage}{way}" for stage, way in enumerate(ways, start=1)]
    backward = [f"B{stage}" for stage in range(chain.length, 0, -1)]
    schedule = replace(remat.Schedule.parse(" ".join([*forward, *backward])), layout=chain.layout)
    with pytest.raises(PlanMismatch, match="not compiled"):
        remat.apply(Model(), schedule)


def test_what_is_said_of_them() -> None:
    chain = remat.profile(compiled(Model()), SAMPLE, loss=loss)
    assert "compiled for a budget of 0: keeps" in chain._repr_html_()


def test_variants_in_bfloat16_are_used() -> None:
    """Where what is made again may be rounded or not."""
    model = compiled(Model().bfloat16())
    chain = remat.profile(model, SAMPLE.bfloat16(), loss=loss)
    assert any(chain.options)
