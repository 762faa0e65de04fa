"""What an operator depends on besides its arguments, and memory that is reached without one: equal to plain PyTorch."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import remat
from remat.runtime.surroundings import BACKENDS, PLAIN, surroundings_of
from support.live_programs import evicting

pytestmark = pytest.mark.usefixtures("operator_by_operator")

ALWAYS: Callable[[], bool] = lambda: True  # noqa: E731


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@contextmanager
def switched(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Any:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype: torch.dtype) -> Any:
    return switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


def threads(count: int) -> Any:
    return switched(torch.get_num_threads, torch.set_num_threads, count)


@contextmanager
def filled_with_nan() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


QUERY = torch.randn(2, 2, 64, 16, generator=torch.Generator().manual_seed(1))
INTEGERS = torch.arange(1, 41)
MATRIX = torch.randn(300, 300, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("surroundings", "compute"),
    [
        (lambda: default_dtype(torch.float64), lambda: INTEGERS / 3),
        (lambda: default_dtype(torch.float64), lambda: torch.full((5,), 0.1) * 3),
        (lambda: default_dtype(torch.float64), lambda: torch.bernoulli(torch.full((40,), 0.5)).mean()),
        (lambda: sdpa_kernel(SDPBackend.MATH), lambda: functional.scaled_dot_product_attention(QUERY, QUERY, QUERY)),
        (lambda: torch.backends.mkldnn.flags(enabled=False), lambda: MATRIX @ MATRIX),
        (lambda: threads(2), lambda: torch.sum(MATRIX * 1.1)),
        (filled_with_nan, lambda: torch.empty(64) * 2),
        (torch.no_grad, lambda: MATRIX.requires_grad_(False) * 2),
    ],
    ids=["division", "full", "random", "attention", "mkldnn", "threads", "empty", "no_grad"],
)
def test_flags_are_set_again_for_a_recomputation(surroundings: Any, compute: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    with surroundings():
        expected = compute()
    flags = [read() for read in BACKENDS]
    torch.manual_seed(0)
    with evicting(ALWAYS) as dtr:
        with surroundings():
            found = compute()
        found + 1  # something evicts what was found
    assert dtr.report().recomputations > 0
    assert found.dtype == expected.dtype
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert [read() for read in BACKENDS] == flags


def test_flags_are_told_apart_and_put_back() -> None:
    usual = surroundings_of(tuple(read() for read in BACKENDS))
    assert surroundings_of(tuple(read() for read in BACKENDS)) is usual
    with default_dtype(torch.float64):
        other = surroundings_of(tuple(read() for read in PLAIN))
    changed = other.establish()
    assert torch.get_default_dtype() == torch.float64
    for flag, value in changed:
        flag.write(value)
    assert torch.get_default_dtype() == torch.float32
    assert not surroundings_of(tuple(read() for read in PLAIN)).establish()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_kernels_that_keep_more_where_gradients_are_on(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(16, 16, 2, batch_first=True), torch.randn(4, 12, 16)
    plain = copy.deepcopy(model)
    (expected, _) = plain(x)
    expected.square().sum().backward()
    with evicting(ALWAYS):
        with torch.no_grad():
            model(x)
        (found, _) = model(x)
        found.square().sum().backward()
    assert same(found, expected)
    assert all(same(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_an_lstm_within_half_of_its_memory() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(64, 64, 3, batch_first=True), torch.randn(16, 32, 64)
    plain = copy.deepcopy(model)
    plain(x)[0].sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with remat.DTR("1GiB") as dtr:
        model(x)[0].sum().backward()
    whole = dtr.report().peak_bytes
    model.zero_grad(set_to_none=False)
    with remat.DTR(int(0.8 * whole)) as dtr:
        model(x)[0].sum().backward()
    assert dtr.report().outcome == "pass"
    assert dtr.report().recomputations
    assert all(same(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_lazy_bits_of_views_that_were_made_before_the_block() -> None:
    whole = torch.randn(40, dtype=torch.complex64)
    negative, conjugate = whole.conj().imag, whole.conj()
    assert negative.is_neg()
    expected = negative * 2, conjugate * 2, (whole.imag + negative), negative.clone()
    with evicting(ALWAYS):
        plain_first = whole.imag * 2
        found = negative * 2, conjugate * 2, (whole.imag + negative), negative.clone()
    assert all(map(same, found, expected))
    assert same(plain_first, whole.imag * 2)


@torch.library.custom_op("remat_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


@torch.library.custom_op("remat_tests::noisy_by_numpy", mutates_args=())
def noisy_by_numpy(x: Tensor) -> Tensor:
    return x + np.random.rand() + random.random()  # noqa: NPY002  # programs use it


@pytest.mark.parametrize("operator", [noisy, noisy_by_numpy])
def test_custom_operators_that_draw_random_numbers_without_saying_so(operator: Callable[[Tensor], Tensor]) -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        first = operator(torch.zeros(50))
        after = torch.tensor([random.random(), np.random.rand()])  # noqa: NPY002
        return [first, torch.rand(3), operator(first), after]

    expected = drawn()
    with evicting(ALWAYS) as dtr:
        found = drawn()
    assert all(map(same, found, expected))
    assert dtr.report().recomputations


def test_true_is_not_one() -> None:
    flags = torch.tensor([True, False] * 20)

    def program() -> list[Tensor]:
        return [torch.add(flags, 1), torch.add(flags, True), torch.mul(flags, True), torch.mul(flags, 1)] * 2

    with evicting(ALWAYS):
        for _ in range(4):  # known calls take another way
            found = program()
    assert all(map(same, found, program()))
    with remat.DTR("1MiB"):
        for _ in range(4):
            found = program()
    assert all(map(same, found, program()))


# Memory without an operator ------------------------------------------------------------------------------------------


def _apply(y: Tensor) -> Any:
    y.apply_(lambda value: 3 * value)
    return y


def _map(y: Tensor) -> Any:
    y.map_(torch.arange(40.0), lambda a, b: a * b)
    return y


def _numpy_in_place(y: Tensor) -> Any:
    y.numpy()[:] += 1
    return y


READERS: dict[str, Callable[[Tensor], Any]] = {
    "apply_": _apply,
    "map_": _map,
    "numpy": lambda y: torch.from_numpy(y.numpy()),
    "numpy in place": _numpy_in_place,
    "tolist": lambda y: torch.tensor(y.tolist()),
    "torch.tensor of elements": lambda y: torch.tensor([y[0], y[1]]),
    "torch.tensor of a tensor": lambda y: torch.tensor([[y[2], 1.0], [2.0, y[3]]]),
    "as_tensor": lambda y: torch.as_tensor([y[0], y[5]]),
    "new_tensor": lambda y: y.new_tensor([y[0], y[5]]),
    "dlpack": lambda y: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y)),
    "from_dlpack": torch.from_dlpack,
    "deepcopy": copy.deepcopy,
    "storage": lambda y: torch.tensor(list(y.untyped_storage())[:4]),
    "text": lambda y: torch.tensor(len(str(y))),
}


@pytest.mark.parametrize("name", sorted(READERS))
@pytest.mark.filterwarnings("ignore")
def test_memory_that_is_reached_without_an_operator(name: str) -> None:
    read = READERS[name]
    x = torch.arange(40.0)

    def program() -> tuple[Tensor, ...]:
        y = x + 1
        before = y * 2  # computed from what may change
        made = read(y)
        after = y * 3
        return y, before, made, after, made + 1

    expected = program()
    with evicting(ALWAYS) as dtr:
        found = program()
        for value in range(4):
            torch.full((64,), float(value))
        assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, found, expected))
    assert dtr.report().recomputations


def test_a_gradient_through_what_was_changed_without_an_operator() -> None:
    x = torch.arange(1.0, 41.0, requires_grad=True)

    def program() -> Tensor:
        y = x.detach() + 1
        z = (y * x).sum()  # saves y
        y.apply_(lambda value: value)  # no version is counted, and nothing changes
        return torch.autograd.grad(z, x)[0]

    expected = program()
    with evicting(ALWAYS):
        found = program()
    assert same(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_sparse_tensors_and_their_parts(layout: str) -> None:
    dense = torch.relu(torch.randn(12, 12, generator=torch.Generator().manual_seed(3)))

    def program() -> list[Tensor]:
        y = dense * 2
        if layout == "coo":
            made = y.to_sparse().coalesce()
            parts = [made.indices() + 0, made.values() * 3]
            again = torch.sparse_coo_tensor(parts[0], parts[1], (12, 12))
        elif layout == "csr":
            made = y.to_sparse_csr()
            parts = [made.crow_indices() + 0, made.col_indices() + 0, made.values() * 3]
            again = torch.sparse_csr_tensor(*parts, size=(12, 12))
        else:
            made = y.to_sparse_csc()
            parts = [made.ccol_indices() + 0, made.row_indices() + 0, made.values() * 3]
            again = torch.sparse_csc_tensor(*parts, size=(12, 12))
        return [made, again, made @ dense, again @ dense, *parts, made.to_dense()]

    expected = program()
    with evicting(ALWAYS):
        found = program()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.to_dense(), theirs.to_dense())  # and can be read at all


def test_mapped_files_stay(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(400))
    with evicting(ALWAYS):
        mapped = torch.from_file(str(file), shared=True, size=100)
        found = mapped + 1
        mapped.add_(2)
    assert torch.equal(found, torch.ones(100))
    assert torch.equal(mapped, torch.full((100,), 2.0))


def test_forward_mode_gradients() -> None:
    from torch.autograd import forward_ad

    x = torch.arange(10.0)

    def program() -> Tensor:
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, torch.ones(10) * 2)
            return forward_ad.unpack_dual((y * y).sin() * y).tangent + 0

    expected = program()
    with evicting(ALWAYS):
        found = program()
    assert same(found, expected)


def test_nested_tensors_of_strided_layout() -> None:
    """Are not evicted."""
    rows = [torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)]

    def run() -> list[torch.Tensor]:
        nested = torch.nested.as_nested_tensor(rows) * 2
        found = torch.autograd.grad(nested.to_padded_tensor(0.0).square().sum(), rows)
        return [*found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = run()
        with remat.DTR("1MiB"):
            found = run()
    assert all(map(torch.equal, plain, found))
    assert _len_torch_dispatch_stack() == 0


# Other threads -------------------------------------------------------------------------------------------------------


def _in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def _in_a_pool(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


_POOL = ThreadPoolExecutor(1)


def _in_a_pool_of_before(work: Callable[[], Any]) -> Any:
    return _POOL.submit(work).result()


@pytest.mark.parametrize("elsewhere", [_in_a_thread, _in_a_pool, _in_a_pool_of_before])
def test_another_thread_reads_and_writes_what_was_evicted(elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    _POOL.submit(int).result()
    x = torch.arange(64.0)

    def program() -> list[Tensor]:
        y, z = x + 1, x * 3
        before = z * 2

        def work() -> list[Tensor]:
            z.add_(1)
            return [y + 1, torch.cat([y, z]), torch.softmax(y, 0), y.sort()[0], torch.from_numpy(y.numpy()) * 2]

        found = elsewhere(work)
        return [*found, before, y * 2, z * 2]

    expected = program()
    with evicting(ALWAYS):
        found = program()
    assert all(map(same, found, expected))


def test_blocks_of_two_threads_share_a_tensor() -> None:
    x = torch.arange(64.0)
    with evicting(ALWAYS):
        y = x + 1

        def work() -> Tensor:
            with remat.DTR("1MiB"):
                return (y * 2).sum()

        found = _in_a_thread(work)
        again = y * 3
    assert same(found, ((x + 1) * 2).sum())
    assert same(again, (x + 1) * 3)


# Compiled code -------------------------------------------------------------------------------------------------------


def _model() -> tuple[nn.Module, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    return model, x, [parameter.grad for parameter in plain.parameters()]


@pytest.mark.parametrize("when", ["before", "inside", "in place"])
def test_compiled_code_runs_as_it_is_written(when: str) -> None:
    model, x, expected = _model()
    compiled: Any = model
    if when == "before":
        compiled = torch.compile(model, backend="eager")
        compiled(x).sum().backward()
        model.zero_grad()
    elif when == "in place":
        model.compile(backend="eager")
    with evicting(ALWAYS) as dtr:
        if when == "inside":
            compiled = torch.compile(model, backend="eager")
        compiled(x).square().sum().backward()
    assert all(map(same, (parameter.grad for parameter in model.parameters()), expected))
    assert dtr.report().recomputations

    from torch._dynamo.eval_frame import _stance

    assert _stance.stance == "default"


def test_a_block_inside_of_compiled_code_is_refused() -> None:
    model, x, _ = _model()

    def step() -> None:
        with remat.DTR("1MiB"):
            model(x).sum().backward()

    with pytest.raises(remat.RematError, match="compiler"):
        torch.compile(step, backend="eager")()
    torch.compiler.disable(step)()
