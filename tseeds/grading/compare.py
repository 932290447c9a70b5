"""Is this answer the gold? Trees against trees: exactly, or with as many digits as it takes, never within an absolute error."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import mp

from tseeds.grading.normalise import normalise
from tseeds.grading.options import GradingOptions
from tseeds.grading.parse import (
    DOTS,
    EMPTY,
    FUNCTIONS,
    INFINITY,
    PLAIN_GREEK,
    UNITS,
    Node,
    ParseError,
    members,
    names,
    num,
    number_word,
    parse,
    sym,
)
from tseeds.grading.values import (
    PRIMES,
    Huge,
    NotExact,
    Numeric,
    Pole,
    Undefined,
    exact,
    modular,
    real,
    substitute,
    symbols,
    walk,
)

DIGITS = 60
CONSTANT_DIGITS = (240, 900)
POINT_DIGITS = (240,)
MAX_MEMBERS = 80
FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
SCALARS = names("num based sym const neg add mixed mul div pow pct deg fn app sum prod group pm mp name unit")
WHOLE_ONLY = names("factorial factorial2 binom floor ceil gcd lcm")


class Undecided(ValueError):
    """This module cannot tell; another method may."""


WRAPPER = re.compile(
    r"\\(?:text|textrm|textbf|textit|textnormal|textsf|texttt|mbox|hbox|emph|mathrm|mathbf|mathit|mathsf|mathtt|operatorname|"
    r"boxed|fbox|bm|boldsymbol)\s*\{([^{}]*)\}"
)
CHOICE = re.compile(
    r"(?:\(([A-Ha-h])\)|([A-Ha-h]))\s*(?:[.:)]\s*(?P<rest>.+)|[.:)]|(?<=\))\s*(?P<more>.+))?", re.DOTALL
)
WORD = re.compile(r"[A-Za-z]{3,}")
PROSE_LETTERS = re.compile(r"[A-Za-z\s'\-.,!?]+")
NOTHING = frozenset(
    ("no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set", "the empty set")
)
EVERYTHING = frozenset(("all real numbers", "all reals", "all real", "the real numbers", "every real number"))
UNIT_TAIL = re.compile(
    r"(?:\\(?:text|mbox|mathrm|textrm|textnormal)\s*\{\s*([A-Za-z ./]+?)\s*\}(?:\s*\^\s*\{?\d\}?)?|(?<=[\s}])([a-z]{4,}))\s*$"
)


def unwrap(text: str) -> str:
    r"""Plain text of `\text{...}` and its kin."""
    for _ in range(4):
        new = WRAPPER.sub(r"\1", text)
        if new == text:
            break
        text = new
    return " ".join(text.split()).strip()


def strip_unit_tail(text: str) -> str:
    r"""Without `\text{ cm}` at the end, if something is left."""
    while match := UNIT_TAIL.search(text):
        rest = text[: match.start()].strip()
        unit = re.split(r"[ /]+", match.group(1) or match.group(2))
        if not rest or not all(word.strip(".") in UNITS for word in unit if word):
            break
        text = rest
    return text


def words(text: str) -> str | None:
    """The answer as lower-case words, None if it is mathematics rather than words."""
    stripped = strip_unit_tail(text)
    plain = unwrap(stripped)
    if not plain or not PROSE_LETTERS.fullmatch(plain):
        return None
    if "\\text" not in stripped and "\\mbox" not in stripped and not _wordy(plain):
        return None
    if len(plain.replace(" ", "")) < 2:
        return None
    return " ".join(re.sub(r"[.,!?]", " ", plain).split()).casefold()


def _wordy(plain: str) -> bool:
    found = WORD.findall(plain)
    return bool(found) and not any(
        word in FUNCTIONS or word in PLAIN_GREEK or word.lower() in ("and", "infinity", "infty", "inf")
        for word in found
    )


def choice(text: str) -> tuple[str, bool] | None:
    """The letter of a multiple-choice answer, and whether its form says that it is one."""
    plain = unwrap(text)
    match = CHOICE.fullmatch(plain)
    if match is None:
        return None
    letter = match.group(1) or match.group(2)
    rest = match.group("rest") or match.group("more")
    if rest is not None and re.match(r"[\^_+\-*/=<>]", rest):
        return None
    marked = match.group(1) is not None or "\\text" in text or "\\math" in text or letter.isupper() or rest is not None
    return letter.upper(), marked


def squeeze(text: str) -> str:
    """A normalised text without spacing, braces and wrappers: equal squeezed texts are the same answer."""
    text = re.sub(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|operatorname)(?![A-Za-z])", "", text)
    return re.sub(r"[\s{}]+", "", text)


def gold_problem(gold: str) -> str | None:
    """Why a gold cannot be graded against, as far as this module can tell; None if it can.

    >>> gold_problem("  ")
    'the gold is empty'
    """
    if not gold.strip():
        return "the gold is empty"
    if any(ord(char) < 32 and char not in "\t\n\r" for char in gold):
        return "the gold holds control characters (a backslash that was read as an escape?)"
    if any(0xD800 <= ord(char) < 0xE000 for char in gold):
        return "the gold holds lone surrogates"
    text = normalise(gold)
    if not text:
        return "the gold is empty"
    if text.casefold() in ("nan", "null", "none", "n/a", "undefined behavior", "[]", "\\{\\}\\{\\}"):
        return f"the gold is {text!r}"
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth < 0:
            break
    if depth:
        return "the gold has unbalanced braces"
    try:
        tree = read(text)
        if tree is not None:
            exact(tree)
    except Pole:
        return "the gold divides by zero"
    except (NotExact, Undefined):
        pass
    if "\\text" not in text and "\\mbox" not in text:
        plain = words(text)
        if plain is not None and (len(plain.split()) > 4 or (" " in plain and gold.rstrip().endswith("."))):
            return "the gold is a sentence, not an answer"
    return None


def expand(node: Node) -> list[Node]:
    r"""The values that `\pm` stands for: linked with `\mp`, otherwise all combinations."""
    if node.head == "list":
        return [value for item in node.args[1:] for value in expand(item)]
    if node.head == "set":
        return [Node("set", tuple(value for item in node.args for value in expand(item)))]
    found = [part for part in walk(node) if part.head in ("pm", "mp")]
    if not found or len(found) > 5:
        return [node]
    linked = any(part.head == "mp" for part in found)
    signs: Iterator[tuple[int, ...]]
    signs = iter([(1,) * len(found), (-1,) * len(found)]) if linked else itertools.product((1, -1), repeat=len(found))
    results = []
    for assignment in signs:
        results.append(_signed(node, list(assignment)))
    return results


def _signed(node: Node, signs: list[int]) -> Node:
    def replace(part: Node) -> Node | None:
        if part.head not in ("pm", "mp"):
            return None
        sign = signs.pop() * (1 if part.head == "pm" else -1)
        left, right = substitute(part.args[0], replace), substitute(part.args[1], replace)
        term = right if sign > 0 else Node("neg", (right,))
        return term if left == num(0) else Node("add", (left, term))

    return substitute(node, replace)


def is_name(node: Node) -> bool:
    """Whether a node only names a quantity: x, f(x), AB, |AB|, (p, q), NO/BO, sin A."""
    if node.head in ("sym", "app"):
        return True
    if node.head == "const":
        return node.args[0] in ("e", "i")
    if node.head == "tuple":
        return all(is_name(item) for item in members(node))
    if node.head == "mul":
        return all(
            (part.head == "sym" and part.args[0][0].isupper()) or part.head == "const" for part in node.args
        ) or (
            len(node.args) == 2
            and node.args[0].head == "sym"
            and (node.args[1].head == "sym" and len(node.args[1].args[0]) == 1)
            and node.args[0].args[0].isupper()
        )
    if node.head == "div":
        return all(is_name(part) for part in node.args)
    if node.head == "deg":
        return is_name(node.args[0])
    if node.head == "fn":
        return node.args[0] in ("abs", "sin", "cos", "tan", "cot", "det", "arg", "max", "min") and is_name(node.args[1])
    return False


def is_call(node: Node) -> bool:
    """`f(x)` or its reading as a product of a letter and a bracketed letter."""
    return node.head == "app"


def _no_numbers(node: Node) -> bool:
    """No number but in exponents and arguments: `m+n`, `x^2+y^2`."""
    if node.head == "num":
        return False
    if node.head == "pow":
        return _no_numbers(node.args[0])
    if node.head in ("app", "sym", "const"):
        return True
    return all(_no_numbers(arg) for arg in node.args if isinstance(arg, Node))


def tidy(node: Node) -> Node:
    """Drop approximations after an exact value and the middle of chains of equalities."""
    if node.head == "list":
        return Node("list", (node.args[0], *(tidy(item) for item in node.args[1:])))
    if node.head == "unit" and node.args[0].head == "rel":
        inner = tidy(node.args[0])
        if inner.head != "rel":
            return Node("unit", (inner, node.args[1]))
        return Node("rel", (*inner.args[:-1], Node("unit", (inner.args[-1], node.args[1]))))
    if node.head in ("deg", "pct") and node.args[0].head == "rel":
        inner = tidy(node.args[0])
        return Node("rel", (*inner.args[:-1], Node(node.head, (inner.args[-1],)))) if inner.head == "rel" else inner
    if node.head != "rel":
        return node
    ops, terms = list(node.args[0]), list(node.args[1:])
    if "~" in ops:
        at = ops.index("~")
        if at == 0 and is_name(terms[0]):
            ops[0] = "="
            if "~" in ops:
                cut = ops.index("~")
                ops, terms = ops[:cut], terms[: cut + 1]
        else:
            ops, terms = ops[:at], terms[: at + 1]
    if len(ops) > 1 and all(op == "=" for op in ops):
        ops, terms = ["="], [terms[0], terms[-1]]
    if (
        ops == ["="]
        and symbols(terms[0]) == frozenset()
        and is_name(terms[1])
        and terms[1].head == "sym"
        and _constant(terms[0])
    ):
        terms.reverse()
    return terms[0] if not ops else Node("rel", (tuple(ops), *terms))


def _constant(node: Node) -> bool:
    return node.head in SCALARS and not symbols(node)


def is_equation(node: Node) -> bool:
    return node.head == "rel" and node.args[0] == ("=",)


class Region:
    """A set of real numbers: leaves are intervals (low, high, low closed, high closed), nodes union, inter, minus."""

    def __init__(self, head: str, *args: Any) -> None:
        self.head, self.args = head, args

    def ends(self) -> list[Any]:
        if self.head == "leaf":
            return [end for end in self.args[:2] if not mp.isinf(end)]
        return [end for part in self.args for end in part.ends()]

    def cells(self, ends: list[Any]) -> list[bool]:
        """Membership of each end (odd positions) and of the gaps around them (even positions)."""
        if self.head == "leaf":
            low, high, low_closed, high_closed = self.args
            first = -1 if mp.isinf(low) else _position(ends, low)
            last = len(ends) if mp.isinf(high) else _position(ends, high)
            out = []
            for cell in range(2 * len(ends) + 1):
                at = cell // 2
                if cell % 2:
                    out.append(first < at < last or (at == first and low_closed) or (at == last and high_closed))
                    if first == last:
                        out[-1] = at == first and low_closed and high_closed
                else:
                    out.append(first <= at - 1 and at <= last and first < last)
            return out
        parts = [part.cells(ends) for part in self.args]
        if not parts:
            return [False] * (2 * len(ends) + 1)
        if self.head == "union":
            return [any(cell) for cell in zip(*parts, strict=True)]
        if self.head == "inter":
            return [all(cell) for cell in zip(*parts, strict=True)]
        return [a and not any(rest) for a, *rest in zip(*parts, strict=True)]


NO_REGION = Region("union")
LINE = Region("leaf", -mp.inf, mp.inf, False, False)


def _close(a: Any, b: Any) -> bool:
    with mp.workdps(DIGITS):
        return bool(a == b or abs(a - b) <= mp.mpf(10) ** -40 * max(abs(a), abs(b)))


def _position(ends: list[Any], value: Any) -> int:
    return next(at for at, end in enumerate(ends) if _close(end, value))


def same_region(a: Region, b: Region) -> bool:
    """Whether two regions have the same members: decided at every end and in every gap between ends."""
    ends: list[Any] = []
    for end in sorted([*a.ends(), *b.ends()]):
        if not ends or not _close(ends[-1], end):
            ends.append(end)
    return a.cells(ends) == b.cells(ends)


def region(node: Node) -> Region | None:
    """A node as a set of real numbers, None if it is none."""
    try:
        return _region(node)
    except (Undefined, Huge, NotExact):
        return None


def _region(node: Node) -> Region | None:
    head, args = node
    if node == EMPTY:
        return NO_REGION
    if head == "name":
        return {
            "R": LINE,
            "R+": Region("leaf", mp.mpf(0), mp.inf, False, False),
            "R-": Region("leaf", -mp.inf, mp.mpf(0), False, False),
            "R*": Region("minus", LINE, Region("leaf", mp.mpf(0), mp.mpf(0), True, True)),
        }.get(args[0])
    if head == "tuple" and len(args) == 4:
        low, high = real(args[2]), real(args[3])
        if low > high:
            return None
        return Region("leaf", low, high, args[0] == "[", args[1] == "]")
    if head == "set":
        points = [real(item) for item in args]
        return Region("union", *(Region("leaf", point, point, True, True) for point in points))
    if head in ("union", "inter", "minus"):
        parts = [_region(part) for part in args]
        return None if any(part is None for part in parts) else Region(head, *parts)
    if head == "rel":
        return _region_of_relation(node)
    if head == "list":
        parts = [_region(part) for part in args[1:]]
        if any(part is None for part in parts):
            return None
        if not all(part.head == "rel" for part in args[1:]):
            return None
        exclusions = any("!=" in part.args[0] or "notin" in part.args[0] for part in args[1:])
        if args[0] == "and" or (args[0] == "," and exclusions):
            return Region("inter", *parts)
        if args[0] == "or":
            return Region("union", *parts)
        both = Region("inter", *parts)
        return Region("union", *parts) if same_region(both, NO_REGION) else both
    if head == "setb":
        item, joined, *conditions = args
        start = _region(item) if item.head == "rel" else LINE
        rest = _region(
            Node("list", ("or" if joined == "or" else "and", *conditions)) if len(conditions) > 1 else conditions[0]
        )
        return None if start is None or rest is None else Region("inter", start, rest)
    return None


def _region_of_relation(node: Node) -> Region | None:
    ops, terms = node.args[0], node.args[1:]
    if ops == ("in",) and terms[0].head in ("sym", "app"):
        return _region(terms[1])
    if ops == ("notin",) and terms[0].head in ("sym", "app"):
        inner = _region(terms[1])
        return None if inner is None else Region("minus", LINE, inner)
    names = symbols(node)
    if len(names) != 1 or not set(ops) <= set(FLIP) or set(ops) == {"="}:
        return None
    (name,) = names
    if len(ops) == 1 and (distance := _distance(terms[0], ops[0], terms[1])) is not None:
        return _region(distance)
    parts = []
    for left, op, right in zip(terms, ops, terms[1:], strict=False):
        part = _half_line(left, op, right, name)
        if part is None:
            return None
        parts.append(part)
    return Region("inter", *parts)


def _distance(left: Node, op: str, right: Node) -> Node | None:
    """`|x - a| < r` without its bars."""
    if right.head == "fn" and right.args[0] == "abs" and not symbols(left):
        left, op, right = right, FLIP[op], left
    if left.head != "fn" or left.args[0] != "abs" or symbols(right) or op not in ("<", "<=", ">", ">="):
        return None
    inner, minus = left.args[1], Node("neg", (right,))
    if op in ("<", "<="):
        return Node("rel", ((op, op), minus, inner, right))
    return Node("list", ("or", Node("rel", ((op,), inner, right)), Node("rel", ((FLIP[op],), inner, minus))))


def _half_line(left: Node, op: str, right: Node, name: str) -> Region | None:
    for side, sign in ((left, -1), (right, 1)):
        if _infinite(side):
            return LINE if op in ("<", "<=", ">", ">=") and sign else None
    difference = Node("add", (left, Node("neg", (right,))))
    with mp.workdps(DIGITS):
        at_0, at_1, at_2 = (Numeric({name: Fraction(k)}).value(difference) for k in (0, 1, 2))
        slope = at_1 - at_0
        if mp.im(at_0) or mp.im(at_1) or not slope or abs(at_2 - at_1 - slope) > mp.mpf(10) ** -40 * abs(slope):
            return None
        bound = -at_0 / slope
    if op == "=":
        return Region("leaf", bound, bound, True, True)
    if op == "!=":
        return Region("minus", LINE, Region("leaf", bound, bound, True, True))
    closed = op in ("<=", ">=")
    below = op in ("<", "<=")
    if slope < 0:
        below = not below
    return Region("leaf", -mp.inf, bound, False, closed) if below else Region("leaf", bound, mp.inf, closed, False)


def _infinite(node: Node) -> bool:
    return node == INFINITY or (node.head in ("neg", "add") and node.args == (INFINITY,))


def is_region_like(node: Node) -> bool:
    """Whether a node can only be read as a set of numbers."""
    if node.head in ("union", "inter", "minus", "setb", "name"):
        return True
    if node.head == "tuple" and len(node.args) == 4:
        return node.args[0] + node.args[1] in ("[)", "(]") or any(_infinite(item) for item in members(node))
    if node.head == "rel":
        return bool({"<", ">", "<=", ">=", "!=", "in", "notin"} & set(node.args[0]))
    if node.head == "list":
        return all(is_region_like(item) for item in node.args[1:])
    return False


MEASURES: dict[str, dict[str, str]] = {
    "length": {
        "mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000", "in": "127/5000", "ft": "381/1250",
        "yd": "1143/1250", "mi": "201168/125",
    },
    "mass": {"mg": "1/1000", "g": "1", "kg": "1000"},
    "time": {"ms": "1/1000", "sec": "1", "min": "60", "hr": "3600", "day": "86400", "week": "604800"},
    "money": {"cent": "1", "dollar": "100"},
}  # fmt: skip
DIMENSIONS = {
    unit: (dimension, Fraction(factor)) for dimension, table in MEASURES.items() for unit, factor in table.items()
}
UNIT_NAMES = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m",
    "kilometer": "km", "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi",
    "gram": "g", "kilogram": "kg", "milligram": "mg", "second": "sec", "minute": "min", "hour": "hr",
}  # fmt: skip


def known_unit(text: str) -> tuple[str, Fraction] | None:
    """Dimension and factor of a unit that can be converted: lengths and their powers, masses, times, money."""
    text = text.lower().replace("sq.", "square").replace("cu.", "cubic").strip(" .")
    power = 1
    match = re.fullmatch(r"(.*?)\s*\^\s*\{?([23])\}?", text)
    if match:
        text, power = match.group(1).strip(), int(match.group(2))
    for word, value in (("square ", 2), ("sq ", 2), ("cubic ", 3), ("cu ", 3)):
        if text.startswith(word):
            text, power = text[len(word) :], value
    text = text.strip(" .")
    for spelling in (text, text.removesuffix("s")):
        spelling = UNIT_NAMES.get(spelling, spelling)
        if spelling in DIMENSIONS:
            dimension, factor = DIMENSIONS[spelling]
            return f"{dimension}^{power}", factor**power
    return None


def plain_measure(node: Node) -> Node:
    """The value of `5m` or `5 m^2` written without a text wrapper: a number times a letter that is a common unit."""
    if node.head == "mul" and len(node.args) == 2:
        value, unit = node.args
        base = unit.args[0] if unit.head == "pow" and unit.args[1] in (num(2), num(3)) else unit
        if base in (sym("m"), sym("g"), sym("s"), sym("L")) and not symbols(value):
            return value
    return node


def has_decimal(node: Node) -> bool:
    return any(part.head == "num" and part.args[1] for part in walk(node))


def has_head(node: Node, *heads: str) -> bool:
    return any(part.head in heads for part in walk(node))


def strip_degrees(node: Node) -> Node:
    """Degree signs taken as units, except inside functions."""

    def replace(part: Node) -> Node | None:
        if part.head == "fn":
            return part
        if part.head == "deg":
            return substitute(part.args[0], replace)
        return None

    return substitute(node, replace)


def key(node: Node) -> str:
    """A text that trees share which differ only in the order of sums and products."""
    head, args = node
    if head == "num":
        return _number_key(args[0])
    if head == "based":
        return _number_key(Fraction(args[0]))
    if head in ("sym", "const", "name", "text"):
        return str(args[0]).casefold() if head == "text" else str(args[0])
    if head == "neg" and args[0].head == "num":
        return _number_key(-args[0].args[0])
    parts = [
        key(arg)
        if isinstance(arg, Node)
        else "[" + ";".join(key(c) if isinstance(c, Node) else str(c) for c in arg) + "]"
        if isinstance(arg, tuple)
        else str(arg)
        for arg in args
    ]
    if head == "mixed":
        head = "add"
    if head in ("add", "mul", "set", "union", "inter"):
        parts.sort()
    if head == "list":
        parts = sorted(parts[1:])
    return f"{head}({','.join(parts)})"


def _number_key(value: Fraction) -> str:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 12_000:
        return f"{value.numerator:x}/{value.denominator:x}h"
    return str(value)


class Comparer:
    """Equality of trees under the conventions of `options`."""

    def __init__(self, options: GradingOptions) -> None:
        self.options = options

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether the answer is the gold.

        Raises:
            Undecided: a part has no value that can be computed here.
        """
        gold, answer = tidy(gold), tidy(answer)
        if is_region_like(gold) or is_region_like(answer):
            decided = self._regions(gold, answer)
            if decided is not None:
                return decided
        golds, answers = expand(gold), expand(answer)
        if len(golds) > 1 or len(answers) > 1 or "set" in (gold.head, answer.head):
            return self._lists(gold, answer, golds, answers)
        return self._one(golds[0], answers[0])

    def _regions(self, gold: Node, answer: Node) -> bool | None:
        a, b = region(gold), region(answer)
        if a is not None and b is not None:
            return same_region(a, b)
        for node, other in ((gold, answer), (answer, gold)):
            # "x in S" against S where S is no set of reals that can be drawn.
            if node.head == "rel" and node.args[0] == ("in",) and other.head != "rel" and is_name(node.args[1]):
                inner = node.args[2]
                return self.same(inner, other) if node is gold else self.same(other, inner)
        return None

    def _lists(self, gold: Node, answer: Node, golds: list[Node], answers: list[Node]) -> bool:
        for one, other in ((golds, answers), (answers, golds)):
            if len(one) == 1 and one[0].head == "tuple" and len(members(one[0])) == len(other):
                # (1,2,3) without its brackets, or as x=1, y=2, z=3.
                if len(other) > 2 and not any(item.head in ("tuple", "rel") for item in other):
                    pairs = zip(
                        members(golds[0]) if one is golds else golds,
                        members(answers[0]) if one is answers else answers,
                        strict=True,
                    )
                    return all(self.same(a, b) for a, b in pairs)
                named = [v.args[2] for v in other] if self._distinct_names(other) else None
                if named and one[0].args[:2] == ("(", ")"):
                    return (
                        self.same(golds[0], Node("tuple", ("(", ")", *named)))
                        if one is golds
                        else self.same(Node("tuple", ("(", ")", *named)), answers[0])
                    )
        sets = False
        lists: list[list[Node]] = []
        for node, values in ((gold, golds), (answer, answers)):
            if (
                len(values) == 1
                and is_equation(values[0])
                and values[0].args[2].head == "set"
                and is_name(values[0].args[1])
            ):
                values = [values[0].args[2]]
            if len(values) == 1 and values[0].head == "set":
                values, sets = list(values[0].args), True
            elif any(value.head == "set" for value in values) and len(values) > 1 and node.head != "list":
                return False
            lists.append(values)
        golds, answers = lists
        if not sets and (by_name := self._named(golds, answers)) is not None:
            return by_name
        ordered = not sets and (not self.options.unordered_lists or self._distinct_names(golds))
        if any(is_equation(v) and is_name(v.args[1]) for v in (*golds, *answers)):
            golds, answers = self._unlabelled(golds), self._unlabelled(answers)
        if max(len(golds), len(answers)) > MAX_MEMBERS:
            left, right = sorted(key(v) for v in golds), sorted(key(v) for v in answers)
            return set(left) == set(right) if sets else left == right
        if sets:
            golds, answers = self._distinct(golds), self._distinct(answers)
        if len(golds) != len(answers):
            return False
        if ordered:
            return all(self.same(a, b) for a, b in zip(golds, answers, strict=True))
        return self._match(golds, answers)

    def _match(self, golds: list[Node], answers: list[Node]) -> bool:
        rest = list(answers)
        undecided: Undecided | None = None
        for gold in golds:
            for at, answer in enumerate(rest):
                try:
                    if self.same(gold, answer):
                        del rest[at]
                        break
                except Undecided as error:
                    undecided = error
            else:
                if undecided is not None:
                    raise undecided
                return False
        return True

    def _distinct(self, values: list[Node]) -> list[Node]:
        found: list[Node] = []
        for value in values:
            if not any(self.same(value, other) for other in found):
                found.append(value)
        return found

    def _unlabelled(self, values: list[Node]) -> list[Node]:
        return [v.args[2] if is_equation(v) and is_name(v.args[1]) else v for v in values]

    def _distinct_names(self, values: list[Node]) -> bool:
        if not all(is_equation(v) and is_name(v.args[1]) for v in values):
            return False
        names = [key(v.args[1]) for v in values]
        return len(set(names)) == len(names)

    def _named(self, golds: list[Node], answers: list[Node]) -> bool | None:
        """The verdict of two lists that give the same names to their values."""
        if not self._distinct_names(golds) or not self._distinct_names(answers):
            return None
        by_name = {key(v.args[1]): v.args[2] for v in answers}
        if {key(v.args[1]) for v in golds} != set(by_name):
            return None
        return all(self.same(v.args[2], by_name[key(v.args[1])]) for v in golds)

    def _one(self, gold: Node, answer: Node) -> bool:
        if gold == answer:
            return True
        if gold.head == "unit" or answer.head == "unit":
            return self._measures(gold, answer)
        if gold.head == "rel" or answer.head == "rel":
            return self._relations(gold, answer)
        if gold.head == "text" or answer.head == "text":
            return gold.head == answer.head and gold.args[0].casefold() == answer.args[0].casefold()
        if gold.head == "ratio" or answer.head == "ratio":
            return self._ratios(gold, answer)
        if has_head(gold, "mat") or has_head(answer, "mat"):
            return self._matrices(gold, answer)
        if gold.head == "tuple" or answer.head == "tuple":
            return self._tuples(gold, answer)
        if DOTS in (gold, answer):
            return False
        if _infinite(gold) or _infinite(answer):
            return _infinite(gold) and _infinite(answer) and (gold.head == "neg") == (answer.head == "neg")
        if gold.head in SCALARS and answer.head in SCALARS:
            if any(self._is_no_number(node) for node in (gold, answer)):
                return key(gold) == key(answer)
            return self.numbers(gold, answer)
        if gold.head == answer.head and gold.head in ("union", "inter", "minus", "set", "setb"):
            return self._structure(gold, answer)
        return False

    def _is_no_number(self, node: Node) -> bool:
        """Arithmetic with infinity or with sets, unless it is the limit of a sum."""
        parts = walk(node)
        return any(part.head == "name" for part in parts) or (
            INFINITY in parts and not any(part.head in ("sum", "prod") for part in parts)
        )

    def _structure(self, gold: Node, answer: Node) -> bool:
        if key(gold) == key(answer):
            return True
        if len(gold.args) != len(answer.args):
            return False
        nodes = [(a, b) for a, b in zip(gold.args, answer.args, strict=True)]
        return all(self.same(a, b) if isinstance(a, Node) and isinstance(b, Node) else a == b for a, b in nodes)

    def _measures(self, gold: Node, answer: Node) -> bool:
        units = [known_unit(node.args[1]) if node.head == "unit" else None for node in (gold, answer)]
        texts = [node.args[1].lower().replace(".", "") if node.head == "unit" else "" for node in (gold, answer)]
        values = [node.args[0] if node.head == "unit" else node for node in (gold, answer)]
        if "ratio" in (values[0].head, values[1].head):
            return self._clock(values, texts)
        if units[0] and units[1] and units[0] != units[1]:
            if units[0][0] != units[1][0]:
                return False
            factor = units[1][1] / units[0][1]
            return self.same(values[0], Node("mul", (num(factor), values[1])))
        return self.same(values[0], values[1])

    def _clock(self, values: list[Node], halves: list[str]) -> bool:
        """Times of day, with or without am and pm."""
        minutes = []
        for node, half in zip(values, halves, strict=True):
            if node.head != "ratio":
                return False
            try:
                parts = [exact(item) for item in node.args[1:]]
            except (NotExact, Undefined):
                return self.same(values[0], values[1])
            total = sum((part / 60**k for k, part in enumerate(parts)), Fraction(0))
            if half in ("am", "pm") and parts[0] <= 12:
                total += (12 if half == "pm" else 0) - (12 if parts[0] == 12 else 0)
            minutes.append(total)
        return minutes[0] == minutes[1]

    def _ratios(self, gold: Node, answer: Node) -> bool:
        if gold.head != "ratio" or answer.head != "ratio":
            node, other = (gold, answer) if gold.head == "ratio" else (answer, gold)
            if len(node.args) == 3 and not node.args[0] and other.head in SCALARS:
                quotient = Node("div", node.args[1:])
                return self.numbers(quotient, other) if node is gold else self.numbers(other, quotient)
            return False
        a, b = gold.args[1:], answer.args[1:]
        if len(a) != len(b):
            return False
        if all(self.same(x, y) for x, y in zip(a, b, strict=True)):
            return True
        if (gold.args[0] and answer.args[0]) or DOTS in (*a, *b):
            return False
        return all(
            self.numbers(Node("mul", (x, b[0])), Node("mul", (y, a[0]))) for x, y in zip(a[1:], b[1:], strict=True)
        )

    def _tuples(self, gold: Node, answer: Node) -> bool:
        if gold.head != "tuple" or answer.head != "tuple":
            return False
        a, b = members(gold), members(answer)
        if len(a) != len(b) or (len(a) == 2 and gold.args[:2] != answer.args[:2]):
            return False
        return all(self.same(x, y) for x, y in zip(a, b, strict=True))

    def _matrices(self, gold: Node, answer: Node) -> bool:
        a, b = matrix(gold), matrix(answer)
        if a is None or b is None:
            if "tuple" not in (gold.head, answer.head):
                if has_head(gold, "mat") != has_head(answer, "mat"):
                    return False
                raise Undecided("matrix")
            if a is None and b is None:
                raise Undecided("matrix")
            rows, other = (a, answer) if a is not None else (b, gold)
            assert rows is not None
            if other.head != "tuple" or other.args[:2] != ("(", ")") or min(len(rows), len(rows[0])) != 1:
                return False
            cells = [cell for row in rows for cell in row]
            a, b = [cells], [list(members(other))]
        if len(a) != len(b) or any(len(x) != len(y) for x, y in zip(a, b, strict=True)):
            return False
        return all(self.same(x, y) for r, s in zip(a, b, strict=True) for x, y in zip(r, s, strict=True))

    def _relations(self, gold: Node, answer: Node) -> bool:
        if gold.head == "rel" and answer.head == "rel":
            if is_equation(gold) and is_equation(answer):
                return self._equations(gold, answer)
            return self._chains(gold, answer)
        node, other = (gold, answer) if gold.head == "rel" else (answer, gold)
        if node.args[0][-1] == "mod" and other.head != "rel" and node.args[0] in (("equiv", "mod"), ("mod",)):
            return node.args[0] == ("equiv", "mod") and self._swap(gold, node.args[2], other)
        if not is_equation(node):
            return False
        left, right = node.args[1:]
        if not symbols(left) and not symbols(right) and left.head in SCALARS and right.head in SCALARS:
            return self._swap(gold, right, other, node) and self.same(left, right)
        if is_name(left) or (node is answer and symbols(left) and _no_numbers(left)):
            return self._swap(gold, right, other, node)
        return False

    def _swap(self, gold: Node, right: Node, other: Node, node: Node | None = None) -> bool:
        return self.same(right, other) if node is gold or node is None else self.same(other, right)

    def _equations(self, gold: Node, answer: Node) -> bool:
        (gl, gr), (al, ar) = gold.args[1:], answer.args[1:]
        if is_name(gl) and is_name(al):
            if is_call(gl) and is_call(al) and len(gl.args) == len(al.args):
                renamed = {
                    a.args[0]: g
                    for g, a in zip(gl.args[1:], al.args[1:], strict=True)
                    if g.head == a.head == "sym" and g != a
                }
                ar = substitute(ar, lambda part: renamed.get(part.args[0]) if part.head == "sym" else None)
            free = key(gl) == key(al) or not (symbols(al) - _arguments(al)) & symbols(ar)
            if free and self.same(gr, ar):
                return True
            if not symbols(gr) and not symbols(ar):
                return False
        if any(side.head not in SCALARS for side in (gl, gr, al, ar)):
            return self.same(gl, al) and self.same(gr, ar)
        return self._proportional(gold, answer, positive=False)

    def _chains(self, gold: Node, answer: Node) -> bool:
        if is_equation(gold) != is_equation(answer) and (is_equation(gold) or is_equation(answer)):
            node = gold if is_equation(gold) else answer
            if is_name(node.args[1]):
                return self._swap(gold, node.args[2], answer if node is gold else gold, node)
            return False
        ops, flipped = gold.args[0], tuple(FLIP.get(op, op) for op in reversed(gold.args[0]))
        terms, others = gold.args[1:], answer.args[1:]
        if {ops, answer.args[0]} <= {("equiv", "mod"), ("mod",), ("=", "mod")}:
            return self._residues(gold, answer)
        if ops == answer.args[0] and all(self.same(a, b) for a, b in zip(terms, others, strict=True)):
            return True
        turned_pairs = zip(reversed(terms), others, strict=False)
        if flipped == answer.args[0] and set(ops) <= set(FLIP) and all(self.same(a, b) for a, b in turned_pairs):
            return True
        if len(ops) == 1 and len(answer.args[0]) == 1 and ops[0] in FLIP:
            if ops == answer.args[0]:
                return self._proportional(gold, answer, positive=ops[0] != "!=")
            if flipped == answer.args[0]:
                turned = Node("rel", (flipped, terms[1], terms[0]))
                return self._proportional(turned, answer, positive=True)
        return False

    def _residues(self, gold: Node, answer: Node) -> bool:
        try:
            value, other, modulus = exact(gold.args[-2]), exact(answer.args[-2]), exact(gold.args[-1])
            return exact(answer.args[-1]) == modulus and modulus != 0 and (value - other) % modulus == 0
        except (NotExact, Undefined):
            return self.same(gold.args[-2], answer.args[-2]) and self.same(gold.args[-1], answer.args[-1])

    def _proportional(self, gold: Node, answer: Node, *, positive: bool) -> bool:
        """Whether the differences of the two sides are multiples of each other: the same equation or inequality."""
        if symbols(gold) != symbols(answer):
            return False
        f = Node("add", (gold.args[1], Node("neg", (gold.args[2],))))
        g = Node("add", (answer.args[1], Node("neg", (answer.args[2],))))
        ratio: Any = None
        seen = 0
        with mp.workdps(DIGITS):
            for env in points(symbols(gold), whole=_whole_only(gold) or _whole_only(answer), signs=False):
                try:
                    a, b = Numeric(env).value(f), Numeric(env).value(g)
                except (Undefined, Huge):
                    continue
                if not a or not b:
                    if bool(a) != bool(b):
                        return False
                    continue
                if ratio is None:
                    ratio = a / b
                    if positive and (mp.im(ratio) or mp.re(ratio) <= 0):
                        return False
                elif abs(a / b - ratio) > mp.mpf(10) ** -30 * abs(ratio):
                    return False
                seen += 1
                if seen >= 6:
                    break
        if seen < 3:
            raise Undecided("no point where both relations have values")
        return True

    def numbers(self, gold: Node, answer: Node) -> bool:
        """Equality of two scalars, with the conventions for percent, degrees, units typed as letters and logarithms."""
        if not self.options.base_by_value and gold.head == "based":
            return answer.head == "based" and gold == answer
        if not self.options.unevaluated and is_literal(gold) and not is_literal(answer):
            return False
        if self._equal(gold, answer):
            return True
        if gold.head == "pct" and not has_head(answer, "pct") and self.options.percent_as_number:
            return self._equal(gold.args[0], answer)
        if answer.head == "pct" and not has_head(gold, "pct") and self.options.percent_as_number:
            try:
                return exact(gold) > 1 and self._equal(gold, answer.args[0])
            except (NotExact, Undefined):
                return False
        if not symbols(gold) and symbols(answer) and (value := plain_measure(answer)) is not answer:
            return self._equal(gold, value)
        return False

    def _equal(self, gold: Node, answer: Node) -> bool:
        degrees = has_head(gold, "deg") or has_head(answer, "deg")
        if degrees:
            a, b = strip_degrees(gold), strip_degrees(answer)
            if self._plain_equal(a, b):
                return True
            if not self.options.degrees_as_radians or (
                has_head(a, "deg") == has_head(b, "deg") and (a, b) == (gold, answer)
            ):
                return False
        return self._plain_equal(gold, answer)

    def _plain_equal(self, gold: Node, answer: Node) -> bool:
        tolerant = has_decimal(gold) or has_decimal(answer)
        try:
            a, b = exact(gold), exact(answer)
        except (NotExact, Undefined):
            pass
        else:
            return a == b or (tolerant and self._near_fractions(a, b, gold, answer))
        if key(gold) == key(answer):
            return True
        logs = _bare_log(gold) or _bare_log(answer)
        if not symbols(gold) and not symbols(answer):
            return constant_equal(gold, answer, self.options, tolerant) or (
                logs and constant_equal(gold, answer, self.options, tolerant, log_ten=True)
            )
        return identical(gold, answer, self.options, tolerant) or (
            logs and identical(gold, answer, self.options, tolerant, log_ten=True)
        )

    def _near_fractions(self, gold: Fraction, answer: Fraction, gold_node: Node, answer_node: Node) -> bool:
        for value, node in ((gold, gold_node), (answer, answer_node)):
            if value.denominator == 1 and (not has_decimal(node) or abs(value) < 10**15):
                return False
        if not gold or not answer:
            return False
        return abs(gold - answer) <= Fraction(self.options.decimal_tolerance).limit_denominator(10**12) * abs(gold)


def _arguments(node: Node) -> frozenset[str]:
    """The symbols that a call binds: x of f(x)."""
    if node.head != "app":
        return frozenset()
    return frozenset(arg.args[0] for arg in node.args[1:] if isinstance(arg, Node) and arg.head == "sym")


def is_literal(node: Node) -> bool:
    """A number as one writes a final value: integer, decimal, fraction, mixed number, percent, scientific."""
    if node.head in ("num", "based"):
        return True
    if node.head in ("neg", "pct", "deg"):
        return is_literal(node.args[0])
    if node.head in ("div", "mixed"):
        return all(part.head == "num" or (part.head in ("neg", "div") and is_literal(part)) for part in node.args)
    if node.head == "mul" and len(node.args) == 2:
        ten = node.args[1]
        return node.args[0].head == "num" and ten.head == "pow" and ten.args[0] == num(10) and is_literal(ten.args[1])
    return False


def _bare_log(node: Node) -> bool:
    return any(part.head == "fn" and part.args[0] == "log" and len(part.args) == 2 for part in walk(node))


def _whole_only(node: Node) -> bool:
    """Whether the symbols stand for whole numbers: they are in factorials, limits of sums, signs like (-1)^n."""
    for part in walk(node):
        if part.head == "fn" and part.args[0] in WHOLE_ONLY and symbols(part):
            return True
        if part.head in ("sum", "prod"):
            return True
        if part.head == "pow" and symbols(part.args[1]) and part.args[0].head == "neg" and not symbols(part.args[0]):
            return True
    return False


def points(names: frozenset[str], *, whole: bool, signs: bool, count: int = 24) -> Iterator[dict[str, Fraction]]:
    """Fixed pseudo-random test points: positive rationals of three sizes, whole numbers, or of both signs."""
    rng = random.Random(20_260_101)
    order = sorted(names)
    for at in range(count):
        env = {}
        for name in order:
            if whole:
                value = Fraction(rng.randint(1, 4 + at))
            else:
                low, high = ((0.6, 3.5), (0.05, 0.95), (3.0, 40.0))[rng.randrange(3) if len(order) > 1 else at % 3]
                value = Fraction(round(rng.uniform(low, high) * 9973), 9973)
                if signs and rng.random() < 0.5:
                    value = -value
            env[name] = value
        yield env


def _gap(gold: Node, answer: Node, env: dict[str, Fraction], digits: int, log_ten: bool) -> tuple[Any, Any, Any, bool]:
    """Both values, the distance between them, and whether a step left the real numbers."""
    with mp.workdps(digits):
        left, right = Numeric(env, log_ten=log_ten), Numeric(env, log_ten=log_ten)
        a, b = left.value(gold), right.value(answer)
        return a, b, abs(a - b), left.complex_seen or right.complex_seen


def _vanishes(
    gold: Node, answer: Node, env: dict[str, Fraction], gap: Any, precisions: tuple[int, ...], log_ten: bool
) -> bool:
    """Whether a difference is zero: with more digits it shrinks as rounding errors do, and as no number does."""
    before = DIGITS
    for digits in precisions:
        smaller = _gap(gold, answer, env, digits, log_ten)[2]
        if gap and smaller > gap * mp.mpf(10) ** (-(digits - before) * 3 // 4):
            return False
        gap, before = smaller, digits
    return True


def constant_equal(gold: Node, answer: Node, options: GradingOptions, tolerant: bool, *, log_ten: bool = False) -> bool:
    """Equality of two constants, by 60 digits and then by 800; beyond floating point by logarithms and residues."""
    try:
        a, b, gap, _ = _gap(gold, answer, {}, DIGITS, log_ten)
    except Pole:
        return False
    except Undefined as error:
        raise Undecided(str(error)) from error
    except Huge:
        return _huge_equal(gold, answer)
    with mp.workdps(DIGITS):
        size = max(abs(a), abs(b))
        small = min(abs(a), abs(b))
        clear = gap > size * mp.mpf(10) ** -6 and small > mp.mpf(10) ** -20
        equal = False
        if not clear:
            if size and abs(mp.mag(size)) > 20_000:
                if gap <= size * mp.mpf(10) ** -50:
                    equal = _residues_equal(gold, answer)
            else:
                equal = _vanishes(gold, answer, {}, gap, CONSTANT_DIGITS, log_ten)
    if equal or not tolerant:
        return equal
    with mp.workdps(DIGITS):
        for value, node in ((a, gold), (b, answer)):
            nearest = mp.nint(mp.re(value))
            whole = not mp.im(value) and abs(value - nearest) <= mp.mpf(10) ** -40 * max(1, abs(value))
            if whole and (not has_decimal(node) or abs(value) < 10**15):
                return False
        return bool(gap <= mp.mpf(options.decimal_tolerance) * abs(a))


def _huge_equal(gold: Node, answer: Node) -> bool:
    """Numbers beyond floating point: equal only if they are built alike."""
    sizes = []
    for node in (gold, answer):
        try:
            with mp.workdps(DIGITS):
                Numeric({}).value(node)
            sizes.append(False)
        except Huge:
            sizes.append(True)
        except Undefined as error:
            raise Undecided(str(error)) from error
    if sizes != [True, True]:
        return False
    if key(gold) == key(answer):
        return True
    if gold.head == answer.head == "pow":
        return all(_part_equal(a, b) for a, b in zip(gold.args, answer.args, strict=True))
    return _residues_equal(gold, answer)


def _part_equal(gold: Node, answer: Node) -> bool:
    try:
        return exact(gold) == exact(answer)
    except (NotExact, Undefined):
        return constant_equal(gold, answer, GradingOptions(), False)


def _residues_equal(gold: Node, answer: Node) -> bool:
    try:
        return all(modular(gold, prime) == modular(answer, prime) for prime in PRIMES)
    except (NotExact, Undefined, ValueError):
        return False


def identical(gold: Node, answer: Node, options: GradingOptions, tolerant: bool, *, log_ten: bool = False) -> bool:
    """Equality of two expressions at test points where both are real; at complex ones if there are no real ones."""
    names = symbols(gold) | symbols(answer)
    whole = _whole_only(gold) or _whole_only(answer)
    signs = any(part.head == "fn" and part.args[0] in ("abs", "sign") for node in (gold, answer) for part in walk(node))
    agreed = 0
    elsewhere: list[bool] = []
    one_sided = 0
    for env in points(names, whole=whole, signs=signs):
        try:
            a, b, gap, complex_seen = _gap(gold, answer, env, DIGITS, log_ten)
        except (Undefined, Huge):
            one_sided += 1
            continue
        with mp.workdps(DIGITS):
            same = gap <= mp.mpf(10) ** -45 * max(abs(a), abs(b))
            if not same and tolerant:
                same = gap <= mp.mpf(options.decimal_tolerance) * abs(a)
        if not same:
            same = _vanishes(gold, answer, env, gap, POINT_DIGITS, log_ten)
        if complex_seen:
            elsewhere.append(same)
            if len(elsewhere) >= 12 and not agreed and not same:
                break
            continue
        if not same:
            return False
        agreed += 1
        if agreed >= (8 if whole else 4):
            return True
    if agreed >= 2:
        return True
    if len(elsewhere) >= 3:
        return all(elsewhere)
    raise Undecided("no point where both expressions have values")


Rows = list[list[Node]]


def matrix(node: Node) -> Rows | None:
    """The rows of a matrix expression (sums, products, multiples, transposes), None if it is none."""
    head, args = node
    if head == "mat":
        return [list(row) for row in args]
    if head == "tuple" and all(item.head == "tuple" for item in args[2:]):
        return [list(members(item)) for item in args[2:]]
    if head == "neg":
        inner = matrix(args[0])
        return None if inner is None else [[Node("neg", (cell,)) for cell in row] for row in inner]
    if head == "add":
        parts = [matrix(arg) for arg in args]
        rows = parts[0]
        for part in parts[1:]:
            if rows is None or part is None or len(rows) != len(part) or len(rows[0]) != len(part[0]):
                return None
            rows = [[Node("add", pair) for pair in zip(r, s, strict=True)] for r, s in zip(rows, part, strict=True)]
        return rows
    if head in ("mul", "div"):
        factors = [(matrix(arg), arg) for arg in args]
        product: Rows | None = None
        for at, (rows, arg) in enumerate(factors):
            if rows is None:
                if has_head(arg, "mat"):
                    return None
                continue
            if head == "div" and at == 1:
                return None
            product = rows if product is None else _times(product, rows)
            if product is None:
                return None
        if product is None:
            return None
        for rows, arg in factors:
            if rows is None:
                product = [
                    [Node("div", (c, arg)) if head == "div" else Node("mul", (arg, c)) for c in row] for row in product
                ]
        return product
    if (head == "fn" and args[0] == "transpose") or (head == "pow" and args[1] == sym("T")):
        inner = matrix(args[1] if head == "fn" else args[0])
        return None if inner is None else [list(row) for row in zip(*inner, strict=True)]
    return None


def _times(a: Rows, b: Rows) -> Rows | None:
    if len(a[0]) != len(b) or len(a) * len(b) * len(b[0]) > 400:
        return None
    columns = list(zip(*b, strict=True))
    return [
        [Node("add", tuple(Node("mul", pair) for pair in zip(row, column, strict=True))) for column in columns]
        for row in a
    ]


@lru_cache(maxsize=8192)
def read(text: str) -> Node | None:
    """The tree of a normalised answer, None if it is no mathematics that the parser reads."""
    try:
        return parse(text)
    except ParseError:
        return None


def canonical(text: str) -> str:
    """A form of a normalised answer that equal answers share: exact fraction, 25 digits, ordered tree, or its words."""
    plain = words(text)
    if plain is not None:
        return plain
    node = read(text)
    if node is None:
        return squeeze(text)[:500]
    return _canonical(tidy(node))[:500]


def _canonical(node: Node) -> str:
    if is_equation(node) and is_name(node.args[1]):
        return _canonical(node.args[2])
    values = expand(node) if node.head != "set" else list(members(expand(node)[0]))
    if len(values) > 1:
        return "{" + ", ".join(sorted({_canonical(value) for value in values})) + "}"
    if len(values) == 1:
        node = values[0]
    if node.head == "unit":
        return _canonical(node.args[0])
    if node.head == "deg":
        return _canonical(strip_degrees(node))
    if node.head == "tuple":
        return node.args[0] + ", ".join(_canonical(item) for item in members(node)) + node.args[1]
    try:
        return _number_key(exact(node))
    except (NotExact, Undefined):
        pass
    if node.head in SCALARS and not symbols(node) and node.head != "name":
        try:
            with mp.workdps(40):
                value = Numeric({}).value(node)
            return str(mp.nstr(value, 25))
        except (Undefined, Huge):
            pass
    return key(node)


def same_answer(gold: str, answer: str, options: GradingOptions) -> bool:
    """Whether two normalised answers are the same.

    Raises:
        Undecided: this module cannot tell.
    """
    if squeeze(gold) == squeeze(answer):
        return True
    gold_choice, answer_choice = choice(gold), choice(answer)
    if gold_choice and answer_choice and (gold_choice[1] or answer_choice[1]):
        return gold_choice[0] == answer_choice[0]
    gold_words, answer_words = words(gold), words(answer)
    gold_node, answer_node = read(gold), read(answer)
    for plain, other_words, other in ((gold_words, answer_words, answer_node), (answer_words, gold_words, gold_node)):
        if plain is None:
            continue
        if plain == other_words:
            return True
        for meanings, node in ((NOTHING, EMPTY), (EVERYTHING, Node("name", ("R",)))):
            if plain in meanings and (other_words in meanings or (other is not None and _is(other, node))):
                return True
    if gold_words is not None or answer_words is not None:
        short = all(
            plain is None or (len(plain) <= 3 and "\\text" not in text)
            for plain, text in ((gold_words, gold), (answer_words, answer))
        )
        if not short:
            values = [
                num(value) if plain is not None and (value := number_word(plain)) is not None else node
                for plain, node in ((gold_words, gold_node), (answer_words, answer_node))
            ]
            if values == [gold_node, answer_node] or None in values:
                return False
            return Comparer(options).same(*[value for value in values if value is not None])
    if squeeze(strip_unit_tail(gold)) == squeeze(strip_unit_tail(answer)):
        return True
    if gold_node is None or answer_node is None:
        raise Undecided("not read")
    try:
        return Comparer(options).same(gold_node, answer_node)
    except RecursionError as error:
        raise Undecided("nested too deeply") from error


def _is(node: Node, wanted: Node) -> bool:
    if node.head == "rel" and node.args[0] == ("in",):
        node = node.args[2]
    a, b = region(node), region(wanted)
    return a is not None and b is not None and same_region(a, b)
