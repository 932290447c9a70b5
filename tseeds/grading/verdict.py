"""What the grader says about one answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """`no_answer`: nothing to grade was found in the text. `timeout` and `error` are the grader's, not the answer's."""

    correct = "correct"
    wrong = "wrong"
    no_answer = "no_answer"
    unparsable_gold = "unparsable_gold"
    timeout = "timeout"
    error = "error"


@dataclass(frozen=True, slots=True)
class Grade:
    """One graded answer."""

    verdict: Verdict
    extracted: str | None = None
    """What was taken from the text as the answer."""
    canonical: str | None = None
    """A form that equal answers share as far as that is cheap: for majority votes and for counting distinct solutions."""
    wall_ms: float = 0.0
    """Time the verdict took; 0.0 for a pair that was already graded. Start-up of workers is not in it."""
    reward: float = 0.0
    """1.0 for a correct answer, else 0.0; a user's verifier may return anything between."""
    detail: str | None = None
    """For `unparsable_gold`, `timeout` and `error`: why."""
