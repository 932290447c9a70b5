"""What the own parser does not read: math-verify's LaTeX grammar and sympy, without their absolute tolerance.

Runs in worker processes only, which are killed when they take too long; math-verify's own alarms are off.
"""

from __future__ import annotations

import logging
from typing import Any

from tseeds.grading.parse import ParseError


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.disable(logging.CRITICAL)
    return [value for value in parse("$" + text + "$", parsing_timeout=None) if not isinstance(value, str)]


def readable(text: str) -> bool:
    """Whether math-verify reads a normalised answer as mathematics."""
    return bool(_parse(text))


def same(gold: str, answer: str) -> bool:
    """Whether two normalised answers are equal by sympy: structurally, by simplifying, or by 50 digits.

    Raises:
        ParseError: one of them is not read.
    """
    golds, answers = _parse(gold), _parse(answer)
    if not golds or not answers:
        raise ParseError("not read by math-verify either")
    return _equal(golds[0], answers[0])


def _equal(gold: Any, answer: Any) -> bool:
    import sympy

    if gold == answer:
        return True
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        from math_verify import verify

        # Sets, relations and matrices, compared member by member with 15 digits behind the point at least.
        return bool(verify(gold, answer, float_rounding=30, numeric_precision=40, timeout_seconds=None))
    difference = gold - answer
    if not difference.free_symbols:
        return _zero(difference, max(abs(sympy.N(gold, 60)), abs(sympy.N(answer, 60))))
    return bool(sympy.simplify(difference.doit()) == 0)


def _zero(difference: Any, size: Any) -> bool:
    import sympy

    value = abs(sympy.N(difference, 60, maxn=400))
    return bool(value == 0 or (value.is_number and size.is_number and value <= size * sympy.Float(10, 60) ** -45))
