"""Mathematics as people and models type it (LaTeX or plain) -> a small syntax tree. Nothing is evaluated here.

A recursive-descent parser over `normalise`d text. Time and depth are bounded; what it cannot read raises `ParseError`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

MAX_DEPTH = 120
MAX_LENGTH = 20_000
MAX_EXPONENT = 20_000
MAX_CHAIN = 1_000


def names(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())


class ParseError(ValueError):
    """The text is not mathematics that this parser reads."""


class Node(NamedTuple):
    """One node: a head (`num`, `sym`, `const`, `add`, `mul`, ...) and its arguments (nodes, or literals for leaves)."""

    head: str
    args: tuple[Any, ...]


def num(value: int | Fraction, *, decimal: bool = False) -> Node:
    """A number literal; `decimal` marks that it was written with a decimal point and may be rounded."""
    return Node("num", (Fraction(value), decimal))


def sym(name: str) -> Node:
    return Node("sym", (name,))


INFINITY = Node("const", ("inf",))
DOTS = Node("const", ("ldots",))
EMPTY = Node("name", ("empty",))

GREEK = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
)
PLAIN_GREEK = GREEK - {"mu", "nu", "xi", "chi", "psi", "eta", "iota", "Xi", "Pi", "Phi", "Psi"}
VARIANTS = {"varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi", "varrho": "rho", "varsigma": "sigma"}
SYMBOL_COMMANDS = names(
    "hbar ell odot oplus otimes partial nabla mho Re Im aleph square Box star prime bigstar dagger diamond wp"
)
FUNCTIONS = {
    name: name
    for name in names(
        "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh "
        "arccosh arctanh log ln lg exp max min gcd lcm det arg sqrt abs floor ceil cbrt"
    )
} | {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh", "tg": "tan", "ctg": "cot", "cosec": "csc",
    "cotg": "cot", "arctg": "arctan", "ceiling": "ceil", "sgn": "sign", "sign": "sign", "binom": "binom",
    "binomial": "binom", "factorial": "factorial",
}  # fmt: skip
PREFIXES = ("arcsin", "arccos", "arctan", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")
INVERSE = {f: "arc" + f for f in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")}
RELATIONS = {
    "=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "<>": "!=", r"\lt": "<", r"\gt": ">",
    r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\leqq": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=",
    r"\geqq": ">=", r"\ne": "!=", r"\neq": "!=", r"\in": "in", r"\notin": "notin", r"\approx": "~", r"\sim": "sim",
    r"\equiv": "equiv", r"\propto": "propto", r"\subset": "subset", r"\subseteq": "subset", r"\simeq": "~",
    r"\cong": "cong", r"\parallel": "parallel", r"\perp": "perp", r"\coloneqq": "=", r"\triangleq": "=",
}  # fmt: skip
TEXT_COMMANDS = names(r"\text \textrm \textbf \textit \textnormal \textsf \texttt \textup \mbox \hbox \emph")
FONT_COMMANDS = names(
    r"\mathrm \mathbf \mathit \mathsf \mathtt \mathnormal \operatorname \bm \boldsymbol \mathcal \mathscr \mathfrak "
    r"\pmb \textstyle \symbf"
)
ACCENTS = names(
    r"\overline \underline \vec \hat \bar \tilde \widehat \widetilde \dot \ddot \overrightarrow \overleftarrow "
    r"\overset \check \breve \acute \grave \dddot \overbrace \underbrace \overleftrightarrow \overparen"
)
SKIPPED = names(
    r"\angle \triangle \measuredangle \sphericalangle \boxed \fbox \ensuremath \mathop \mathbin \mathrel \therefore "
    r"\color \nolimits \limits \displaystyle \textstyle \protect"
)
MATRICES = names("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array psmallmatrix")
UNITS = names(
    """cm mm km nm dm ft yd mi kg mg lb lbs oz kph mph mL ml dl sec secs min mins hr hrs ms Hz kHz MHz GHz eV keV MeV GeV
    kJ kcal cal Pa kPa MPa atm mol kmol rad deg sq cu kW MW kWh dollar dollars cent cents meter meters metre metres foot
    feet inch inches yard yards mile miles gram grams kilogram kilograms kilometer kilometers kilometre kilometres
    centimeter centimeters centimetre centimetres millimeter millimeters second seconds minute minutes hour hours day
    days week weeks month months year years unit units square cubic degree degrees radian radians pound pounds ounce
    ounces liter liters litre litres gallon gallons newton newtons joule joules watt watts volt volts ohm ohms percent
    pct people students times points point per euros euro usd USD pm am PM AM mins tons ton inch in erg ergs Gyr Myr yr
    pc kpc Mpc AU Angstrom angstrom angstroms Angstroms mum"""
)
SEPARATOR_TEXT = re.compile(r"(?:,|;|and|or|\s)+", re.IGNORECASE)
TOKEN = re.compile(
    r"(?P<num>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]*[A-Za-z(]))?)|(?P<cmd>\\(?:[A-Za-z]+|.))"
    r"|(?P<word>[A-Za-z]+)|(?P<op><=|>=|!=|==|<>|\.\.\.+|.)",
    re.DOTALL,
)
NUMBER_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
}  # fmt: skip
TENS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
TEENS = {"seventeen": 17, "eighteen": 18, "nineteen": 19, "hundred": 100}
BASE_DIGITS = re.compile(r"([0-9A-F]+)\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*(\d+|[a-z]+)\s*\}?\s*\}|(\d+))")
CHOOSE = (r"\choose", r"\over", r"\atop")


def parse_int(digits: str) -> int:
    """int() for any length: in pieces, because the interpreter refuses more than 4,300 digits at once."""
    if len(digits) <= 4000:
        return int(digits or "0")
    middle = len(digits) // 2
    return parse_int(digits[:-middle]) * 10**middle + parse_int(digits[-middle:])


def parse_decimal(text: str) -> Node:
    """A literal like 12, .5, 3.0 or 1.6e-19 as an exact fraction, however long."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    value = Fraction(parse_int(whole + fraction), 10 ** len(fraction))
    decimal = bool(fraction)
    if not exponent:
        return num(value, decimal=decimal)
    sign, size = exponent[0] == "-", exponent.lstrip("+-0") or "0"
    if len(size) > 6 or int(size) > MAX_EXPONENT:
        power = num(-parse_int(size) if sign else parse_int(size))
        return Node("mul", (num(value, decimal=True), Node("pow", (num(10), power))))
    scale = Fraction(10) ** (-int(size) if sign else int(size))
    # 3.83e35 is written with a decimal point but stands for a whole number only if its digits say so.
    return num(value * scale, decimal=decimal or "e" in text.lower())


def product(left: Node, right: Node) -> Node:
    """left times right, flat so that long products do not nest."""
    return Node("mul", (*left.args, right) if left.head == "mul" else (left, right))


class Token(NamedTuple):
    kind: str
    value: str
    start: int
    stop: int


class Parser:
    """Reads one answer. `bound` are the variables of enclosing sums."""

    def __init__(self, text: str, *, depth: int = 0, bound: frozenset[str] = frozenset()) -> None:
        if len(text) > MAX_LENGTH:
            raise ParseError("too long")
        self.text = text
        self.at = 0
        self.depth = depth
        self.bound = bound
        self.bars = 0
        self.in_builder = False
        self._peeked = Token("end", "", 0, 0)
        self._peeked_at = -1

    def peek(self) -> Token:
        if self._peeked_at != self.at:
            text, at = self.text, self.at
            self._peeked_at = at
            while at < len(text) and text[at] == " ":
                at += 1
            match = TOKEN.match(text, at)
            if match is None:
                self._peeked = Token("end", "", at, at)
            else:
                self._peeked = Token(match.lastgroup or "op", match.group(), match.start(), match.end())
                if self._peeked.kind == "cmd":
                    self._peeked = self._split_command(self._peeked)
        return self._peeked

    def _split_command(self, token: Token) -> Token:
        r"""`\pir` is `\pi r` whose space was lost: take the longest known beginning."""
        name = token.value[1:]
        if len(name) < 3 or not name.isalpha() or is_known(name):
            return token
        for length in range(len(name) - 1, 1, -1):
            if is_known(name[:length]):
                return Token("cmd", token.value[: length + 1], token.start, token.start + length + 1)
        return token

    def take(self) -> Token:
        token = self.peek()
        self.at = token.stop
        return token

    def accept(self, *values: str) -> bool:
        if self.peek().value in values and self.peek().kind != "end":
            self.take()
            return True
        return False

    def expect(self, value: str) -> None:
        if not self.accept(value):
            raise ParseError(f"expected {value!r} at {self.at}")

    def raw_group(self) -> str:
        """The text of the next braced group (or single token), unparsed."""
        token = self.take()
        if token.value != "{":
            if token.kind == "word" or token.kind == "num":
                self.at = token.start + 1
                return token.value[0]
            return token.value
        depth, start = 1, self.at
        at = start
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char == "{":
                depth += 1
            elif char == "}":
                depth -= 1
                if depth == 0:
                    self.at = at + 1
                    return self.text[start:at].strip()
            at += 1
        raise ParseError("unclosed brace")

    def parse(self) -> Node:
        """The whole text as one node."""
        node = self.parse_list()
        if self.peek().kind != "end":
            raise ParseError(f"cannot read {self.peek().value!r}")
        return node

    def parse_list(self) -> Node:
        items, joined = self.parse_items()
        if len(items) == 1:
            return items[0]
        return Node("list", (joined, *items))

    def parse_items(self) -> tuple[list[Node], str]:
        """Members between separators, and how they were joined: `,`, `and` or `or`."""
        items = [self.parse_item()]
        joined = ","
        while (separator := self.separator()) is not None:
            if separator != ",":
                joined = separator
            if self.peek().kind == "end" or self.peek().value in (")", "]", "}", r"\}"):
                break
            items.append(self.parse_item())
        return items, joined

    def separator(self) -> str | None:
        found: str | None = None
        while True:
            token = self.peek()
            if token.value in (",", ";"):
                self.take()
                found = found or ","
            elif token.kind == "word" and token.value.lower() in ("and", "or"):
                self.take()
                found = token.value.lower()
            elif token.value in (r"\lor", r"\vee"):
                self.take()
                found = "or"
            elif token.value in (r"\land", r"\wedge", r"\&"):
                self.take()
                found = "and"
            elif token.value in TEXT_COMMANDS or token.value in FONT_COMMANDS:
                mark = self.at
                self.take()
                content = self.raw_group()
                if not SEPARATOR_TEXT.fullmatch(content) or not content.strip():
                    self.at = mark
                    return found
                lowered = content.lower()
                found = "and" if "and" in lowered else "or" if "or" in lowered else found or ","
            else:
                return found

    def parse_item(self) -> Node:
        token = self.peek()
        if token.value in TEXT_COMMANDS:
            mark = self.at
            self.take()
            content = self.raw_group()
            rest = self.peek()
            if not content.strip() and rest.kind != "end":
                return self.parse_item()
            if rest.kind == "end" or rest.value in (",", ";", ")", "]", r"\}", "}") or self._separates():
                return self.text_node(content)
            self.at = mark
        node = self.parse_relation()
        return self.parse_units(node)

    def _separates(self) -> bool:
        mark = self.at
        found = self.separator()
        self.at = mark
        return found is not None

    def text_node(self, content: str) -> Node:
        word = content.strip()
        if re.fullmatch(r"[-+]?[\d.]+(?:/\d+)?|[A-Za-z]", word):
            return Parser(word, depth=self.depth + 1).parse()
        value = number_word(word)
        return Node("text", (word,)) if value is None else num(value)

    def parse_units(self, node: Node) -> Node:
        """Unit words, ordinals, percent and degree words behind a value."""
        words: list[str] = []
        while True:
            token = self.peek()
            if token.value in TEXT_COMMANDS or token.value in FONT_COMMANDS:
                if self._separates():
                    break
                self.take()
                words.append(self.raw_group())
            elif token.kind == "word" and self._unit_word(token, bool(words)):
                self.take()
                words.append(token.value)
            elif words and token.value == "^":
                self.take()
                words.append("^" + self.raw_group().strip())
            elif words and token.value in ("/", r"\cdot", ".", "-", "(", ")", r"\times"):
                mark = self.at
                self.take()
                after = self.peek()
                if token.value == ")" and not any("(" in word for word in words):
                    self.at = mark
                    break
                if after.kind in ("word", "cmd", "end") or token.value in ".)":
                    words.append({r"\cdot": "*", r"\times": "*"}.get(token.value, token.value))
                else:
                    self.at = mark
                    break
            elif words and token.value in (r"\%", "%"):
                self.take()
                node = Node("pct", (node,))
            elif words and token.kind == "cmd" and token.value in (r"\circ", r"\degree"):
                self.take()
            else:
                break
        text = " ".join("".join(word.split()) if word.startswith("^") else word.strip() for word in words)
        text = " ".join(text.split())
        if not text:
            return node
        lowered = text.lower().strip(" .")
        if lowered in ("percent", "pct", "per cent", "percentage points", "percents"):
            return Node("pct", (node,))
        if lowered in ("degrees", "degree", "deg", "degs"):
            return Node("deg", (node,)) if node.head != "deg" else node
        if lowered in ("radians", "radian", "rad", "units", "unit", ""):
            return node
        return Node("unit", (node, text))

    def _unit_word(self, token: Token, more: bool) -> bool:
        before = self.text[: token.start].rstrip()
        if not before or token.value.lower() in ("and", "or"):
            return False
        if more:
            return True
        follows_value = before[-1].isdigit() or before[-1] in "})%]."
        spaced = token.start > 0 and self.text[token.start - 1] == " "
        if token.value in UNITS:
            following = self.text[token.stop : token.stop + 2].strip()[:1]
            if token.value in ("min", "sec", "in", "MAX") and following in ("(", "[", "{"):
                return False
            if len(token.value) >= 4:
                return True
            return follows_value or (spaced and following in ("", ",", "^", "/", ")") and before[-1].isalpha())
        known = token.value in FUNCTIONS or token.value in PLAIN_GREEK or token.value in ("pi", "inf", "infinity")
        return follows_value and spaced and len(token.value) >= 4 and not known and before[-1] not in "]"

    def parse_relation(self) -> Node:
        ops: list[str] = []
        while RELATIONS.get(self.peek().value) in ("=", "~") and not ops:
            self.take()
        terms = [self.parse_ratio()]
        while True:
            token = self.peek()
            op = RELATIONS.get(token.value)
            if (
                token.kind == "word"
                and token.value == "in"
                and self.text[token.stop : token.stop + 2].strip()[:1] in ("(", "[", "{", "\\")
            ):
                op = "in"
            if token.value == r"\not":
                self.take()
                after = RELATIONS.get(self.take().value)
                op = {"=": "!=", "in": "notin"}.get(after or "")
                if op is None:
                    raise ParseError("unknown negated relation")
            elif op is not None:
                self.take()
            else:
                break
            ops.append(op)
            terms.append(self.parse_ratio())
        if self.peek().value == r"\pmod" or self.peek().value == r"\bmod":
            self.take()
            ops.append("mod")
            terms.append(self.primary())
        elif self.peek().value == "(" and re.match(
            r"\(\s*\\?(?:mod|bmod|text\{\s*mod\s*\})(?![A-Za-z])", self.text[self.peek().start :]
        ):
            self.take()
            token = self.take()
            if token.value in TEXT_COMMANDS:
                self.raw_group()
            ops.append("mod")
            terms.append(self.parse_sum())
            self.expect(")")
        if not ops:
            return terms[0]
        return Node("rel", (tuple(ops), *terms))

    def parse_ratio(self) -> Node:
        first = self.parse_set()
        if self.in_builder or self.peek().value != ":":
            return first
        items = [first]
        minutes = False
        while self.accept(":"):
            start = self.peek()
            minutes = minutes or bool(re.fullmatch(r"[0-5]\d", start.value))
            items.append(self.parse_set())
        return Node("ratio", (minutes, *items))

    def parse_set(self) -> Node:
        start = self.peek().value
        node = self.parse_sum()
        while self.peek().value in (
            r"\cup",
            r"\cap",
            r"\setminus",
            r"\backslash",
            r"\bigcup",
            r"\smallsetminus",
            "U",
            "u",
        ):
            token = self.peek()
            if token.value in ("U", "u") and not self._is_union(token):
                break
            self.take()
            if start == "{" and not _set_like(node):
                node = Node("set", (node,))
            start = self.peek().value
            right = self.parse_sum()
            if start == "{" and not _set_like(right):
                right = Node("set", (right,))
            start = ""
            head = {r"\cup": "union", r"\bigcup": "union", "U": "union", "u": "union", r"\cap": "inter"}
            node = Node(head.get(token.value, "minus"), (node, right))
        return node

    def parse_sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")
        terms: list[Node] = []
        while True:
            token = self.peek()
            sign = token.value if token.value in ("+", "-", r"\pm", r"\mp") else None
            if sign is None and terms:
                break
            if len(terms) > MAX_CHAIN:
                raise ParseError("too many terms")
            if sign is not None:
                self.take()
                # "+-5", "14.0 + -1.0i", "+/- 3"
                if sign == "+" and self.peek().value == "/" and re.match(r"/\s*-", self.text[self.peek().start :]):
                    self.take()
                    self.take()
                    sign = r"\pm"
                while self.peek().value in ("+", "-"):
                    if self.take().value == "-":
                        sign = {"+": "-", "-": "+"}.get(sign, sign)
            term = self.parse_product()
            if sign in (r"\pm", r"\mp"):
                base = Node("add", tuple(terms)) if len(terms) > 1 else terms[0] if terms else num(0)
                terms = [Node("pm" if sign == r"\pm" else "mp", (base, term))]
            else:
                terms.append(Node("neg", (term,)) if sign == "-" else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def parse_product(self) -> Node:
        start = self.peek()
        node = self.parse_power()
        factors = 0
        literal = (
            start.kind == "num" and self.at == start.stop and "." not in start.value and "e" not in start.value.lower()
        )
        while True:
            token = self.peek()
            factors += 1
            if factors > MAX_CHAIN:
                raise ParseError("too many factors")
            if token.value in ("*", r"\cdot", r"\times", r"\cdotp", r"\ast", r"\bullet"):
                self.take()
                node = product(node, self.parse_signed())
            elif token.value in ("/", r"\div"):
                self.take()
                node = Node("div", (node, self.parse_signed()))
            elif token.kind == "num" and self.text[token.start - 1 : token.start] != "_":
                if not (literal and (mixed := self._mixed(node)) is not None):
                    if self._last_was_number(start):
                        raise ParseError("two numbers side by side")
                    node = product(node, self.parse_power())
                else:
                    node = mixed
            elif literal and token.value == r"\frac":
                fraction = self.parse_power()
                if _proper(fraction):
                    node = Node("mixed", (node, fraction))
                else:
                    node = product(node, fraction)
            elif self.starts(token):
                node = self._implicit(node)
            else:
                return node
            literal = False

    def _last_was_number(self, start: Token) -> bool:
        return bool(re.search(r"[\d.]\s*$", self.text[start.start : self.at])) and not re.search(
            r"[_^]\s*\d+\s*$|\\(?:sqrt|frac\s*\d)\s*\d+\s*$|\}\s*\d$", self.text[start.start : self.at]
        )

    def _mixed(self, whole: Node) -> Node | None:
        match = re.match(r"\s+(\d+)\s*/\s*(\d+)(?![\d.])", self.text[self.at :])
        if not match or int(match.group(2)[:400]) == 0 or len(match.group()) > 400:
            return None
        self.at += match.end()
        return Node("mixed", (whole, Node("div", (num(int(match.group(1))), num(int(match.group(2)))))))

    def _implicit(self, node: Node) -> Node:
        right = self.parse_power()
        if node.head == "sym" and right.head == "tuple" and (right.args[0] + right.args[1]) in ("(]", "[)"):
            return Node("rel", (("in",), node, right))
        return product(node, right)

    def parse_signed(self) -> Node:
        if self.accept("-"):
            return Node("neg", (self.parse_signed(),))
        if self.accept("+"):
            return self.parse_signed()
        return self.parse_power()

    def starts(self, token: Token) -> bool:
        """Whether a token can begin a factor that is multiplied without a sign."""
        kind, value = token.kind, token.value
        if kind == "end":
            return False
        if kind == "num":
            return True
        if kind == "word":
            if value.lower() in ("and", "or") or self._unit_word(token, False):
                return False
            if value == "in" and re.match(r"\s*[\[({\\]", self.text[token.stop :]):
                return False
            return not (value in ("U", "u") and self._is_union(token))
        if kind == "cmd":
            if value in TEXT_COMMANDS or value in RELATIONS or value in CHOOSE:
                return False
            if value in FONT_COMMANDS:
                return not self._font_is_unit(token)
            if value in (r"\{", r"\frac", r"\sqrt", r"\binom", r"\lfloor", r"\lceil", r"\langle", r"\lvert", r"\infty"):
                return True
            if (
                value in ACCENTS
                or value in SKIPPED
                or value in (r"\pi", r"\ldots", r"\begin", r"\mathbb", r"\sum", r"\prod")
            ):
                return True
            if value in (
                r"\cup",
                r"\cap",
                r"\setminus",
                r"\backslash",
                r"\end",
                r"\cdot",
                r"\times",
                r"\div",
                r"\pm",
                r"\mp",
            ):
                return False
            name = value[1:]
            return (
                name in GREEK
                or name in VARIANTS
                or name in FUNCTIONS
                or name in SYMBOL_COMMANDS
                or name in ("cdots", "dots", "emptyset")
            )
        if value == "|":
            return self.bars == 0 and not self.in_builder
        return value in ("(", "[", "{")

    def _is_union(self, token: Token) -> bool:
        """A letter U between two intervals, typed for the union sign."""
        before = self.text[: token.start].rstrip()[-1:]
        return before in (")", "]") and bool(re.match(r"\s*[(\[][^()\[\]]*,", self.text[token.stop : token.stop + 200]))

    def _font_is_unit(self, token: Token) -> bool:
        match = re.match(r"\s*\{\s*([^{}]*)\s*\}", self.text[token.stop :])
        if match is None:
            return False
        content = match.group(1).strip()
        before = self.text[: token.start].rstrip()
        measured = before[-1:].isdigit() or before.endswith(("\\circ", "\\circ}"))
        if token.value == r"\mathrm" and len(content) == 1 and content in "mgsLNJWVAKCFcwhkl" and measured:
            # An upright letter behind a number is a unit; e, i and d are mathematics.
            return True
        return len(content) > 1 and content not in FUNCTIONS and not content.startswith("\\")

    def parse_power(self) -> Node:
        node = self.primary()
        for _ in range(MAX_DEPTH):
            token = self.peek()
            value = token.value
            if value == "^":
                self.take()
                node = self._exponent(node)
            elif value == "!" and self.text[token.start : token.start + 2] != "!=":
                self.take()
                if self.peek().value == "!" and self.peek().start == self.at:
                    self.take()
                    node = Node("fn", ("factorial2", node))
                else:
                    node = Node("fn", ("factorial", node))
            elif value == "'" and node.head == "sym":
                self.take()
                node = sym(node.args[0] + "'")
            elif value in ("%", r"\%"):
                self.take()
                node = Node("pct", (node,))
            elif value == r"\degree":
                self.take()
                node = Node("deg", (node,))
            elif (value == "_" and node.head in ("num", "neg")) or (value == "_" and node.head == "group"):
                self.take()
                base = self.raw_group()
                node = _in_base(node, base)
            else:
                return node
        raise ParseError("too many exponents")

    def _exponent(self, base: Node) -> Node:
        token = self.peek()
        if token.value in (r"\circ", r"\degree"):
            self.take()
            return Node("deg", (base,))
        if token.value == r"\prime" or token.value == "'":
            self.take()
            return sym(base.args[0] + "'") if base.head == "sym" else Node("app", ("'", base))
        if token.value == r"\top":
            self.take()
            return Node("fn", ("transpose", base))
        if token.value == "{":
            inner = self.raw_group()
            squeezed = inner.replace(" ", "")
            if squeezed in (r"\circ", r"\degree", r"\text{o}", r"\mathrm{o}", r"{\circ}"):
                return Node("deg", (base,))
            if squeezed in (
                r"\text{th}",
                r"\text{st}",
                r"\text{nd}",
                r"\text{rd}",
                "th",
                "st",
                "nd",
                "rd",
                r"\mathrm{th}",
            ):
                return base
            primes = re.fullmatch(r"(?:\\prime|')+", squeezed)
            if primes:
                marks = "'" * (squeezed.count("\\prime") + squeezed.count("'"))
                return sym(base.args[0] + marks) if base.head == "sym" else Node("app", (marks, base))
            if squeezed in (r"\top", "T") and base.head == "mat":
                return Node("fn", ("transpose", base))
            if squeezed in ("+", "-", "*", r"\ast"):
                return sym(base.args[0] + squeezed) if base.head == "sym" else Node("app", (squeezed, base))
            power = self.sub(inner)
        elif token.value in TEXT_COMMANDS:
            self.take()
            content = self.raw_group().strip()
            if content in ("th", "st", "nd", "rd"):
                return base
            if content in ("o", "\\circ"):
                return Node("deg", (base,))
            raise ParseError("text as an exponent")
        elif token.value in ("-", "+"):
            self.take()
            inner_node = self.parse_tight()
            power = Node("neg", (inner_node,)) if token.value == "-" else inner_node
        else:
            power = self.parse_tight()
            if self.peek().value == "^" and power.head in ("num", "sym", "const"):
                self.take()
                power = self._exponent(power)
        return Node("pow", (base, power))

    def parse_tight(self) -> Node:
        """One token or group, as after ^."""
        token = self.peek()
        if (
            token.kind == "word"
            and token.value not in FUNCTIONS
            and token.value not in PLAIN_GREEK
            and token.value != "pi"
        ):
            self.at = token.start + 1
            return self._letter(token.value[0])
        return self.primary()

    def sub(self, text: str) -> Node:
        """Parse a part of the text on its own."""
        node = Parser(text, depth=self.depth + 1, bound=self.bound).parse()
        if node.head == "list":
            raise ParseError("a list where a value must stand")
        return node

    def argument(self, *, whole_number: bool) -> Node:
        r"""The argument of \frac (one digit without braces) or \sqrt (a whole number without braces)."""
        token = self.peek()
        if token.value == "{":
            return self.sub(self.raw_group())
        if token.kind == "num" and not whole_number:
            self.at = token.start + 1
            return (
                num(int(token.value[0])) if token.value[0].isdigit() else self._fail("a point where a digit must stand")
            )
        if token.kind == "word" and token.value not in PLAIN_GREEK and token.value != "pi":
            self.at = token.start + 1
            return self._letter(token.value[0])
        return self.primary()

    def _fail(self, message: str) -> Node:
        raise ParseError(message)

    def primary(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")
        try:
            token = self.peek()
            if token.kind == "num":
                return self._number()
            if token.kind == "word":
                return self._word()
            if token.kind == "cmd":
                return self._command()
            if token.value in ("(", "["):
                return self._bracket()
            if token.value == "{":
                return self._brace()
            if token.value == "|":
                return self._bars()
            if token.value == "]":
                return self._reversed_interval()
            if token.value.startswith("..."):
                self.take()
                return DOTS
            raise ParseError(f"cannot read {token.value or 'the end'!r}")
        finally:
            self.depth -= 1

    def _number(self) -> Node:
        token = self.peek()
        based = BASE_DIGITS.match(self.text, token.start)
        if based and "." not in token.value:
            base = based.group(2) or based.group(3)
            node = _literal_in_base(based.group(1), base)
            if node is not None:
                self.at = based.end()
                return node
        self.take()
        if "." in token.value:
            repeat = re.match(r"\s*\\(?:overline|bar|dot|dots|overbar)\s*\{?\s*(\d+)\s*\}?", self.text[self.at :])
            if repeat:
                self.at += repeat.end()
                whole, _, digits = token.value.partition(".")
                period = repeat.group(1)
                value = Fraction(parse_int(whole + digits)) + Fraction(parse_int(period), 10 ** len(period) - 1)
                return num(value / 10 ** len(digits))
        ordinal = re.match(r"(?:st|nd|rd|th)(?![A-Za-z])", self.text[self.at :])
        if ordinal and "." not in token.value:
            self.at += ordinal.end()
        return parse_decimal(token.value)

    def _letter(self, letter: str) -> Node:
        if letter not in self.bound and letter in ("e", "i"):
            return Node("const", (letter,))
        return sym(letter)

    def _word(self) -> Node:
        token = self.peek()
        word = token.value
        hexadecimal = BASE_DIGITS.match(self.text, token.start)
        if hexadecimal and (hexadecimal.group(2) or hexadecimal.group(3)) in ("16", "11", "12", "13", "14", "15"):
            node = _literal_in_base(hexadecimal.group(1), hexadecimal.group(2) or hexadecimal.group(3))
            if node is not None and len(hexadecimal.group(1)) > 1:
                self.at = hexadecimal.end()
                return node
        if word.lower() in ("and", "or"):
            raise ParseError("a separator where a value must stand")
        if word in FUNCTIONS:
            self.take()
            return self._function(FUNCTIONS[word])
        if word.lower() in ("inf", "infinity", "infty", "oo") and len(word) > 1:
            self.take()
            return INFINITY
        if word.lower() == "pi":
            self.take()
            return Node("const", ("pi",))
        if word in PLAIN_GREEK:
            self.take()
            return self._subscripted(word)
        for prefix in PREFIXES:
            if word.startswith(prefix) and len(word) == len(prefix) + 1:
                self.at = token.start + len(prefix)
                return self._function(prefix)
        self.at = token.start + 1
        if word == "C" and re.match(r"\s*\(\s*\w+\s*,\s*\w+\s*\)", self.text[self.at :]):
            group = self._bracket()
            return Node("fn", ("binom", *group.args[2:]))
        return self._subscripted(word[0])

    def _subscripted(self, name: str) -> Node:
        """A symbol with its subscript, primes, and (for function names) its arguments."""
        node: Node
        while self.peek().value == "'":
            self.take()
            name += "'"
        if self.peek().value == "_":
            self.take()
            inner = self.raw_group()
            if inner == "\\" or not inner:
                raise ParseError("empty subscript")
            inner = _plain_subscript(inner)
            if inner in self.bound or (re.search(r"[A-Za-z]", inner) and re.search(r"[-+*/]|\d[a-z]", inner)):
                try:
                    node = Node("app", (name + "_", self.sub(inner)))
                except ParseError:
                    node = sym(f"{name}_{inner}")
            else:
                node = sym(f"{name}_{inner}")
        else:
            node = self._letter(name)
        while self.peek().value == "'" and node.head == "sym":
            self.take()
            node = sym(node.args[0] + "'")
        if self.peek().value == "(" and node.head == "sym":
            return self._application(node)
        return node

    def _application(self, node: Node) -> Node:
        """`f(x)` is a value of f, `x(x+1)` a product: told apart by the name and what stands in the brackets."""
        name = node.args[0]
        match = re.match(r"\(\s*([^()]*?)\s*\)", self.text[self.peek().start :])
        content = match.group(1) if match else ""
        letter = name[0] if not name.startswith("Theta") else "O"
        number = bool(re.fullmatch(r"-?\d+(?:\.\d+)?", content))
        single = bool(re.fullmatch(r"\\?[A-Za-z]+|[A-Za-z]_\{?\w+\}?", content)) and (
            len(content) == 1 or "\\" in content
        )
        always = letter in "fFgG" or name in ("O", "o", "Omega", "Theta")
        if always or number or (single and letter in "hHpPqQuvQE" and letter not in content):
            self.take()
            items, _ = self.parse_items()
            self.expect(")")
            return Node("app", (name, *items))
        return node

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        degree: Node | None = None
        while self.peek().value in ("_", "^") and name not in ("sqrt", "cbrt"):
            if self.take().value == "_":
                token = self.peek()
                base = self.argument(
                    whole_number=token.kind == "num" and len(token.value) <= 2 and not self._glued_log(token)
                )
            else:
                power = self.sub(self.raw_group()) if self.peek().value == "{" else self.parse_tight_signed()
        if name in ("sqrt", "cbrt"):
            if name == "cbrt":
                degree = num(3)
            elif self.peek().value == "[":
                match = re.match(r"\[([^\[\]]*)\]", self.text[self.peek().start :])
                if match:
                    self.at = self.peek().start + match.end()
                    degree = self.sub(match.group(1)) if match.group(1).strip() else None
            argument = self.argument(whole_number=True)
            return Node("fn", ("root", argument, degree or num(2)))
        arguments = self._arguments(name)
        if power is not None and power in (num(-1), Node("neg", (num(1),))) and name in INVERSE:
            name, power = INVERSE[name], None
        if name == "lg":
            name, base = "log", num(10)
        if (
            name in ("max", "min", "gcd", "lcm", "binom")
            and len(arguments) == 1
            and arguments[0].head in ("tuple", "list", "set")
        ):
            arguments = list(members(arguments[0]))
        if name == "det" and arguments[0].head == "mat":
            return determinant(arguments[0])
        node = Node("fn", (name, *arguments)) if base is None else Node("fn", (name, *arguments, base))
        if base is not None and name not in ("log", "ln"):
            raise ParseError(f"a subscript on {name}")
        return node if power is None else Node("pow", (node, power))

    def _glued_log(self, token: Token) -> bool:
        return bool(re.match(r"[23]\d", token.value)) and self.text[token.stop : token.stop + 1] not in (
            "(",
            " ",
            "{",
            "\\",
        )

    def parse_tight_signed(self) -> Node:
        if self.accept("-"):
            return Node("neg", (self.parse_tight(),))
        return self.parse_tight()

    def _arguments(self, name: str) -> list[Node]:
        token = self.peek()
        if token.value in ("(", "["):
            node = self._bracket()
            return list(node.args[2:]) if node.head == "tuple" else [node.args[0] if node.head == "group" else node]
        if token.value in ("{", r"\{"):
            node = self._brace() if token.value == "{" else self._command()
            return [node]
        if token.value == "|":
            return [self._bars()]
        if name in ("max", "min", "gcd", "lcm", "binom"):
            raise ParseError(f"{name} without brackets")
        factors: list[Node] = []
        negative = self.accept("-")
        while True:
            token = self.peek()
            is_function = (token.kind == "cmd" and token.value[1:] in FUNCTIONS and token.value != r"\sqrt") or (
                token.kind == "word" and (token.value in FUNCTIONS and token.value != "sqrt")
            )
            if factors and (is_function or token.value in ("(", "[", "{", "|", r"\{") or token.kind == "num"):
                break
            if not self.starts(token) and factors:
                break
            factors.append(self.parse_power())
            if is_function:
                break
        node = factors[0]
        for factor in factors[1:]:
            node = product(node, factor)
        return [Node("neg", (node,)) if negative else node]

    def _inside(self, builder: bool = False) -> tuple[list[Node], str]:
        bars, self.bars = self.bars, 0
        was, self.in_builder = self.in_builder, builder
        items, joined = self.parse_items()
        self.bars, self.in_builder = bars, was
        return items, joined

    def _bracket(self) -> Node:
        opening = self.take().value
        items, joined = self._inside()
        closing = self.take().value
        if closing not in (")", "]"):
            raise ParseError("unclosed bracket")
        if len(items) == 1:
            if opening + closing not in ("()", "[]"):
                raise ParseError("one member between unequal brackets")
            inner = items[0]
            return Node("group", (inner,)) if inner.head == "num" and self.peek().value == "_" else inner
        if joined != ",":
            return Node("list", (joined, *items))
        return Node("tuple", (opening, closing, *items))

    def _reversed_interval(self) -> Node:
        """French ]a, b[ and its half-open kin."""
        self.take()
        items, _ = self._inside()
        closing = self.take().value
        if len(items) != 2 or closing not in ("[", "]"):
            raise ParseError("unbalanced bracket")
        return Node("tuple", ("(", ")" if closing == "[" else "]", *items))

    def _brace(self) -> Node:
        self.take()
        if self.accept("}"):
            following = self.peek()
            if self.starts(following):
                return self.parse_power()
            raise ParseError("empty group")
        items, _ = self._inside()
        for command in CHOOSE:
            if len(items) == 1 and self.accept(command):
                lower, _ = self._inside()
                self.expect("}")
                return (
                    Node("fn", ("binom", items[0], lower[0]))
                    if command == r"\choose"
                    else Node("div", (items[0], lower[0]))
                )
        self.expect("}")
        return items[0] if len(items) == 1 else Node("set", tuple(items))

    def _set(self) -> Node:
        self.take()
        if self.accept(r"\}", "}"):
            return EMPTY
        items, _ = self._inside(builder=True)
        if self.peek().value in ("|", ":", r"\mid", r"\vert") and len(items) == 1:
            self.take()
            conditions, joined = self._inside()
            node = Node("setb", (items[0], joined, *conditions))
        else:
            node = Node("set", tuple(items))
        if not self.accept(r"\}", "}"):
            raise ParseError("unclosed set")
        return node

    def _bars(self) -> Node:
        closing = self.take().value
        self.bars += 1
        builder, self.in_builder = self.in_builder, False
        node = self.parse_sum()
        self.in_builder = builder
        self.bars -= 1
        closers = {r"\lvert": r"\rvert", r"\lVert": r"\rVert"}
        self.expect(closers.get(closing, closing))
        return determinant(node) if node.head == "mat" else Node("fn", ("abs", node))

    def _command(self) -> Node:
        token = self.peek()
        value = token.value
        name = value[1:]
        if value == r"\{":
            return self._set()
        if value in (r"\lvert", r"\vert", r"\|", r"\lVert", r"\Vert"):
            return self._bars()
        self.take()
        if value in (r"\pi",):
            return Node("const", ("pi",))
        if value == r"\infty":
            return INFINITY
        if value in (r"\ldots", r"\cdots", r"\dots", r"\dotsc", r"\vdots"):
            return DOTS
        if value in (r"\emptyset", r"\varnothing"):
            return EMPTY
        if value in (r"\mathbb", r"\Bbb"):
            letter = self.raw_group()
            power = re.match(r"\s*\^\s*(?:\{\s*([+*-])\s*\}|([+*]))", self.text[self.at :])
            sub = re.match(
                r"\s*_\s*\{?\s*((?:>|<|\\ge|\\geq|\\le|\\leq|\\neq|\\ne|\\geqslant)\s*0|\+|-)\s*\}?",
                self.text[self.at :],
            )
            mark = ""
            if power or sub:
                found = power or sub
                assert found is not None
                self.at += found.end()
                mark = "".join((found.group(1) or (found.lastindex == 2 and found.group(2)) or "").split())
            return Node("name", (letter + {">0": "+", "<0": "-", r"\neq0": "*", r"\ne0": "*"}.get(mark, mark),))
        if value == r"\frac" or value == r"\cfrac":
            upper = self.argument(whole_number=False)
            return Node("div", (upper, self.argument(whole_number=False)))
        if value == r"\binom":
            upper = self.argument(whole_number=False)
            return Node("fn", ("binom", upper, self.argument(whole_number=False)))
        if value in (r"\lfloor", r"\lceil"):
            bars, self.bars = self.bars, 0
            node = self.parse_sum()
            self.bars = bars
            self.expect(r"\rfloor" if value == r"\lfloor" else r"\rceil")
            return Node("fn", ("floor" if value == r"\lfloor" else "ceil", node))
        if value == r"\langle":
            items, _ = self._inside()
            self.expect(r"\rangle")
            return Node("tuple", ("(", ")", *items)) if len(items) > 1 else items[0]
        if value == r"\begin":
            return self._environment()
        if value in (r"\sum", r"\prod"):
            return self._big(name)
        if value in TEXT_COMMANDS or value in FONT_COMMANDS:
            return self._font(value)
        if value in ACCENTS:
            return self._accent(name)
        if value in SKIPPED:
            if value == r"\color":
                self.raw_group()
            return self.primary()
        if name in FUNCTIONS:
            return self._function(FUNCTIONS[name])
        name = VARIANTS.get(name, name)
        if name in GREEK or name in SYMBOL_COMMANDS:
            return self._subscripted(name)
        raise ParseError(f"unknown command {value}")

    def _font(self, command: str) -> Node:
        content = self.raw_group()
        plain = content.strip()
        if plain in FUNCTIONS:
            return self._function(FUNCTIONS[plain])
        if (plain.startswith("\\") and plain[1:] in GREEK | {"pi"}) or (len(plain) == 1 and plain.isalpha()):
            inner = plain.lstrip("\\")
            return Node("const", ("pi",)) if inner == "pi" else self._subscripted(inner)
        if re.fullmatch(r"[-+\d., ]+", plain):
            return self.sub(plain)
        if re.fullmatch(r"\([A-Z]\)", plain) or command in TEXT_COMMANDS:
            raise ParseError("text inside mathematics")
        if re.fullmatch(r"[A-Za-z]{2,}", plain):
            return self._subscripted(plain) if plain != "pi" else Node("const", ("pi",))
        return self.sub(plain)

    def _accent(self, name: str) -> Node:
        if name == "overset":
            self.raw_group()
            return self.primary()
        content = "".join(self.raw_group().split())
        if name in ("overline", "underline", "overleftrightarrow", "overparen") and re.fullmatch(r"[A-Z]{2}", content):
            # The segment AB: its name is its length, in either direction.
            node = Node("mul", (sym(content[0]), sym(content[1])))
            return node
        return self._subscripted(f"{name}({content})")

    def _big(self, name: str) -> Node:
        lower = upper = None
        while self.peek().value in ("_", "^"):
            if self.take().value == "_":
                lower = self.raw_group()
            else:
                upper = self.raw_group()
        match = re.fullmatch(r"\s*([A-Za-z])\s*=\s*(.+)", lower or "", re.DOTALL)
        if match is None or upper is None:
            raise ParseError(f"\\{name} without limits")
        variable = match.group(1)
        low, high = self.sub(match.group(2)), self.sub(upper)
        bound, self.bound = self.bound, self.bound | {variable}
        body = self.parse_product()
        self.bound = bound
        return Node(name, (variable, low, high, body))

    def _environment(self) -> Node:
        kind = self.raw_group()
        if kind not in MATRICES:
            raise ParseError(f"environment {kind}")
        if kind == "array" and self.peek().value == "{":
            self.raw_group()
        end = self.text.find("\\end{" + kind + "}", self.at)
        if end < 0 or "\\begin" in self.text[self.at : end]:
            raise ParseError("unclosed matrix")
        body = self.text[self.at : end]
        self.at = end + len("\\end{" + kind + "}")
        rows = []
        for line in re.split(r"\\\\(?:\s*\[[^\]]*\])?|\\cr(?![A-Za-z])", body):
            line = line.replace("\\hline", "").strip()
            if line:
                rows.append(tuple(self.sub(cell) for cell in line.split("&")))
        if not rows or len({len(row) for row in rows}) != 1:
            raise ParseError("ragged matrix")
        node = Node("mat", tuple(rows))
        return determinant(node) if kind == "vmatrix" else node


KNOWN = (
    {value[1:] for value in (*RELATIONS, *TEXT_COMMANDS, *FONT_COMMANDS, *ACCENTS, *SKIPPED, *CHOOSE) if value[0] == "\\"}
    | {"frac", "binom", "lfloor", "rfloor", "lceil", "rceil", "langle", "rangle", "lvert", "rvert", "lVert", "rVert"}
    | {"vert", "Vert", "begin", "end", "sum", "prod", "int", "lim", "infty", "emptyset", "varnothing", "mathbb", "Bbb"}
    | {"ldots", "cdots", "dots", "dotsc", "vdots", "cup", "cap", "setminus", "backslash", "smallsetminus", "bigcup", "mid"}
    | {"cdot", "times", "div", "pm", "mp", "circ", "degree", "prime", "top", "pmod", "bmod", "mod", "lor", "vee", "land"}
    | {"wedge", "not", "to", "pi", "cfrac", "ast", "bullet", "rightarrow", "implies", "iff", "quad", "cdotp", "cr", "hline"}
)  # fmt: skip


def number_word(text: str) -> int | None:
    """The number that words like `seven` or `forty-three` stand for."""
    parts = text.lower().replace("-", " ").split()
    if len(parts) == 2 and parts[0] in TENS and 0 < NUMBER_WORDS.get(parts[1], 0) < 10:
        return TENS[parts[0]] + NUMBER_WORDS[parts[1]]
    if len(parts) != 1:
        return None
    return (NUMBER_WORDS | TENS | TEENS).get(parts[0])


def is_known(name: str) -> bool:
    return name in KNOWN or name in GREEK or name in VARIANTS or name in FUNCTIONS or name in SYMBOL_COMMANDS


def determinant(node: Node) -> Node:
    """The determinant of a small matrix as a sum of products, by its first row."""
    rows = node.args
    if len(rows) != len(rows[0]) or len(rows) > 5:
        raise ParseError("determinant")
    if len(rows) == 1:
        cell: Node = rows[0][0]
        return cell
    terms = []
    for at, cell in enumerate(rows[0]):
        minor = Node("mat", tuple(row[:at] + row[at + 1 :] for row in rows[1:]))
        term = Node("mul", (cell, determinant(minor)))
        terms.append(Node("neg", (term,)) if at % 2 else term)
    return Node("add", tuple(terms))


def members(node: Node) -> tuple[Node, ...]:
    """The members of a list, tuple or set."""
    if node.head == "tuple":
        return node.args[2:]
    if node.head in ("list", "ratio"):
        return node.args[1:]
    return node.args


def _set_like(node: Node) -> bool:
    return node.head in ("set", "tuple", "union", "inter", "minus", "name", "setb")


def _proper(node: Node) -> bool:
    """A fraction of two positive whole numbers that is smaller than one, as in a mixed number."""
    if node.head != "div":
        return False
    upper, lower = node.args
    if upper.head != "num" or lower.head != "num" or upper.args[1] or lower.args[1]:
        return False
    return bool(0 < upper.args[0] < lower.args[0])


def _plain_subscript(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textrm|mbox|operatorname|rm|mathbf|textbf|mathit)\s*\{([^{}]*)\}", r"\1", text)
    return "".join(text.replace("\\", "").replace("{", "").replace("}", "").split())


def _literal_in_base(digits: str, base: str) -> Node | None:
    radix = int(base) if re.fullmatch(r"[0-9]{1,2}", base) else NUMBER_WORDS.get(base)
    if radix is None or not 2 <= radix <= 36 or len(digits) > 4000:
        return None
    try:
        value = int(digits, radix)
    except ValueError:
        return None
    return Node("based", (value, radix))


def _in_base(node: Node, base: str) -> Node:
    inner = node.args[0] if node.head == "group" else node
    if inner.head != "num" or inner.args[1] or inner.args[0].denominator != 1:
        raise ParseError("a subscript on a value")
    literal = _literal_in_base(str(inner.args[0].numerator) if inner.args[0] < 10**4000 else "", base.strip())
    if literal is None:
        raise ParseError("digits that the base does not have")
    return literal


def parse(text: str) -> Node:
    """The tree of a normalised answer.

    Raises:
        ParseError: the text is not mathematics that this parser reads.
    """
    try:
        return Parser(text).parse()
    except (RecursionError, IndexError, OverflowError, ZeroDivisionError) as error:
        raise ParseError(f"{type(error).__name__}") from error
