"""The fast path: verdicts that need neither a parser nor another process, in time linear in the text.

It decides plain numbers (integers of any length, decimals, scientific notation, simple fractions) and answers that are typed
like their gold. Whatever else there is, it leaves to the comparison proper and says nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction

LITERAL = re.compile(
    r"([-+]?)(?:(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d*))?|\.(\d+))(?:[eE]([-+]?\d{1,4}))?(?:\s*(?:\\%|%))?\Z", re.ASCII
)
FRACTION = re.compile(
    r"([-+]?)(?:(\d{1,400})/(\d{1,400})|\\[dtc]?frac(?:\{(-?\d{1,400})\}\{(\d{1,400})\}|(\d)(\d)))\Z", re.ASCII
)
CLEAN = re.compile(r"\\!|\\,|\\ |\\\$|\$|\{,\}(?=\d{3})")
LABEL = re.compile(r"(?<=\d)\s*\\(?:text|mbox|textrm|mathrm)\{\s*units?\s*\}\Z", re.ASCII)
BIG = 1_000
WHOLE_DIGITS = 15

Number = tuple[bool, str, int, bool]
"""sign, digits without outer zeros, exponent of the last digit, whether it was written as a decimal."""


def strip(text: str) -> str:
    """Without spaces around, dollar signs, thin spaces and a full stop at the end."""
    text = text.strip()
    if "\\" in text or "$" in text:
        text = CLEAN.sub("", text).strip()
        text = LABEL.sub("", text)
    return text[:-1] if text.endswith(".") and text[-2:-1].isdigit() else text


def literal(text: str) -> Number | None:
    """A plain number in normal form, so that equal numbers of any length have equal forms.

    >>> literal("-1,200.50") == literal("-1200.5") == (True, "12005", -1, True)
    True
    """
    match = LITERAL.match(text)
    if match is None or text.endswith("%"):
        return None
    sign, whole, point, only_point, exponent = match.groups()
    if whole and "," in whole and whole[0] == "0":
        return None
    fraction = point or only_point or ""
    digits = (whole or "").replace(",", "") + fraction
    scale = (int(exponent) if exponent else 0) - len(fraction)
    digits = digits.lstrip("0")
    if not digits:
        return (False, "", 0, bool(fraction))
    stripped = digits.rstrip("0")
    return (sign == "-", stripped, scale + len(digits) - len(stripped), bool(fraction) or exponent is not None)


def fraction(text: str) -> Fraction | None:
    """A simple fraction of integers such as 3/4, \\frac{3}{4} or \\frac34."""
    match = FRACTION.match(text)
    if match is None:
        return None
    sign, a, b, c, d, e, f = match.groups()
    upper, lower = (a, b) if a else (c, d) if c else (e, f)
    if int(lower) == 0:
        return None
    return Fraction(int(upper), int(lower)) * (-1 if sign == "-" else 1)


def as_fraction(value: Number) -> Fraction | None:
    """The value, unless it is too long to be worth it."""
    negative, digits, scale, _ = value
    if len(digits) > BIG or abs(scale) > BIG:
        return None
    number = Fraction(int(digits or "0")) * Fraction(10) ** scale
    return -number if negative else number


def near(gold: Fraction, answer: Fraction, tolerance: Fraction, decimals: tuple[bool, bool]) -> bool:
    """The convention for decimals: within a relative error, and never where one side is a whole number."""
    if not any(decimals) or not gold or not answer:
        return False
    for value, decimal in zip((gold, answer), decimals, strict=True):
        if value.denominator == 1 and (not decimal or abs(value) < 10**WHOLE_DIGITS):
            return False
    return abs(gold - answer) <= tolerance * abs(gold)


def quick(gold: str, answer: str, *, tolerance: Fraction) -> tuple[bool, str] | None:
    """Whether a number is the gold, and its canonical form; None where this path does not decide."""
    gold, answer = strip(gold), strip(answer)
    a, b = literal(gold), literal(answer)
    x = fraction(gold) if a is None else None
    y = fraction(answer) if b is None else None
    if (a is None and x is None) or (b is None and y is None):
        return None
    if a is not None and b is not None and a[:3] == b[:3]:
        return True, show(b)
    if x is None:
        assert a is not None
        x = as_fraction(a)
    if y is None:
        assert b is not None
        y = as_fraction(b)
    if x is None or y is None:
        if a is None or b is None:
            return None
        if not a[3] and not b[3]:
            return False, show(b)
        return None
    same = x == y or near(x, y, tolerance, (a is not None and a[3], b is not None and b[3]))
    return same, str(y)


def show(value: Number) -> str:
    """The canonical form of a plain number: the same as its fraction's, or digits and exponent where that is long."""
    exact = as_fraction(value)
    if exact is not None:
        return str(exact)
    return f"{'-' if value[0] else ''}{value[1][:400]}e{value[2]}"
