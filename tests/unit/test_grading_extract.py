"""What counts as the answer of a response."""

from __future__ import annotations

import time

import pytest

from tseeds.config import parse
from tseeds.context import Context
from tseeds.grading.extract import boxes, extract


def answer(text: str, *, task: str = "math", form: str = "response", join: bool = True) -> str | None:
    return extract(text, task=task, form=form, think_end="</think>", join=join)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{x^{2^{n}}}", "x^{2^{n}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 7$", "7"),
        (r"Write it in \boxed. So \boxed{7}", "7"),
        (r"\fbox{3}", "3"),
        ("<|begin_of_box|>5<|end_of_box|>", "5"),
        (r"\boxed{185\}", "185"),
        ("a {stray brace, then \\boxed{8}", "8"),
        (r"\boxed{1} and later, another try: \boxed{2}", "2"),
        (r"\boxed{ }", None),
        ("42", None),
        ("", None),
        (r"\boxed{42", None),
    ],
)
def test_the_last_complete_box(text: str, expected: str | None) -> None:
    assert answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1} \quad \text{or} \quad \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$ and $y=\boxed{2}$", "x= 1, y= 2"),
        (r"\boxed{5}, \boxed{5}", "5"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1}, hence \boxed{2}", "2"),
    ],
)
def test_neighbouring_boxes_are_one_list(text: str, expected: str) -> None:
    assert answer(text) == expected
    assert answer(text, join=False) == expected.rpartition(" ")[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{4}, checking again: \boxed{4", "4"),
        (r"\boxed{42}, that is \boxed{4", "42"),
        (r"\boxed{4}. So \boxed{", "4"),
        (r"\boxed{4}. Wait, actually \boxed{5", None),
        (r"\boxed{4}. Wait, that is wrong: \boxed{", None),
        (r"\boxed{4}, or rather \boxed{42", None),
        (r"\boxed{4}, with units \boxed{4 \text{ cm", "4"),
    ],
)
def test_an_unclosed_later_box_may_take_the_answer_back(text: str, expected: str | None) -> None:
    assert answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> done", None),
        (r"<think>\boxed{1}", None),
        (r"a</think>b</think>\boxed{3}", "3"),
    ],
)
def test_only_text_after_the_thinking(text: str, expected: str | None) -> None:
    assert answer(text) == expected


@pytest.mark.parametrize(
    ("prompt", "prefill", "text", "verdict"),
    [
        ("Q?<|assistant|>\n<think>\n", "", r"so \boxed{4}", "no_answer"),  # cut off while thinking
        ("Q?<|assistant|>\n<think>\n", "", r"\boxed{5}? no.</think> \boxed{4}", "correct"),
        ("Q?<|assistant|>\n<think>\n\n</think>\n\n", "", r"so \boxed{4}", "correct"),  # thinking switched off
        ("Think in <think> </think>. Q?", "", r"so \boxed{4}", "correct"),  # a prompt that speaks of the marks
        ("Q?<|assistant|>\n<think>\nWell, ", "<think>\nWell, ", r"so \boxed{4}", "no_answer"),
        ("Q?<|assistant|>\n", "", r"so \boxed{4}", "correct"),
    ],
)
def test_a_thinking_that_the_prompt_opened_is_thinking(prompt: str, prefill: str, text: str, verdict: str) -> None:
    data = {"policy": {"path": "p"}, "problems": {"path": "d", "prefill": prefill}}
    with Context(parse(data)) as context:
        assert [str(g.verdict) for g in context.grade([("math", "4", prompt, text)])] == [verdict]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234\n", "1,234"),
        ("#### 6\nno:\n#### 7\nbye", "7"),
        (r"#### 6 then \boxed{8}", "8"),
        (r"\boxed{8} then" + "\n#### 6", "6"),
        (r"\boxed{8}", "8"),
        ("7", None),
    ],
)
def test_gsm8k_takes_the_last_marker(text: str, expected: str | None) -> None:
    assert answer(text, task="gsm8k") == expected


def test_a_bare_answer_is_taken_whole_but_for_a_box() -> None:
    assert answer("42", form="answer") == "42"
    assert answer(r"$\boxed{42}$", form="answer") == "42"
    assert not answer("  ", form="answer")


def test_linear_time() -> None:
    for text in (
        r"\boxed{" * 200_000,
        "{" * 500_000 + r"\boxed{1}",
        r"\boxed{1}, " * 50_000,
        "}" * 500_000,
        "\\" * 500_001,
    ):
        start = time.process_time()
        boxes(text)
        answer(text)
        assert time.process_time() - start < 8.0
