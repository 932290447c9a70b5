"""Countdown answers: chains and expressions, without eval."""

from __future__ import annotations

import pytest

from tseeds.grading import countdown
from tseeds.grading.options import GradingOptions
from tseeds.grading.tasks import Outcome, before_worker
from tseeds.grading.verdict import Verdict

GOLD = '{"numbers": [3, 8, 5, 2], "target": 21}'


def grade(text: str, gold: str = GOLD, form: str = "response") -> Outcome:
    outcome = before_worker(gold, text, form, GradingOptions(task="countdown"))
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.mark.parametrize(
    "text",
    [
        "3 * 8 = 24 ; 24 - 5 = 19 ; 19 + 2 = 21",
        "3*8=24;24-5=19;19+2=21",
        "3 * 8 = 24\n24 - 5 = 19\n19 + 2 = 21\n",
        "8 * 3 = 24 , 24 - 5 = 19 , 2 + 19 = 21 .",
        r"\boxed{(3*8)-5+2}",
        r"so $\boxed{3 \times 8 - 5 + 2 = 21}$",
        "3 * 8 - 5 + 2",
        "3 × 8 − 5 + 2 = 21",
        "<think> 1 + 1 = 3 </think> 3 * 8 - 5 + 2",
        "3 * 8 = 24 ; 24 - 5 = 19 ; 19 + 2 = 21 <|endoftext|>",
    ],
)
def test_solutions(text: str) -> None:
    assert grade(text).verdict is Verdict.correct


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3 * 8 = 24 ; 24 - 5 = 19", "2 is not used"),
        ("3 * 8 = 25 ; 25 - 5 = 20 ; 20 + 2 = 22", "3 * 8 is not 25"),
        ("3 * 8 = 24 ; 24 - 5 = 19 ; 19 + 3 = 22", "3 is gone"),
        ("3 * 8 = 24 ; 24 - 5 = 19 ; 19 - 2 = 17", "not the target"),
        ("24 - 3 = 21 ; 8 * 5 = 40 ; 40 * 2 = 80", "24 was never there"),
        ("3 * 8 = 24 ; 24 - 5 = 19 ; 19 + 2 = 21 ; 21", "a step without its result"),
        ("3 * 8 - 5 + 2 = 22", "claims another value"),
        ("21", "21 is no number of the problem"),
        ("3 / 0 = 1", "0 is not there"),
        ("3 * 8 = = 24", "malformed"),
        ("__import__('os').system('x') 3", "no arithmetic"),
        ("3 ** 8 - 5 + 2", "no such operation"),
        ("(" * 5000 + "3", "too deep"),
    ],
)
def test_other_answers(text: str, why: str) -> None:
    assert grade(text).verdict is Verdict.wrong, why


def test_division_is_exact() -> None:
    gold = '{"numbers": [8, 3, 8, 3], "target": 24}'
    assert grade("8 / (3 - 8 / 3)", gold).verdict is Verdict.correct
    assert grade("8 / 3 = 2 ; 2 * 8 = 16 ; 16 + 3 = 19", gold).verdict is Verdict.wrong


def test_negative_results_may_be_used() -> None:
    assert grade("3 - 8 = -5 ; -5 + 10 = 5", '{"numbers": [3, 8, 10], "target": 5}').verdict is Verdict.correct


def test_no_numbers_is_no_answer() -> None:
    assert grade("I give up").verdict is Verdict.no_answer
    assert grade("<think> 3 * 8").verdict is Verdict.no_answer


def test_the_order_of_commuting_operands_does_not_make_another_solution() -> None:
    one = grade("3 * 8 = 24 ; 24 - 5 = 19 ; 19 + 2 = 21").canonical
    other = grade("8 * 3 = 24 ; 24 - 5 = 19 ; 2 + 19 = 21").canonical
    expression = grade(r"\boxed{2 + (8*3 - 5)}").canonical
    third = grade("3 * 5 = 15 ; 15 + 8 = 23 ; 23 - 2 = 21").canonical
    assert one == other == expression
    assert third is not None
    assert third != one
    assert grade("3 * 8 = 24").canonical is None


@pytest.mark.parametrize(
    "gold",
    [
        "",
        "21",
        "[]",
        '{"numbers": [1.5], "target": 2}',
        '{"numbers": [], "target": 2}',
        '{"numbers": [1]}',
        '{"numbers": [true], "target": 1}',
    ],
)
def test_bad_golds(gold: str) -> None:
    assert grade("1 + 1", gold).verdict is Verdict.unparsable_gold
    with pytest.raises(ValueError, match=r"gold|numbers|target"):
        countdown.read_gold(gold)
