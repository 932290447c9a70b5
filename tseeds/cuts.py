"""Where a past chain is cut: pure functions on token ids.

A seed never contains an end-of-sequence token, never reaches the final answer, never fills the length budget.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

ANSWER_MARKERS = {"math": r"\\boxed|####|\\fbox", "gsm8k": r"####|\\boxed", "countdown": r"=(?=[^=]*$)|\\boxed"}
"""Where the final answer begins, by task; for countdown the last result. Own tasks are treated as math."""


def answer_start(ids: Sequence[int], decode: Decode, task: str) -> int:
    """Number of leading tokens that lie wholly before the final answer's marker; len(ids) where there is none."""
    text = decode(ids)
    match = re.search(ANSWER_MARKERS.get(task, ANSWER_MARKERS["math"]), text)
    if match is None:
        return len(ids)
    low, high = 0, len(ids)
    while low < high:  # largest n whose text ends before the marker
        middle = (low + high + 1) // 2
        if len(decode(ids[:middle])) <= match.start():
            low = middle
        else:
            high = middle - 1
    return low


def limit(ids: Sequence[int], *, eos: frozenset[int], decode: Decode, task: str, budget: int) -> int:
    """Longest allowed seed of a chain: before the first end of sequence and the answer, one token short of the budget."""
    end = next((k for k, token in enumerate(ids) if token in eos), len(ids))
    return max(0, min(end, answer_start(ids[:end], decode, task), budget - 1))


def uniform_cut(length: int, fraction: float) -> int:
    """floor(fraction * chain length).

    >>> uniform_cut(13, 0.5)
    6
    """
    return int(fraction * length)


def line_cut(ids: Sequence[int], fraction: float, piece: Callable[[int], str]) -> int:
    """Tokens up to and including the last newline before floor(fraction * length); 0 where there is none."""
    for k in range(uniform_cut(len(ids), fraction), 0, -1):
        if "\n" in piece(ids[k - 1]):
            return k
    return 0


def entropy_peak_cut(entropies: Sequence[float]) -> int:
    """Tokens before the most uncertain one in [T/4, 3T/4) (PROS); ties go to the first.

    >>> entropy_peak_cut([9.0, 0.1, 0.5, 0.2])
    2
    """
    length = len(entropies)
    low, high = length // 4, max(length // 4 + 1, (3 * length) // 4)
    return max(range(low, min(high, length)), key=lambda k: (entropies[k], -k), default=0)


def target_fraction(pass_rate: float | None, *, lo: float, hi: float, draw: float) -> float:
    """Cut fraction that steers a problem towards a pass rate of one half (ours).

    A problem that the policy solves half of the time or more gets the shortest seed lo, one that it never solves the
    longest hi, linear between; a problem without history gets the uniform draw.

    >>> target_fraction(0.25, lo=0.0, hi=0.8, draw=0.9)
    0.4
    """
    share = draw if pass_rate is None else max(0.0, 1.0 - 2.0 * pass_rate)
    return lo + (hi - lo) * share
