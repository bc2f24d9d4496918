"""Constraints written as types: what they refuse, and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from engines.constraints import Count, Counts, Fraction, Int64, NonNegative, Positive, Share, WholeNumber, check_fields


@dataclass(frozen=True, kw_only=True)
class Values:
    count: Count = 1
    most: Count | Literal["auto"] | None = None
    seed: Int64 = 0
    whole: WholeNumber = 0
    rate: Positive = 1
    decay: NonNegative = 0.0
    share: Share = 1.0
    part: Fraction = 0
    way: Literal["up", "down"] = "up"
    on: bool = True
    name: str = "x"
    sizes: Counts = (1, 2)
    pair: tuple[float, Share] = (1, 1.0)
    path: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("name", "fine", "wrong", "told"),
    [
        ("count", [1, 2**63 - 1], [0, 1.0, True, "1", None, 2**63], "an integer of at least 1 (64 bits)"),
        ("most", ["auto", None, 3], ["other", 0], "an integer of at least 1 (64 bits), or 'auto', or None"),
        ("seed", [-(2**63)], [-(2**63) - 1, 0.5], "an integer of 64 bits"),
        ("whole", [0], [-1], "an integer of at least 0 (64 bits)"),
        ("rate", [5, 1e-300], [0, -1.0, math.nan, math.inf, False], "above 0"),
        ("decay", [0, 3.5], [-1e-9, math.inf, math.nan], "at least 0"),
        ("share", [1, 1e-9], [0, 1.1], "above 0, at most 1"),
        ("part", [0, 1], [-0.1, 1.1], "at least 0, at most 1"),
        ("way", ["down"], ["left", 1], "one of ['up', 'down']"),
        ("on", [False], [0, "no"], "True or False"),
        ("name", [""], [b"x", 3], "text"),
        ("sizes", [(1,), [4, 5]], [(), (0,), 3, (1, "2")], "numbers of at least 1"),
        ("pair", [(-5.0, 0.5)], [(1.0,), (1.0, 2.0)], "a list of: a number, above 0, at most 1"),
        ("path", [Path("x"), 3], [], ""),
    ],
)
def test_each_kind(name: str, fine: list[Any], wrong: list[Any], told: str) -> None:
    for value in fine:
        Values(**{name: value})
    for value in wrong:
        with pytest.raises(ValueError) as caught:
            Values(**{name: value})
        assert str(caught.value) == f"Values.{name}={value!r}: must be {told}"
