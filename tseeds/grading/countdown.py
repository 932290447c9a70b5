"""Countdown: reach a target from given numbers, each used exactly once. Evaluated by an own small parser.

An answer is a chain of steps, `3 * 8 = 24 ; 24 - 5 = 19`, in which every step uses numbers that are still there and puts its
result back, or one expression, `3 * 8 - 5`, alone or in a box.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tseeds.grading.extract import after_thinking, boxed_answer
from tseeds.grading.normalise import plain_unicode

MAX_TEXT = 4_000
MAX_DIGITS = 40
MAX_DEPTH = 50
TOKEN = re.compile(r"\s*(?:(\d+)|(.))", re.DOTALL)
LATEX = re.compile(r"\\(?:left|right|,|;|!|\[|\]|\(|\)| )|[$]")
SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "x": "*", "X": "*"}
END = re.compile(r"<\|?/?[A-Za-z_]+\|?>")


class Malformed(ValueError):
    """The text is no chain and no expression."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers to be used and the value to be reached."""

    numbers: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True)
class Term:
    """A value with the canonical text of its expression."""

    value: Fraction
    text: str


def read_gold(gold: str) -> Problem:
    """The problem of a gold such as `{"numbers": [3, 8, 5], "target": 19}`.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        data = json.loads(gold)
    except (ValueError, RecursionError):
        raise ValueError("the gold is no JSON object with numbers and target") from None
    if not isinstance(data, dict) or not {"numbers", "target"} <= set(data):
        raise ValueError("the gold is no JSON object with numbers and target")
    numbers, target = data["numbers"], data["target"]
    if not isinstance(numbers, list) or not 1 <= len(numbers) <= 20 or not all(type(n) is int for n in numbers):
        raise ValueError("numbers must be a list of 1 to 20 integers")
    if type(target) is not int or any(abs(n) >= 10**MAX_DIGITS for n in (*numbers, target)):
        raise ValueError("target must be an integer")
    return Problem(tuple(numbers), target)


class _Reader:
    """Arithmetic with + - * / and brackets over numbers taken from a pool."""

    def __init__(self, text: str, pool: list[Term]) -> None:
        self.tokens = [match.group(1) or match.group(2) for match in TOKEN.finditer(text) if match.group().strip()]
        self.at = 0
        self.pool = pool
        self.steps = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""

    def whole(self) -> Term:
        term = self.total(0)
        if self.at != len(self.tokens):
            raise Malformed(f"cannot read {self.peek()!r}")
        return term

    def total(self, depth: int) -> Term:
        term = self.product(depth)
        while self.peek() in ("+", "-"):
            term = combine(term, self.take(), self.product(depth))
        return term

    def product(self, depth: int) -> Term:
        term = self.factor(depth)
        while self.peek() in ("*", "/"):
            term = combine(term, self.take(), self.factor(depth))
        return term

    def factor(self, depth: int) -> Term:
        if depth > MAX_DEPTH:
            raise Malformed("nested too deeply")
        token = self.take()
        if token == "(":
            term = self.total(depth + 1)
            if self.take() != ")":
                raise Malformed("unclosed bracket")
            return term
        negative = token == "-"
        if negative:
            token = self.take()
        if not token.isdigit() or len(token) > MAX_DIGITS:
            raise Malformed(f"cannot read {token or 'the end'!r}")
        return self.draw(-int(token) if negative else int(token))

    def draw(self, value: int) -> Term:
        """Take a number out of the pool."""
        for at, term in enumerate(self.pool):
            if term.value == value:
                return self.pool.pop(at)
        raise ValueError(f"{value} is not there (any more)")


class _Claims(_Reader):
    """Reads the value behind an equals sign: any number, not one of the pool."""

    def draw(self, value: int) -> Term:
        return Term(Fraction(value), str(value))


def combine(left: Term, sign: str, right: Term) -> Term:
    """One operation; operands of + and * in the text are ordered."""
    if sign == "+":
        value = left.value + right.value
    elif sign == "-":
        value = left.value - right.value
    elif sign == "*":
        value = left.value * right.value
    elif right.value == 0:
        raise ValueError("division by zero")
    else:
        value = left.value / right.value
    texts = [left.text, right.text]
    if sign in "+*":
        texts.sort(key=lambda text: (len(text), text))
    return Term(value, f"({texts[0]}{sign}{texts[1]})")


def statements(text: str) -> list[str]:
    """The steps of a chain."""
    text = END.sub(" ", text)
    text = LATEX.sub(" ", text)
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    return [part.strip() for part in re.split(r"[;\n,]|\\\\", text) if part.strip(" .")]


def evaluate(problem: Problem, text: str) -> tuple[bool, str | None]:
    """Whether a chain or expression solves the problem, and its canonical expression if it does.

    Raises:
        Malformed: the text is neither.
    """
    if len(text) > MAX_TEXT:
        raise Malformed("too long")
    pool = [Term(Fraction(n), str(n)) for n in problem.numbers]
    parts = statements(text)
    if not parts:
        raise Malformed("nothing there")
    last: Term | None = None
    for part in parts:
        left, equals, right = part.partition("=")
        if not equals and len(parts) > 1:
            raise Malformed("a step without its result")
        try:
            last = _Reader(left.strip(" ."), pool).whole()
            if equals and _Claims(right.strip(" ."), []).whole().value != last.value:
                return False, None
        except Malformed:
            raise
        except ValueError:
            return False, None
        pool.append(last)
    assert last is not None
    solved = len(pool) == 1 and last.value == problem.target
    return solved, last.text.removeprefix("(").removesuffix(")") if solved else None


def answer_of(text: str, *, form: str, think_end: str) -> str | None:
    """The chain or expression of a response: the last box, else the whole text after the thinking."""
    visible = text if form == "answer" else after_thinking(text, think_end=think_end)
    if visible is None:
        return None
    visible = plain_unicode(visible.replace("\n", ";")) if len(visible) <= MAX_TEXT else visible
    boxed = boxed_answer(visible) if "box" in visible else None
    if boxed is None and "boxed" in visible:
        return None
    answer = visible if boxed is None else boxed
    return answer if any(char.isdigit() for char in answer) else None


def canonical(gold: str, text: str) -> Any:
    """The canonical expression of a correct answer, None for others: what counts distinct solutions."""
    solved = answer_of(text, form="response", think_end="</think>")
    if solved is None:
        return None
    try:
        return evaluate(read_gold(gold), solved)[1]
    except Malformed:
        return None
