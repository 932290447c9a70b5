"""From one (gold, text) pair to a verdict: the fast part for the caller's process, the rest for a worker."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from tseeds.grading import countdown, fast
from tseeds.grading.extract import extract
from tseeds.grading.options import GradingOptions
from tseeds.grading.verdict import Verdict

MAX_ANSWER = 10_000
PAIRS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}"}
CLOSING = frozenset(PAIRS.values())
CALCULUS = re.compile(r"\\i*int(?![a-z]).*d\s*\\?[a-zA-Z]|\\lim\s*_|\\(?:sum|prod)\s*_\s*\{[^{}]+=.*\\infty", re.DOTALL)
REPEATED = re.compile(r"(?:[!%^'\s+*/=_.,<>|&-]|\\%){5}")


Heavy = Callable[..., bool]


class Outcome(NamedTuple):
    """A grade without its time."""

    verdict: Verdict
    extracted: str | None = None
    canonical: str | None = None
    reward: float = 0.0
    detail: str | None = None


def decided(same: bool, extracted: str, canonical: str | None) -> Outcome:
    return Outcome(Verdict.correct if same else Verdict.wrong, extracted, canonical, float(same))


def kind(task: str) -> str:
    return "python" if task.startswith("python:") else task


def gold_answer(gold: str, task: str) -> str:
    """The answer inside a gold that is typed as a response (a box, a `####` line) or as the answer alone."""
    return extract(gold, task=task, form="answer", think_end="", join=True) or ""


@lru_cache(maxsize=16_384)
def gold_problem(gold: str, task: str) -> str | None:
    """Why a gold cannot be graded against, without sympy: None does not promise that its mathematics is read."""
    if not isinstance(gold, str):
        return f"the gold is no text but {type(gold).__name__}"
    if kind(task) == "countdown":
        try:
            countdown.read_gold(gold)
        except ValueError as error:
            return str(error)
        return None
    if kind(task) == "python":
        return None
    answer = gold_answer(gold, task)
    if fast.literal(fast.strip(answer)) is not None:
        return None
    if len(answer) > MAX_ANSWER:
        return f"the gold has {len(answer)} characters"
    from tseeds.grading.compare import gold_problem as problem

    return problem(answer)


def before_worker(gold: str, text: str, form: str, options: GradingOptions) -> Outcome | str:
    """The verdict if it needs no worker, else the answer that a worker is to compare (for python: the text)."""
    task = kind(options.task)
    if task == "python":
        return text
    if task == "countdown":
        return _countdown(gold, text, form, options)
    extracted = extract(text, task=task, form=form, think_end=options.think_end, join=options.join_boxes)
    if extracted is not None and not extracted.strip():
        extracted = None
    answer = gold if "box" not in gold and "##" not in gold else gold_answer(gold, task)
    if extracted is not None:
        tolerance = Fraction(options.decimal_tolerance).limit_denominator(10**15)
        found = fast.quick(answer, extracted, tolerance=tolerance)
        if found is not None and (options.unevaluated or found[0]):
            return decided(found[0], extracted, found[1])
    problem = gold_problem(gold, options.task)
    if problem is not None:
        return Outcome(Verdict.unparsable_gold, extracted, detail=problem)
    if extracted is None:
        return Outcome(Verdict.no_answer)
    return extracted


def _countdown(gold: str, text: str, form: str, options: GradingOptions) -> Outcome:
    problem = gold_problem(gold, options.task)
    if problem is not None:
        return Outcome(Verdict.unparsable_gold, detail=problem)
    answer = countdown.answer_of(text, form=form, think_end=options.think_end)
    if answer is None:
        return Outcome(Verdict.no_answer)
    answer = " ".join(answer.split())
    try:
        solved, canonical = countdown.evaluate(countdown.read_gold(gold), answer)
    except countdown.Malformed:
        solved, canonical = False, None
    return decided(solved, answer[:MAX_ANSWER], canonical)


def in_worker(gold: str, answer: str, options: GradingOptions, heavy: Heavy) -> Outcome:
    """The verdict of a pair that left the fast path. `heavy` runs a function of `fallback` under its own time limit."""
    task = kind(options.task)
    if task == "python":
        return _verified(gold, answer, options.task)
    from tseeds.grading.compare import Undecided, canonical, read, same_answer
    from tseeds.grading.normalise import normalise

    gold = gold_answer(gold, task)
    if len(answer) > MAX_ANSWER:
        same = "".join(gold.split()) == "".join(answer.split())
        return decided(same, answer, None)
    left, right = normalise(gold), normalise(answer)
    if not right:
        return Outcome(Verdict.no_answer, answer)
    try:
        return decided(same_answer(left, right, options), answer, canonical(right))
    except Undecided:
        pass
    if any(len(side) > 1_000 or "\\text" in side for side in (left, right)):
        return decided(False, answer, canonical(right))
    if not all(read(side) is not None or _plausible(side) for side in (left, right)):
        return decided(False, answer, canonical(right))
    return decided(heavy("same", left, right), answer, canonical(right))


def _plausible(text: str) -> bool:
    """Whether a LaTeX grammar could read what the own parser does not: balanced, and with something that only it knows."""
    stack: list[str] = []
    for token in re.findall(r"\\.|[(){}\[\]]", text):
        if token in PAIRS:
            stack.append(token)
            if len(stack) > 40:
                return False
        elif token in CLOSING:
            closing = PAIRS[stack.pop()] if stack else ""
            # Half-open intervals close one kind of bracket with another.
            if closing != token and {closing, token} != {")", "]"}:
                return False
    if stack or REPEATED.search(text):
        return False
    from tseeds.grading.parse import is_known

    return bool(CALCULUS.search(text)) or any(
        not any(is_known(name[:length]) for length in range(2, len(name) + 1))
        for name in re.findall(r"\\([A-Za-z]{2,})", text)
    )


def check_gold_in_worker(gold: str, task: str, heavy: Heavy) -> str | None:
    """Why a gold cannot be parsed, with sympy's help where the own parser does not read it."""
    from tseeds.grading.compare import read, words
    from tseeds.grading.normalise import normalise

    text = normalise(gold_answer(gold, task))
    if words(text) is not None or read(text) is not None or "\\text" in text or "\\mbox" in text:
        return None
    if _plausible(text) and heavy("readable", text):
        return None
    return f"the gold {gold[:60]!r} cannot be read as mathematics"


@lru_cache(maxsize=8)
def verifier(task: str) -> Callable[[str, str], Any]:
    """The function that `python:path/to/file.py:function` names.

    Raises:
        ImportError, AttributeError, OSError: it is not there.
    """
    path, _, name = task.removeprefix("python:").rpartition(":")
    spec = importlib.util.spec_from_file_location("tseeds_user_verifier", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    if not callable(function):
        raise AttributeError(f"{name} in {path} is no function")
    return function  # type: ignore[no-any-return]


def load_quietly(task: str) -> None:
    """Load a verifier ahead of time; what is wrong with it is told with each answer."""
    try:
        verifier(task)
    except Exception:
        verifier.cache_clear()


def _verified(gold: str, text: str, task: str) -> Outcome:
    try:
        result = verifier(task)(gold, text)
        extracted: Any = None
        if isinstance(result, tuple):
            result, extracted = result
        reward = float(result)
        if reward != reward or reward in (float("inf"), float("-inf")):
            raise ValueError(f"the verifier returned {reward}")
    except MemoryError:
        raise
    except Exception as error:
        return Outcome(Verdict.error, detail=f"{type(error).__name__}: {error}"[:500])
    verdict = Verdict.correct if reward >= 1.0 else Verdict.wrong
    shown = None if extracted is None else str(extracted)
    return Outcome(verdict, shown, shown, reward)
