"""Budgets as people write them, in bytes: `parse_bytes("2GiB")`, `resolve_budget(0.5, peak)`."""

from __future__ import annotations

import math
import operator
import re

_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TOO_MUCH = 2**63  # bytes; planners compute with 64-bit integers
_LONGEST = 80  # characters of what was passed, in an error
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def _refuse(budget: object, reason: str) -> ValueError:
    from remat.errors import InvalidBudget  # errors formats bytes, hence imports this module

    written = repr(budget)
    subject = written if len(written) <= _LONGEST else "This"
    return InvalidBudget(
        f"{subject} is no amount of memory: {reason}. Write it as bytes (an int, 2147483648), as a string with a "
        "unit ('2GiB', '800MB'), or as a float in (0, 1], a fraction of plain PyTorch's peak (0.5 for 50%)."
    )


def parse_bytes(text: str) -> int:
    """The bytes that `text` names: a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, in any case.

    Raises:
        InvalidBudget: no number, no unit, or a unit that is not known.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None:
        why = "it is negative" if text.lstrip().startswith("-") else "not a number with a unit"
        raise _refuse(text, why)
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise _refuse(text, f"unknown unit {unit!r}")
    return math.floor(float(number) * factor)


def resolve_budget(budget: int | str | float, store_all_bytes: int | None = None) -> int:
    """A budget in any of its three forms, in bytes.

    Args:
        budget: int (bytes), string with a unit, or float in (0, 1] of `store_all_bytes`.
        store_all_bytes: peak of the schedule that stores everything, where it is known.

    Raises:
        InvalidBudget: none of the three forms, zero or negative, or a fraction of a peak that is not known.
    """
    if isinstance(budget, str):
        size = parse_bytes(budget)
    elif isinstance(budget, float):
        if not 0 < budget <= 1:
            raise _refuse(budget, "a float must be in (0, 1]")
        if store_all_bytes is None:
            raise _refuse(budget, "plain PyTorch's peak is not known here, so no fraction of it")
        size = math.floor(budget * store_all_bytes)
    else:
        try:
            if isinstance(budget, bool):
                raise TypeError
            size = operator.index(budget)
        except TypeError:
            raise _refuse(budget, f"it is a {type(budget).__name__}") from None
    if size <= 0:
        raise _refuse(budget, "it must be above zero")
    if size >= _TOO_MUCH and not isinstance(budget, float):
        raise _refuse(budget, "above the largest that is known, 2**63 bytes")
    return size
