"""Values of syntax trees: exact fractions where possible, else numbers of any wanted precision. Bounded work, never an eval."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, gcd, isqrt, lcm
from typing import Any

from mpmath import mp
from mpmath.libmp.libmpf import ComplexResult

from tseeds.grading.parse import INFINITY, Node, names, num

MAX_BITS = 200_000
MAX_FACTORIAL = 5_000
MAX_TERMS = 400

Env = Mapping[str, Any]


class NotExact(ValueError):
    """The value is no fraction, or not one that is cheap to write down."""


class Undefined(ValueError):
    """No value here: a pole, a missing symbol, or something that has no number."""


class Pole(Undefined):
    """A division by zero."""


class Huge(ValueError):
    """A number too large (or too near zero) to be written even in floating point."""


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _checked(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise NotExact("too large")
    return value


def exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The rational `degree`-th root (real one for odd degrees), if there is one."""
    if degree < 0:
        return None if value == 0 else exact_root(1 / value, -degree)
    if value < 0:
        if degree % 2 == 0:
            return None
        root = exact_root(-value, degree)
        return None if root is None else -root
    parts = []
    for part in (value.numerator, value.denominator):
        root_int = _integer_root(part, degree)
        if root_int**degree != part:
            return None
        parts.append(root_int)
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, degree: int) -> int:
    if degree == 2:
        return isqrt(value)
    if value < 2:
        return value
    if degree >= value.bit_length():
        return 1
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def exact_power(base: Fraction, power: Fraction) -> Fraction:
    """base ** power as a fraction.

    Raises:
        NotExact: the result is irrational or has more than MAX_BITS bits.
        Undefined: zero to a power that is not positive.
    """
    if base == 0:
        if power > 0:
            return Fraction(0)
        if power == 0:
            return Fraction(1)
        raise Pole("division by zero")
    if base in (1, -1):
        if power.denominator == 1:
            return Fraction(1) if base == 1 or power.numerator % 2 == 0 else Fraction(-1)
        if base == 1:
            return Fraction(1)
    if power.denominator > 64 or abs(power.numerator) * _bits(base) > MAX_BITS:
        raise NotExact("too large")
    root = exact_root(base, power.denominator) if power.denominator > 1 else base
    if root is None:
        raise NotExact("irrational")
    return Fraction(root**power.numerator)


@lru_cache(maxsize=4096)
def exact(node: Node) -> Fraction:
    """The exact value of a tree without symbols.

    Raises:
        NotExact: it is irrational, symbolic or too large.
        Undefined: it divides by zero.
    """
    head, args = node
    if head == "num":
        return args[0]
    if head == "based":
        return Fraction(args[0])
    if head == "neg":
        return -exact(args[0])
    if head in ("add", "mixed"):
        return _checked(sum((exact(arg) for arg in args), Fraction(0)))
    if head == "mul":
        value = Fraction(1)
        for arg in args:
            value = _checked(value * exact(arg))
        return value
    if head == "div":
        upper, lower = exact(args[0]), exact(args[1])
        if lower == 0:
            raise Pole("division by zero")
        return _checked(upper / lower)
    if head == "pow":
        return exact_power(exact(args[0]), exact(args[1]))
    if head == "pct":
        return exact(args[0]) / 100
    if head == "fn":
        return _exact_function(args[0], args[1:])
    if head in ("sum", "prod"):
        raise NotExact("a sum")
    raise NotExact(head)


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise NotExact("no whole number")
    return value.numerator


def _exact_function(name: str, args: tuple[Node, ...]) -> Fraction:
    if name == "root":
        value, degree = exact(args[0]), _whole(exact(args[1]))
        if not 0 < degree <= 64:
            raise NotExact("degree")
        root = exact_root(value, degree)
        if root is None:
            raise NotExact("irrational")
        return root
    if name == "log" and len(args) == 2:
        return _exact_log(exact(args[0]), exact(args[1]))
    if name in ("floor", "ceil"):
        value = exact(args[0])
        return Fraction(value.__floor__() if name == "floor" else value.__ceil__())
    if name == "abs":
        return abs(exact(args[0]))
    if name in ("factorial", "factorial2"):
        n = _whole(exact(args[0]))
        if not 0 <= n <= MAX_FACTORIAL:
            raise NotExact("factorial")
        if name == "factorial":
            return Fraction(factorial(n))
        product = 1
        for k in range(n, 1, -2):
            product *= k
        return Fraction(product)
    if name == "binom":
        n, k = _whole(exact(args[0])), _whole(exact(args[1]))
        if not 0 <= n <= MAX_FACTORIAL or k < 0:
            raise NotExact("binomial")
        return Fraction(comb(n, k))
    if name in ("gcd", "lcm"):
        return Fraction((gcd if name == "gcd" else lcm)(*(_whole(exact(arg)) for arg in args)))
    if name in ("max", "min"):
        return (max if name == "max" else min)(exact(arg) for arg in args)
    raise NotExact(name)


def _exact_log(value: Fraction, base: Fraction) -> Fraction:
    if value <= 0 or base <= 0 or base == 1 or _bits(value) > 10_000:
        raise NotExact("logarithm")
    power, step = Fraction(1), base if base > 1 else 1 / base
    sign = 1 if base > 1 else -1
    if value < 1:
        value, sign = 1 / value, -sign
    count = 0
    while power < value:
        power *= step
        count += 1
    if power != value:
        raise NotExact("irrational")
    return Fraction(sign * count)


def symbols(node: Node) -> frozenset[str]:
    """The free symbols of a tree."""
    return _symbols(node)


@lru_cache(maxsize=4096)
def _symbols(node: Node) -> frozenset[str]:
    head, args = node
    if head == "sym":
        return frozenset(args)
    found: frozenset[str] = frozenset()
    for arg in args:
        if isinstance(arg, Node):
            found |= _symbols(arg)
        elif isinstance(arg, tuple):
            for cell in arg:
                if isinstance(cell, Node):
                    found |= _symbols(cell)
    return found - {args[0]} if head in ("sum", "prod") else found


def walk(node: Node) -> list[Node]:
    """All nodes of a tree."""
    found, todo = [], [node]
    while todo:
        here = todo.pop()
        found.append(here)
        for arg in here.args:
            if isinstance(arg, Node):
                todo.append(arg)
            elif isinstance(arg, tuple):
                todo.extend(cell for cell in arg if isinstance(cell, Node))
    return found


def substitute(node: Node, replace: Callable[[Node], Node | None]) -> Node:
    """A copy in which `replace(part)` stands for every part where it is not None."""
    new = replace(node)
    if new is not None:
        return new
    args = tuple(
        substitute(arg, replace)
        if isinstance(arg, Node)
        else tuple(substitute(cell, replace) if isinstance(cell, Node) else cell for cell in arg)
        if isinstance(arg, tuple)
        else arg
        for arg in node.args
    )
    return Node(node.head, args)


class Numeric:
    """Evaluates trees with mpmath's current precision.

    `degrees` is the factor of a degree sign (pi/180 or 1), `log_ten` reads a bare log as base ten. `complex_seen` tells
    whether a step left the real numbers, where roots and logarithms have branches.
    """

    def __init__(self, env: Env, *, degrees: Any = None, log_ten: bool = False) -> None:
        self.env = env
        self.degrees = mp.pi / 180 if degrees is None else degrees
        self.log_ten = log_ten
        self.complex_seen = False
        self.inside_function = 0

    def value(self, node: Node) -> Any:
        """The value as an mpf or mpc.

        Raises:
            Undefined, Huge.
        """
        try:
            return self._value(node)
        except (ZeroDivisionError, ComplexResult) as error:
            raise Pole(str(error)) from error
        except (OverflowError, MemoryError) as error:
            raise Huge(str(error)) from error
        except (TypeError, ValueError) as error:
            if isinstance(error, (Undefined, Huge)):
                raise
            raise Undefined(str(error)) from error

    def _value(self, node: Node) -> Any:
        head, args = node
        if head == "num":
            return mp.mpf(args[0].numerator) / args[0].denominator
        if head == "based":
            return mp.mpf(args[0])
        if head == "sym":
            if args[0] not in self.env:
                raise Undefined(args[0])
            value = self.env[args[0]]
            return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value
        if head == "const":
            if args[0] == "pi":
                return +mp.pi
            if args[0] == "e":
                return +mp.e
            if args[0] == "i":
                return mp.mpc(0, 1)
            raise Undefined(args[0])
        if head == "neg":
            return -self._value(args[0])
        if head in ("add", "mixed"):
            total = self._value(args[0])
            for arg in args[1:]:
                total = total + self._value(arg)
            return total
        if head == "mul":
            total = self._value(args[0])
            for arg in args[1:]:
                total = total * self._value(arg)
            return total
        if head == "div":
            lower = self._value(args[1])
            upper = self._value(args[0])
            if not lower:
                raise Pole("division by zero")
            return upper / lower
        if head == "pow":
            return self._power(args[0], args[1])
        if head == "pct":
            return self._value(args[0]) / 100
        if head == "deg":
            factor = mp.pi / 180 if self.inside_function else self.degrees
            return self._value(args[0]) * factor
        if head == "unit" or head == "group":
            return self._value(args[0])
        if head == "fn":
            return self._function(args[0], args[1:])
        if head == "app":
            return self._opaque(args[0], [self._value(arg) for arg in args[1:]])
        if head in ("sum", "prod"):
            return self._big(node)
        if head == "rel" and len(args) == 3 and args[0] == ("=",):
            raise Undefined("a relation")
        raise Undefined(head)

    def _power(self, base_node: Node, power_node: Node) -> Any:
        base = self._value(base_node)
        try:
            power: Any = exact(power_node)
        except (NotExact, Undefined):
            power = self._value(power_node)
            if mp.isint(power) and abs(power) < 2**4000:
                power = Fraction(int(mp.re(power)))
        if isinstance(power, Fraction):
            if power.denominator == 1:
                return self._integer_power(base, power.numerator)
            if power.denominator % 2 and not mp.im(base) and mp.re(base) < 0 and power.denominator < 1000:
                root = -mp.root(-mp.re(base), power.denominator)
                return self._integer_power(root, power.numerator)
            power = mp.mpf(power.numerator) / power.denominator
        if not base:
            if mp.re(power) > 0:
                return mp.mpf(0)
            raise Pole("zero to a negative power")
        if mp.im(base) or mp.re(base) < 0:
            self.complex_seen = True
        if base == mp.e or base_node == Node("const", ("e",)):
            return self._exp(power)
        return self._exp(power * mp.log(base))

    def _integer_power(self, base: Any, power: int) -> Any:
        if power.bit_length() > 4000:
            if base in (0, 1):
                return base
            raise Huge("power")
        if not base and power < 0:
            raise Pole("division by zero")
        return mp.power(base, power)

    def _exp(self, power: Any) -> Any:
        if mp.mag(power) > 4000:
            raise Huge("exponential")
        return mp.exp(power)

    def _opaque(self, name: str, values: list[Any]) -> Any:
        """A function of which nothing is known: a number that depends on its name and arguments alone."""
        key = name + "".join(f"|{mp.nstr(mp.re(v), 15)},{mp.nstr(mp.im(v), 15)}" for v in values)
        digest = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:6], "big")
        return mp.mpf(1) / 2 + mp.mpf(digest) / 2**48

    def _function(self, name: str, args: tuple[Node, ...]) -> Any:
        trigonometric = name in TRIG
        self.inside_function += trigonometric
        try:
            values = [self._value(arg) for arg in args]
        finally:
            self.inside_function -= trigonometric
        x = values[0]
        if name in ("log", "ln"):
            if not x:
                raise Undefined("log 0")
            if mp.im(x) or mp.re(x) < 0:
                self.complex_seen = True
            if len(values) == 2:
                return mp.log(x) / mp.log(values[1])
            return mp.log(x) / mp.ln10 if name == "log" and self.log_ten else mp.log(x)
        if name == "root":
            return self._root(x, values[1])
        if name == "exp":
            return self._exp(x)
        if name == "abs":
            return abs(x)
        if name in ("floor", "ceil"):
            return self._round(name, x)
        if name == "sign":
            return mp.sign(x)
        if name in ("factorial", "factorial2"):
            if mp.mag(x) > 40:
                raise Huge("factorial")
            return mp.factorial(x) if name == "factorial" else mp.fac2(x)
        if name == "binom":
            if mp.mag(x) > 40 or mp.mag(values[1]) > 40:
                raise Huge("binomial")
            return mp.binomial(x, values[1])
        if name in ("max", "min"):
            if any(mp.im(v) for v in values):
                raise Undefined("order of complex numbers")
            return (max if name == "max" else min)(mp.re(v) for v in values)
        if name in ("gcd", "lcm"):
            whole = [int(mp.re(v)) for v in values if mp.isint(v) and abs(v) < 10**30]
            if len(whole) != len(values):
                raise Undefined(name)
            return mp.mpf((gcd if name == "gcd" else lcm)(*whole))
        method = METHODS.get(name)
        if method is None or len(values) != 1:
            raise Undefined(name)
        if trigonometric and mp.mag(x) > 4000:
            raise Huge("angle")
        if name in ("arcsin", "arccos") and (mp.im(x) or abs(mp.re(x)) > 1):
            self.complex_seen = True
        return method(x)

    def _root(self, x: Any, degree: Any) -> Any:
        if not mp.im(x) and mp.re(x) < 0:
            if mp.isint(degree) and int(mp.re(degree)) % 2 and degree > 0:
                return -mp.root(-mp.re(x), int(mp.re(degree)))
            self.complex_seen = True
        if not x:
            return mp.mpf(0)
        if mp.isint(degree) and 0 < degree < 10_000:
            return mp.sqrt(x) if degree == 2 else mp.root(x, int(mp.re(degree)))
        return self._exp(mp.log(x) / degree)

    def _round(self, name: str, x: Any) -> Any:
        if mp.im(x):
            raise Undefined(name)
        x = mp.re(x)
        nearest = mp.nint(x)
        if mp.mag(x) > mp.prec - 20:
            return x
        # An integer up to rounding errors is that integer.
        if abs(x - nearest) < mp.mpf(10) ** (-mp.dps // 2):
            return nearest
        return mp.floor(x) if name == "floor" else mp.ceil(x)

    def _big(self, node: Node) -> Any:
        variable, low, high, body = node.args
        if high == INFINITY:
            raise Undefined("an infinite sum")
        start, stop = self._value(low), self._value(high)
        if not mp.isint(start) or not mp.isint(stop) or stop - start > MAX_TERMS:
            raise Undefined("limits of a sum")
        total = mp.mpf(0 if node.head == "sum" else 1)
        outer = self.env
        try:
            for k in range(int(mp.re(start)), int(mp.re(stop)) + 1):
                self.env = {**outer, variable: Fraction(k)}
                term = self._value(body)
                total = total + term if node.head == "sum" else total * term
        finally:
            self.env = outer
        return total


TRIG = names("sin cos tan cot sec csc")
METHODS: dict[str, Callable[[Any], Any]] = {
    "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc, "arcsin": mp.asin,
    "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot, "arcsec": mp.asec, "arccsc": mp.acsc, "sinh": mp.sinh,
    "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth, "sech": mp.sech, "csch": mp.csch, "arcsinh": mp.asinh,
    "arccosh": mp.acosh, "arctanh": mp.atanh, "arg": mp.arg,
}  # fmt: skip


def real(node: Node, digits: int = 60) -> Any:
    """The real value of a tree without symbols; +-inf for infinities.

    Raises:
        Undefined, Huge: it has none.
    """
    if node == INFINITY:
        return mp.inf
    if node.head == "neg" and node.args[0] == INFINITY:
        return -mp.inf
    if node.head == "add" and node.args == (INFINITY,):
        return mp.inf
    with mp.workdps(digits):
        value = Numeric({}).value(node)
        if abs(mp.im(value)) > mp.mpf(10) ** (-digits // 2) * (1 + abs(mp.re(value))):
            raise Undefined("not real")
        return mp.re(value)


def modular(node: Node, prime: int) -> int:
    """An integer expression modulo a prime: equality of numbers too long to be written down.

    Raises:
        NotExact: it holds anything but sums, products, quotients and whole powers of fractions.
    """
    head, args = node
    if head == "num":
        if args[0].denominator % prime == 0:
            raise NotExact("prime")
        return args[0].numerator * pow(args[0].denominator, -1, prime) % prime
    if head == "neg":
        return -modular(args[0], prime) % prime
    if head in ("add", "mixed"):
        return sum(modular(arg, prime) for arg in args) % prime
    if head == "mul":
        product = 1
        for arg in args:
            product = product * modular(arg, prime) % prime
        return product
    if head == "div":
        lower = modular(args[1], prime)
        if lower == 0:
            raise NotExact("prime")
        return modular(args[0], prime) * pow(lower, -1, prime) % prime
    if head == "pow":
        power = _whole(exact(args[1]))
        base = modular(args[0], prime)
        if base == 0:
            raise NotExact("prime")
        return pow(base, power % (prime - 1), prime)
    value = exact(node)
    return modular(num(value), prime)


PRIMES = (2305843009213693951, 2305843009213693921, 2305843009213693907)
