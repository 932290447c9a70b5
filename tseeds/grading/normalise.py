"""One spelling for the many ways in which the same mathematics is typed: Unicode, spacing, fences, thousands."""

from __future__ import annotations

import re
import unicodedata

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙₖᵢ", "0123456789+-nki", strict=True))
VULGAR = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
    "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8),
    "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‒": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
    "×": r"\times ", "✕": r"\times ", "✖": r"\times ", "⨯": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "•": r"\cdot ", "∗": "*", "＊": "*", "÷": r"\div ", "⁄": "/", "∕": "/", "∶": ":", "：": ":",
    "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ", "∞": r"\infty ", "∅": r"\emptyset ", "⌀": r"\emptyset ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∉": r"\notin ", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≧": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "≡": r"\equiv ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "′": "'", "’": "'", "‘": "'", "″": "''",
    "∠": r"\angle ", "△": r"\triangle ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∂": r"\partial ",
    "∇": r"\nabla ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ",
    "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "ℝ": r"\mathbb{R}", "ℚ": r"\mathbb{Q}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "…": r"\ldots ", "⋯": r"\ldots ", "ℏ": r"\hbar ", "ℓ": r"\ell ", "∣": "|",
    "∨": r"\lor ", "∧": r"\land ", "→": r"\to ", "∝": r"\propto ", "，": ", ", "、": ", ", "；": "; ", "“": '"', "”": '"',
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "ϵ": r"\epsilon ",
    "ζ": r"\zeta ", "η": r"\eta ", "θ": r"\theta ", "ϑ": r"\theta ", "ι": r"\iota ", "κ": r"\kappa ", "λ": r"\lambda ",
    "μ": r"\mu ", "µ": r"\mu ", "ν": r"\nu ", "ξ": r"\xi ", "π": r"\pi ", "ρ": r"\rho ", "σ": r"\sigma ",
    "τ": r"\tau ", "φ": r"\phi ", "ϕ": r"\phi ", "χ": r"\chi ", "ψ": r"\psi ", "ω": r"\omega ", "Γ": r"\Gamma ",
    "Δ": r"\Delta ", "Θ": r"\Theta ", "Λ": r"\Lambda ", "Ξ": r"\Xi ", "Π": r"\Pi ", "Σ": r"\Sigma ", "Φ": r"\Phi ",
    "Ψ": r"\Psi ", "Ω": r"\Omega ", "£": "", "€": "", "¥": "", "₹": "", "￥": "", "＄": "$",
}  # fmt: skip
TRANSLATION = str.maketrans(SYMBOLS)
SUP_RUN = re.compile("[" + "".join(SUPERSCRIPTS) + "]+")
SUB_RUN = re.compile("[" + "".join(SUBSCRIPTS) + "]+")
VULGAR_ANY = re.compile("[" + "".join(VULGAR) + "]")
SUBSUP = "".join(SUPERSCRIPTS) + "".join(SUBSCRIPTS)

FENCES = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*")
DROPPED = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it|sf|tt|large|Large|LARGE|huge|Huge|small|tiny|"
    r"normalsize|boldmath|strut|phantom\{[^{}]*\}|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\}|label\{[^{}]*\}|"
    r"pounds|euro|notag|nonumber)(?![A-Za-z])"
)
SPACES = re.compile(
    r"\\\\|\\[,;:! >/\n]|\\(?:quad|qquad|thinspace|medspace|thickspace|enspace|nobreakspace)(?![A-Za-z])|~"
)
THIN = r"(?:\\[,;: ]|~|\\thinspace(?![A-Za-z])\s*)"
THIN_THOUSANDS = re.compile(rf"(?<=\d)\s*{THIN}\s*(?=\d{{3}}(?!\d))")
COMMA_GLUE = re.compile(r"(?<=\d)(?:\{,\}|,\s*\\!)\s*(?=\d)")
SPACE_THOUSANDS = re.compile(r"(?<![\d.,])(?<![\d.,] )\d{1,3}(?: \d{3})+(?![\d.])(?! ?[/\d])")
COMMA_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
BRACKETS = re.compile(r"\\[{}]|[()\[\]]")
ALIGNED = re.compile(r"\\(?:begin|end)\{(?:aligned|align\*?|equation\*?|gathered|split|displaymath|math|center)\}")
FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
BINOM = re.compile(r"\\[dt]binom(?![A-Za-z])")
DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
CROSS_X = re.compile(r"(?<=\d)\s*[xX]\s*(?=\d)|(?<=[\d.])\s*[xX]\s*(?=10\s*\^)")


def plain_unicode(text: str) -> str:
    """NFKC with the meaning kept: superscripts stay exponents, vulgar fractions fractions; control characters go."""
    if text.isascii():
        if text.isprintable():
            return text
    else:
        # Before NFKC, which would turn x² into x2 and 1½ into 11/2.
        text = SUP_RUN.sub(lambda m: "^{" + "".join(SUPERSCRIPTS[c] for c in m.group()) + "}", text)
        text = SUB_RUN.sub(lambda m: "_{" + "".join(SUBSCRIPTS[c] for c in m.group()) + "}", text)
        text = VULGAR_ANY.sub(lambda m: " \\frac{{{}}}{{{}}}".format(*VULGAR[m.group()]), text)
        text = unicodedata.normalize("NFKC", text.translate(TRANSLATION)).translate(TRANSLATION)
    out = []
    for char in text:
        if char.isascii():
            out.append(char if char.isprintable() else " " if char in "\t\n\r" else "")
            continue
        category = unicodedata.category(char)
        if category == "Nd":
            out.append(str(unicodedata.decimal(char)))
        elif category == "Zs":
            out.append(" ")
        elif category not in ("Cc", "Cf", "Cs", "Co", "Cn"):
            out.append(char)
    return "".join(out)


def join_thousands(text: str) -> str:
    """Remove the commas of numbers like 1,234,567.

    Inside brackets `312,123` are two members unless a comma with a space shows that members are separated that way.
    """

    brackets = BRACKETS.finditer(text)
    depth, upcoming = 0, next(brackets, None)

    def join(match: re.Match[str]) -> str:
        nonlocal depth, upcoming
        start, stop = match.span()
        while upcoming is not None and upcoming.start() < start:
            depth += 1 if upcoming.group()[-1] in "([{" else -1
            upcoming = next(brackets, None)
        number = match.group()
        if number[0] == "0" or text[start - 1 : start] == "," or re.match(r",\S", text[stop:]):
            return number
        spaced = text[:start].endswith(", ") or text[stop : stop + 2] == ", "
        if not spaced and depth > 0:
            return number
        return number.replace(",", "")

    return COMMA_THOUSANDS.sub(join, text) if "," in text else text


def _flatten_parentheses(text: str) -> str:
    """Collapse ((...)) to (...), in linear time, so that deep nesting of nothing costs nothing."""
    partner: dict[int, int] = {}
    stack: list[int] = []
    for at, char in enumerate(text):
        if char == "(":
            stack.append(at)
        elif char == ")" and stack:
            partner[stack.pop()] = at
    drop: set[int] = set()
    for opened, closed in partner.items():
        if partner.get(opened + 1) == closed - 1:
            drop.update((opened + 1, closed - 1))
    return "".join(char for at, char in enumerate(text) if at not in drop)


def normalise(text: str) -> str:
    """The one spelling of an answer that the parser reads. Idempotent on its own output for all that is mathematics.

    >>> normalise(r"$\\left( 1{,}000 ,\\; \\dfrac12 \\right)$.")
    '( 1000 , \\\\frac12 )'
    """
    text = plain_unicode(text)
    if "\\" in text or "~" in text or "{" in text:
        text = COMMA_GLUE.sub("", text)
        text = THIN_THOUSANDS.sub("", text)
        text = text.replace("\\$", "")
        text = re.sub(r"\\(?:left|right)\s*\.(?!\d)", "", text)
        text = FENCES.sub("", text)
        text = DELIMITERS.sub("", text)
        text = ALIGNED.sub("", text)
        text = SPACES.sub(lambda m: m.group() if m.group() == "\\\\" else "" if m.group() == "\\!" else " ", text)
        text = DROPPED.sub(" ", text)
        text = FRAC.sub(r"\\frac", text)
        text = BINOM.sub(r"\\binom", text)
    text = text.replace("$", "")
    text = " ".join(text.split())
    if "**" in text:
        text = re.sub(r"^\*\*(.*)\*\*$", r"\1", text)
        text = text.replace("**", "^")
    text = CROSS_X.sub(r" \\times ", text)
    text = SPACE_THOUSANDS.sub(lambda m: m.group().replace(" ", ""), text)
    text = join_thousands(text)
    text = re.sub(r"(?:\s|(?<!\.)\.|[,;:]|\\+)+$", "", text) if text[-1:] in " .,;:\\" else text
    if "((((((((" in text:
        text = _flatten_parentheses(text)
    return text.strip()
