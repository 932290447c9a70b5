"""The second toy task: evaluate a nested expression of four numbers, one step after the other.

A problem is an expression such as ``7 * ( 3 + 4 ) - 8``. A step puts two numbers of one sum or product together; which two
come first is free, so ``2 + 9 - 4 + 6`` has many chains, among them ``9 - 4 = 5 ; 2 + 6 = 8 ; 5 + 8 = 13``. A subtraction
takes the smaller number from the larger one, every number on the way lies within 0..99, and the response ends on
``\\boxed{ 13 }``, which the ordinary grader reads. Task and recipe are ours.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

LARGEST = 99
NUMBERS = range(1, 21)
STEPS = 3
SHAPES = (
    "a ± b ± c ± d",
    "a ± b ± c * d",
    "a ± b * c ± d",
    "a * b ± c ± d",
    "a * b ± c * d",
    "a * ( b ± c ) ± d",
    "a ± b * ( c ± d )",
    "a * ( b ± c ± d )",
    "( a ± b ± c ) * d",
    "a * b * ( c ± d )",
    "( a ± b ) * ( c ± d )",
    "a ± ( b ± c ± d )",
)
"""Letters stand for numbers, ± for + or -."""
SLIPS = (-10, -2, -1, 1, 2, 10)
"""How far a wrong result lies from the right one."""

Node = list[Any]
"""[sign, content]: sign 1 or -1; content a number, or (operation "+" or "*", list of nodes)."""


def parse(expression: str) -> Node:
    """The tree of an expression whose words stand apart; neighbouring sums and products are one node each.

    >>> parse("2 * 3 - 4")
    [1, ('+', [[1, ('*', [[1, 2], [1, 3]])], [-1, 4]])]
    """
    words = expression.split()

    def joined(operation: str, nodes: list[Node]) -> Node:
        return nodes[0] if len(nodes) == 1 and nodes[0][0] == 1 else [1, (operation, nodes)]

    def factor() -> Node:
        word = words.pop(0)
        if word != "(":
            return [1, int(word)]
        inside = total()
        words.pop(0)
        return inside

    def product() -> Node:
        nodes = [factor()]
        while words and words[0] == "*":
            words.pop(0)
            nodes.append(factor())
        return joined("*", nodes)

    def total() -> Node:
        nodes = [product()]
        while words and words[0] in "+-":
            sign = 1 if words.pop(0) == "+" else -1
            nodes.append([sign, product()[1]])
        return joined("+", nodes)

    return total()


def _choices(node: Node) -> Iterator[tuple[Node, int, int]]:
    """(node, i, j) for every two numbers that one step may put together."""
    if isinstance(node[1], int):
        return
    children = node[1][1]
    for child in children:
        yield from _choices(child)
    numbers = [k for k, (_, content) in enumerate(children) if isinstance(content, int)]
    yield from ((node, i, j) for n, i in enumerate(numbers) for j in numbers[n + 1 :])


def _step(node: Node, i: int, j: int, slip: int) -> str | None:
    """Put children i and j of a node together in place; the step as text, None where it leaves 0..99."""
    operation, children = node[1]
    (s, a), (t, b) = children[i], children[j]
    if operation == "*":
        sign, text, result = 1, f"{a} * {b}", a * b
    elif s == t:
        sign, text, result = s, f"{a} + {b}", a + b
    else:
        (sign, a), (_, b) = sorted(((s, a), (t, b)), key=lambda term: (-term[1], -term[0]))
        text, result = f"{a} - {b}", a - b
    result += slip
    if not 0 <= result <= LARGEST:
        return None
    children[i] = [sign, result]
    del children[j]
    if len(children) == 1:
        if sign < 0 and result:
            return None  # a negative sum: no expression of ours has one
        node[1] = result
    return f"{text} = {result}"


def chain(expression: str, rng: random.Random, *, wrong: bool = False) -> tuple[str, int] | None:
    """(response, answer) in a random order of steps, or None where it leaves 0..99; ``wrong``: one step's result is off."""
    root = parse(expression)
    slip = rng.randrange(STEPS) if wrong else STEPS
    steps: list[str] = []
    while not isinstance(root[1], int):
        node, i, j = rng.choice(list(_choices(root)))
        step = _step(node, i, j, rng.choice(SLIPS) if len(steps) == slip else 0)
        if step is None:
            return None
        steps.append(step)
    return f"{' ; '.join(steps)} ; \\boxed{{ {root[1]} }}", root[1]


def is_solution(expression: str, response: str) -> bool:
    """Whether every step puts two numbers together that may be, is right, and the answer is the last result.

    >>> is_solution("2 + 9 - 4 + 6", "9 - 4 = 5 ; 2 + 6 = 8 ; 5 + 8 = 13 ; \\\\boxed{ 13 }")
    True
    """
    states = [parse(expression)]  # equal numbers at several places: every place is followed
    *steps, answer = response.split(" ; ")
    for step in steps:
        following = []
        for state in states:
            for n in range(len(list(_choices(state)))):
                copy = _copied(state)
                if _step(*list(_choices(copy))[n], 0) in (step, _swapped(step)):
                    following.append(copy)
        states = following
    return any(answer == f"\\boxed{{ {state[1]} }}" for state in states)


def _copied(node: Node) -> Node:
    sign, content = node
    return [sign, content if isinstance(content, int) else (content[0], [_copied(child) for child in content[1]])]


def _swapped(step: str) -> str:
    words = step.split(" ")
    return " ".join([words[2], words[1], words[0], *words[3:]]) if len(words) == 5 and words[1] in "+*" else step


def draw(rng: random.Random) -> str:
    """A random expression; not every one has a chain within 0..99."""
    words = rng.choice(SHAPES).split()
    return " ".join(
        str(rng.choice(NUMBERS)) if word.isalpha() else rng.choice("+-") if word == "±" else word for word in words
    )


def held_out(expression: str) -> bool:
    """Whether an expression belongs to the tenth of all that no training ever sees, whatever the seed."""
    return hashlib.sha256(expression.encode()).digest()[0] < 26


def problems(*, seed: int, train: int, test: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Train and held-out rows {id, problem, gold}, each expression once and with a chain within 0..99."""
    rng = random.Random(f"arithmetic {seed}")
    rows: dict[str, dict[str, dict[str, str]]] = {"train": {}, "test": {}}
    while len(rows["train"]) < train or len(rows["test"]) < test:
        expression = draw(rng)
        solved = chain(expression, rng)
        name, size = ("test", test) if held_out(expression) else ("train", train)
        if solved is None or expression in rows[name] or len(rows[name]) == size:
            continue
        made = {"id": f"arithmetic-{name}-{len(rows[name]):04d}", "problem": expression, "gold": str(solved[1])}
        rows[name][expression] = made
    return list(rows["train"].values()), list(rows["test"].values())


def examples(seed: int, *, misses: float) -> Iterator[tuple[str, str]]:
    """(problem, response) without end for the warm start; a share ``misses`` of the responses has a wrong step."""
    rng = random.Random(f"arithmetic warm start {seed}")
    while True:
        expression = draw(rng)
        if not held_out(expression):
            made = chain(expression, rng, wrong=rng.random() < misses)
            if made is not None:
                yield expression, made[0]
