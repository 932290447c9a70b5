"""What the own parser does not read: math-verify's LaTeX grammar and sympy, without their absolute tolerance.

Runs in worker processes only, which are killed when they take too long; math-verify's own alarms are off.
"""

from __future__ import annotations

import logging
from typing import Any

WARM_UP = (r"\int_{0}^{1} x^2 dx", r"\sum_{k=1}^{\infty} \frac{1}{k^2}", r"\lim_{x \to 0} \frac{\sin x}{x}", "x+1")


def warm_up() -> None:
    """Load and use once what is loaded on first use (a second or more), before the clock of an answer runs."""
    for text in WARM_UP:
        same(text, r"\frac{1}{3}")


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.disable(logging.CRITICAL)
    return [value for value in parse("$" + text + "$", parsing_timeout=None) if not isinstance(value, str)]


def readable(text: str) -> bool:
    """Whether math-verify reads a normalised answer as mathematics."""
    return bool(_parse(text))


def same(gold: str, answer: str) -> bool:
    """Whether two normalised answers are equal by sympy: structurally, by simplifying, or by 50 digits; False if not read."""
    golds, answers = _parse(gold), _parse(answer)
    return bool(golds and answers) and _equal(golds[0], answers[0])


def _equal(gold: Any, answer: Any) -> bool:
    import sympy

    if gold == answer:
        return True
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        from math_verify import verify

        # Sets, relations and matrices, compared member by member with 15 digits behind the point at least.
        return bool(verify(gold, answer, float_rounding=30, numeric_precision=40, timeout_seconds=None))
    difference = (gold - answer).doit()
    if difference.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    if difference == 0:
        return True
    if not difference.free_symbols:
        return _zero(difference, sympy.N(answer, 60))
    return bool(sympy.simplify(difference) == 0)


def _zero(difference: Any, answer: Any) -> bool:
    """Whether a constant is zero compared with the answer, by 60 digits that hold after cancellation."""
    import sympy

    value = sympy.N(difference, 60, maxn=400)
    if not value.is_number or not answer.is_number or value.has(sympy.Integral, sympy.Limit, sympy.Sum):
        return False
    if value.has(sympy.nan, sympy.zoo, sympy.oo) or answer.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    if value == 0:
        return True
    return bool(answer != 0 and abs(value / answer) < sympy.Float(10, 60) ** -45)
