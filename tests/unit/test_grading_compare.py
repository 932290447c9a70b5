"""Equality of answers: pairs that a person can check, and the conventions of docs/grading.md."""

from __future__ import annotations

import pytest

from tseeds.grading.compare import Undecided, canonical, gold_problem, same_answer
from tseeds.grading.normalise import normalise
from tseeds.grading.options import GradingOptions


def same(gold: str, answer: str, **options: object) -> bool:
    return same_answer(normalise(gold), normalise(answer), GradingOptions.model_validate(options))


EQUAL = [
    ("1/2", r"\frac{1}{2}"), ("1/2", ".5"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), ("5/2", "2 1/2"), ("2.5", r"2\frac12"),
    ("-7/2", r"-3\frac{1}{2}"), ("1000000", r"1\,000\,000"), ("1000", "1 000"), ("58,500", "58500"), ("2.5", "2½"),
    (r"30~\mathrm{cm}^2", "30"), (r"10\text{ cm}", r"10\,\mathrm{cm}"), (r"100\text{ cm}", r"1\text{ m}"),
    (r"36\text{ in}^2", r"36 \text{ square inches}"), ("18", "18 dollars per day"), ("0.6", r"60\%"),
    ("12", r"12^{\text{th}}"), ("5", "five"), ("5", "５"), ("-5", "−5"), (r"\sqrt{2}", "√2"), ("x^2", "x²"),
    (r"\frac{1}{3}", r"0.\overline{3}"), (r"\frac{1}{6}", r"0.1\overline{6}"), ("780", r"7.8\times 10^2"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"), ("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}"), ("0", r"\sin(\pi)"),
    ("-1", r"e^{\pi i}"), ("-2", r"\sqrt[3]{-8}"), (r"2^{10^7}", r"4^{5000000}"), ("9^{9^{9^9}}", "9^{9^{9^9}}"),
    (r"\sin 2x", r"2\sin x\cos x"), (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^{n} k"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\lceil n/2 \rceil", r"\lfloor (n+1)/2 \rfloor"), (r"|x|", r"\sqrt{x^2}"), (r"(-1)^n", r"\cos(n\pi)"),
    (r"\cos x", r"\sin(90^\circ-x)"), ("90", r"90^\circ"), ("(1,3)\\cup(2,4)", "(1,4)"),
    (r"(0,9)\cup(9,36)", r"(0,36)\setminus\{9\}"), (r"(-\infty,0)\cup(0,\infty)", r"x\ne 0"), ("(-3,3)", "|x|<3"),
    ("x<3", "-x>-3"), (r"\{x \mid x > 3\}", r"(3,\infty)"), (r"\{1,2,2,3\}", "3,2,1"), (r"\emptyset", r"\text{no solution}"),
    (r"\{1,2,3\}", r"\{1,2\}\cup\{3\}"), ("x=1,x=2", r"x=2\text{ or }x=1"), ("x=1, y=2", "y=2, x=1"), ("(3,-2)", "x=3, y=-2"),
    (r"1\pm\sqrt{19}", r"1-\sqrt{19},1+\sqrt{19}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\begin{pmatrix}2&0\\0&2\end{pmatrix}", r"2\begin{bmatrix}1&0\\0&1\end{bmatrix}"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"), ("y=2x+1", "2x-y+1=0"), ("f(x)=x^2", "f(t)=t^2"),
    ("|AB|=1", "1"), ("3:4", "6:8"), ("20:34", r"08:34\text{ P.M.}"), ("C", r"\text{(C)}"), ("C", "C. x = 42"),
    (r"\text{Evelyn}", "evelyn"), ("101_2", "5"), ("1A_{16}", "26"), (r"x\equiv 3\pmod 7", r"x \equiv 10 \pmod{7}"),
    (r"\frac{\sqrt3}{3}", r"\frac{\sqrt3}{3}\approx 0.577"), (r"\frac{1}{\sqrt n}", r"\sqrt{1/n}"), ("2", r"\log_{10} 100"),
    (r"\frac{x-3}{x-5}", r"\frac{3-x}{5-x}"), (r"14-i", "14.0 + -1.0i"), (r"(2,\infty)", r"(2,+\infty)"),
]  # fmt: skip

UNEQUAL = [
    ("1/2", "1/3"), ("5", "−5"), ("52_8", "528"), ("52_8", "52"), ("1", r"1+10^{-50}"), ("0", r"10^{-100}"),
    ("2^{1000}", "2^{1000}+1"), ("10^{5000}", "10^{5000}+1"), ("2^{10^7}", "2^{10^7}+1"), ("9^{9^{9^9}}", "9^{9^{9^8}}"),
    ("1.6e-19", "9.1e-31"), ("0.0000001", "0.0000004"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), ("33", "33a"),
    (r"0.9\overline{6}", "0.9666"), ("32349", "32, 349"), (r"10\text{ cm}", r"10\text{ m}"), ("0.64N", "0.64"),
    ("(0,1)", "[0,1]"), ("(1,2)", "(2,1)"), (r"\{1,3\}", "(1,3)"), ("(1,2)\\cup(2,3)", "(1,3)"), ("1,2,3", "1,2"),
    ("x=1, y=2", "x=2, y=1"), (r"\pm 3", "3"), (r"|x|", "x"), ("2x+4y-3=0", "0"), ("n=3k", "3"), ("11a+c", "7=11a+c"),
    ("3x-y+13=0", "3x+4y+14=0"), ("x<3", r"x\le 3"), ("x>5", "x<5"), (r"\mathbb{R}", r"\mathbb{Q}"), ("f(x)", "f(y)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), ("3:4", "4:3"), ("12:00", "1:00"), ("B", "C"),
    (r"\text{odd}", "oddd"), ("east", "seat"), (r"\infty", "10^{100}"), (r"\infty", r"-\infty"), (r"10\%", "1000"),
    (r"-20+12i", "-20-12i"), (r"\lfloor n/2\rfloor", "n/2"), (r"7", "3+4=8"), (r"\sqrt[3]{x}", r"\sqrt{x}"),
    (r"\{1\} \cup \{2\}", "1"), (r"10:30\text{ a.m.}", r"10:30\text{ p.m.}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert same(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equality_is_symmetric(gold: str, answer: str) -> None:
    assert same(answer, gold)


def test_a_gold_number_may_be_named_but_a_gold_equation_is_more_than_its_number() -> None:
    assert same("17", "m+n=17")
    assert not same("m+n=17", "17")


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_unequal(gold: str, answer: str) -> None:
    assert not same(gold, answer)
    assert not same(answer, gold)


@pytest.mark.parametrize(
    ("option", "value", "gold", "answer"),
    [
        ("percent_as_number", False, r"28\%", "28"),
        ("degrees_as_radians", False, r"180^\circ", r"\pi"),
        ("base_by_value", False, "52_8", "42"),
        ("unevaluated", False, "8", "2^3"),
        ("unordered_lists", False, "1, 2", "2, 1"),
        ("decimal_tolerance", 0, r"\sqrt{2}", "1.41421356237309"),
    ],
)
def test_each_convention_is_an_option(option: str, value: object, gold: str, answer: str) -> None:
    assert same(gold, answer)
    assert not same(gold, answer, **{option: value})
    assert same(gold, gold, **{option: value})


def test_the_decimal_tolerance_is_relative_and_never_reaches_integers() -> None:
    assert same(r"\frac{1}{3}", "0.33333333")
    assert not same(r"\frac{1}{3}", "0.333333")
    assert not same("45", "45.000001")
    assert not same("45", "45.00000000000001")
    assert not same("2.88e-19", "2.880001e-19")
    assert same(r"\frac{1}{3} \times 10^{-30}", "3.3333333333e-31")


@pytest.mark.parametrize(
    "gold",
    ["", "  ", "Answer is forty three.", r"\frac{1}{2", "\x0crac{1}{2}", "None", "1/0", "\ud800", r"\frac{1}{1-1}"],
)
def test_golds_that_are_refused(gold: str) -> None:
    assert gold_problem(gold)


@pytest.mark.parametrize(
    "gold", ["0", r"\text{The midpoints form a regular hexagon}", "paris", "f'", r"\emptyset", "E", "x = 5"]
)
def test_golds_that_are_kept(gold: str) -> None:
    assert gold_problem(gold) is None


@pytest.mark.parametrize(
    ("gold", "answer"), [("1/2", r"\frac{2}{4}"), ("x+1", "1+x"), ("1,2", "2,1"), (r"\sqrt{8}", r"2\sqrt2")]
)
def test_equal_answers_share_their_canonical_form(gold: str, answer: str) -> None:
    assert canonical(normalise(gold)) == canonical(normalise(answer))


def test_what_is_not_read_is_undecided_and_not_wrong() -> None:
    with pytest.raises(Undecided):
        same(r"\int_0^1 x dx", r"\frac{1}{2}")
