"""A seed never holds the end of sequence, never the answer, never fills the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tseeds import cuts

WORDS = ["a", "b", "\n", "\\boxed", "{", "7", "}", "=", "<eos>", "####"]


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids if i != 8)


def test_answer_starts_before_the_marker_even_when_it_spans_tokens() -> None:
    ids = [0, 1, 3, 4, 5, 6]  # a b \boxed { 7 }
    assert cuts.answer_start(ids, decode, "math") == 2
    assert cuts.answer_start([0, 1, 2], decode, "math") == 3
    assert cuts.answer_start([0, 9, 5], decode, "gsm8k") == 1
    assert cuts.answer_start([0, 7, 5, 1, 7, 5], decode, "countdown") == 4  # the last result


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 40), st.sampled_from(["math", "gsm8k", "countdown"]))
def test_limit_properties(ids: list[int], budget: int, task: str) -> None:
    length = cuts.limit(ids, eos=frozenset({8}), decode=decode, task=task, budget=budget)
    kept = ids[:length]
    assert 0 <= length <= len(ids)
    assert 8 not in kept
    assert length + 1 <= budget
    if task != "countdown":
        assert "####" not in decode(kept)
        assert "\\boxed" not in decode(kept)


@pytest.mark.parametrize(("fraction", "length"), [(0.0, 0), (0.5, 6), (0.8, 10), (0.99, 12)])
def test_uniform_cut_of_thirteen_tokens(fraction: float, length: int) -> None:
    assert cuts.uniform_cut(13, fraction) == length


def test_line_cut_ends_with_the_last_newline_before_the_draw() -> None:
    ids = [0, 2, 0, 1, 2, 0, 0, 0]
    assert cuts.line_cut(ids, 0.9, lambda t: WORDS[t]) == 5
    assert cuts.line_cut(ids, 0.5, lambda t: WORDS[t]) == 2
    assert cuts.line_cut([0, 1, 0], 1.0, lambda t: WORDS[t]) == 0


def test_entropy_peak_lies_in_the_middle_half() -> None:
    assert cuts.entropy_peak_cut([9, 0, 0.1, 0.5, 0.2, 0.5, 0, 9]) == 3  # [2, 6), the first of two peaks
    assert cuts.entropy_peak_cut([]) == 0


def test_target_steers_to_one_half() -> None:
    assert cuts.target_fraction(0.5, lo=0.1, hi=0.9, draw=0.3) == pytest.approx(0.1)
    assert cuts.target_fraction(0.9, lo=0.1, hi=0.9, draw=0.3) == pytest.approx(0.1)
    assert cuts.target_fraction(0.0, lo=0.1, hi=0.9, draw=0.3) == pytest.approx(0.9)
    assert cuts.target_fraction(None, lo=0.0, hi=1.0, draw=0.3) == pytest.approx(0.3)
