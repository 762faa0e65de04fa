import pytest

from remat.budgets import parse_bytes, resolve_budget
from remat.errors import InvalidBudget, RematError
from remat.formatting import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5 kib", 1536),
        (" 3 TB ", 3 * 10**12),
        ("7B", 7),
        ("0.5MiB", 2**19),
    ],
)
def test_amounts_with_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size == resolve_budget(text)


def test_parts_of_a_byte_are_cut_off() -> None:
    """A limit is never rounded up."""
    assert parse_bytes("10.9B") == 10
    assert parse_bytes("1.0009 KiB") == 1024
    assert resolve_budget(0.5, 7) == 3
    assert resolve_budget(0.999999, 10) == 9


def test_the_three_forms() -> None:
    assert resolve_budget(12345) == 12345
    assert resolve_budget(0.5, 1001) == 500
    assert resolve_budget(1.0, 1001) == 1001


@pytest.mark.parametrize(
    "budget", [0, -5, "0MB", 1.5, 0.0, -0.1, float("nan"), True, None, [3], "12", "GiB", "3 GiBs", "-2MB", "2 quarks"]
)
def test_anything_else_shows_the_three_forms(budget: object) -> None:
    with pytest.raises(ValueError, match=r"2GiB.*fraction") as caught:
        resolve_budget(budget, 100)  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidBudget) and isinstance(caught.value, RematError)
    assert repr(budget) in str(caught.value)


def test_a_fraction_needs_a_known_peak() -> None:
    with pytest.raises(InvalidBudget, match="plain PyTorch's peak is not known"):
        resolve_budget(0.5)


def test_for_people() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(1000 * 2**20) == "0.977 GiB"
    assert format_bytes(3 * 2**30) == "3.00 GiB"
    assert format_bytes(5 * 2**42) == "20.0 TiB"
    assert format_seconds(0.00213) == "2.13 ms"
    assert format_seconds(12.3) == "12.3 s"
    assert format_seconds(4e-6) == "4.00 us"
