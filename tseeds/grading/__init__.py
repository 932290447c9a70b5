"""One grader for training, evaluation and the command line. See docs/grading.md."""

from __future__ import annotations

from tseeds.grading.grader import Grader
from tseeds.grading.options import GradingOptions
from tseeds.grading.verdict import Grade, Verdict

__all__ = ["Grade", "Grader", "GradingOptions", "Verdict"]
