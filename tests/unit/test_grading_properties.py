"""Laws of the comparison, on generated answers."""

from __future__ import annotations

import contextlib
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from tseeds.grading import fast
from tseeds.grading.compare import Undecided, same_answer
from tseeds.grading.normalise import normalise
from tseeds.grading.options import GradingOptions
from tseeds.grading.parse import ParseError, parse

OPTIONS = GradingOptions()
TOLERANCE = Fraction(1, 10**7)
fractions = st.fractions(max_denominator=10**6).filter(lambda value: abs(value) < 10**9)
integers = st.integers(-(10**30), 10**30)


def same(gold: str, answer: str) -> bool:
    return same_answer(normalise(gold), normalise(answer), OPTIONS)


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


leaves = st.one_of(
    st.integers(0, 99).map(str),
    st.sampled_from(["x", "y", "n", r"\pi", r"\sqrt{2}", r"\theta"]),
    fractions.map(latex).map("({})".format),
)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", r"\cdot "]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        st.tuples(inner, inner).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
        inner.map(lambda e: rf"\sqrt{{{e}}}"),
        st.tuples(inner, st.integers(2, 4)).map(lambda t: f"({t[0]})^{{{t[1]}}}"),
    ),
    max_leaves=6,
)


def reformatted(text: str) -> list[str]:
    return [
        text.replace(r"\frac", r"\dfrac"),
        text.replace("(", r"\left(").replace(")", r"\right)"),
        f"$ {text} $.",
        text.replace("+", " + ").replace("-", " - "),
        text + r"\text{ units}",
        r"\displaystyle " + text,
    ]


@settings(max_examples=150, deadline=None)
@given(expressions)
def test_reflexive_and_invariant_under_formatting(text: str) -> None:
    assert same(text, text)
    for other in reformatted(text):
        try:
            assert same(text, other), other
            assert same(other, text), other
        except Undecided:
            # An expression without a value anywhere (0 in a denominator) is decided by its text alone.
            assert "frac" in text


@settings(max_examples=100, deadline=None)
@given(expressions, expressions)
def test_symmetric(a: str, b: str) -> None:
    def verdict(gold: str, answer: str) -> object:
        try:
            return same(gold, answer)
        except Undecided:
            return "undecided"

    assert verdict(a, b) == verdict(b, a)


@settings(max_examples=300, deadline=None)
@given(fractions, fractions)
def test_rationals_are_equal_only_to_themselves(a: Fraction, b: Fraction) -> None:
    assert same(latex(a), f"{b.numerator}/{b.denominator}") == (a == b)
    assert same(latex(a), latex(a + Fraction(1, 10**40))) is False


@settings(max_examples=200, deadline=None)
@given(fractions, st.integers(2, 1000))
def test_unreduced_fractions(value: Fraction, factor: int) -> None:
    assert same(latex(value), f"{value.numerator * factor}/{value.denominator * factor}")


@settings(max_examples=200, deadline=None)
@given(integers, integers)
def test_integers_of_any_length(a: int, b: int) -> None:
    assert same(str(a), f"{a:,}")
    assert same(str(a), f"{a}.0")
    assert same(str(a), str(b)) == (a == b)
    assert not same(str(a), str(a + 1))


@settings(max_examples=200, deadline=None)
@given(st.integers(10**6, 10**7 - 1).filter(lambda digits: digits % 10), st.integers(-40, 5))
def test_decimals_are_compared_by_relative_error(digits: int, exponent: int) -> None:
    # digits * 10^(exponent - 6) has a fractional part, so the convention for integers does not apply.
    gold = rf"\frac{{{digits}}}{{1000000}} \times 10^{{{exponent}}}"
    assert same(gold, f"{digits}e{exponent - 6}")
    assert same(gold, f"{digits}.01e{exponent - 6}")
    assert not same(gold, f"{digits}.99e{exponent - 6}") or digits > 9_900_000


@settings(max_examples=150, deadline=None)
@given(st.lists(integers, min_size=2, max_size=6), st.randoms())
def test_lists_are_unordered_and_tuples_ordered(values: list[int], rng: object) -> None:
    shuffled = list(values)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = ", ".join(map(str, values)), ", ".join(map(str, shuffled))
    assert same(one, other)
    assert same(f"({one})", f"({other})") == (values == shuffled)
    assert not same(one, f"{one}, {values[0]}")


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_normalised_and_parsed_or_refused(text: str) -> None:
    cleaned = normalise(text)
    assert normalise(cleaned) == normalise(normalise(cleaned))
    with contextlib.suppress(ParseError):
        parse(cleaned)


numbers = st.one_of(
    integers.map(str),
    integers.map("{:,}".format),
    fractions.map(latex),
    fractions.map(str),
    st.floats(-1e6, 1e6).map(repr),
    st.just("1.0000001"),
)


@settings(max_examples=400, deadline=None)
@given(numbers, numbers, st.booleans())
def test_the_fast_path_agrees_with_the_comparison(gold: str, answer: str, equal: bool) -> None:
    answer = gold if equal else answer
    found = fast.quick(gold, answer, tolerance=TOLERANCE)
    if found is not None:
        assert found[0] == same(gold, answer)
