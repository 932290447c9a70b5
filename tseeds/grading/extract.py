"""Find the answer in a response: in time linear in its length, without ever trusting text that was taken back."""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]|<\|begin_of_box\|>|<\|end_of_box\|>", re.DOTALL)
ESCAPED = re.compile(r"\\.", re.DOTALL)
BARE_BOX = re.compile(r"[ \t]*([-+]?\d[\d,]*(?:\.\d+)?)(?=\s|[$.,;)\\]|$)")
FILLER = re.compile(
    r"\\(?:quad|qquad|text|mbox|mathrm|textrm|displaystyle|left|right|[\[\]() ,;:!&])|\\\\|[\s$&{}~*().]+"
)
NAME = r"[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*="
JOINT = re.compile(rf"(?:(?:[,;]|and|or)+(?P<name>{NAME})?)", re.IGNORECASE)
NAME_BEFORE = re.compile(rf"({NAME})[\s$]*$")
RETRACTION = re.compile(
    r"\b(?:wait|no|not|actually|wrong|incorrect|mistake|error|oops|sorry|instead|rather|correction|hmm|however|but)\b",
    re.IGNORECASE,
)
TAIL = re.compile(r"(?:\\(?:text|mathrm|mbox|,|;|!|%|quad|circ)|\^|[\s.,$%])")
MAX_JOINED = 200
HASHES = re.compile(r"####[ \t]*([^\n]*)")


@dataclass(frozen=True, slots=True)
class Box:
    """A box in a text: [start, stop) with its wrapper, and what stands inside. `closed` is False if the text ends first."""

    start: int
    stop: int
    content: str
    closed: bool = True


def boxes(text: str) -> list[Box]:
    """The outermost boxes of `text` in order; at most the last one is not closed.

    >>> [box.content for box in boxes(r"so \\boxed{\\frac{1}{2}}, or \\fbox{3}")]
    ['\\\\frac{1}{2}', '3']
    """
    found: list[Box] = []
    stack: list[tuple[int, int] | None] = []
    special: tuple[int, int] | None = None
    pending: re.Match[str] | None = None
    for match in TOKEN.finditer(text):
        token = match.group()
        if token == "{":
            if pending is not None and not text[pending.end() : match.start()].strip():
                stack.append((pending.start(), match.end()))
            else:
                stack.append(None)
        elif token == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                found.append(Box(opened[0], match.end(), text[opened[1] : match.start()]))
        elif token == "<|begin_of_box|>":
            special = (match.start(), match.end())
        elif token == "<|end_of_box|>":
            if special is not None:
                found.append(Box(special[0], match.end(), text[special[1] : match.start()]))
            special = None
        if pending is not None:
            pending = None
        if token in ("\\boxed", "\\fbox"):
            bare = BARE_BOX.match(text, match.end())
            if bare:
                found.append(Box(match.start(), bare.end(), bare.group(1)))
            else:
                pending = match
    opened_last = [entry for entry in stack if entry is not None]
    if special is not None:
        opened_last.append(special)
    outer: list[Box] = []
    for box in sorted(found, key=lambda box: (box.start, -box.stop)):
        if not outer or box.start >= outer[-1].stop:
            outer.append(box)
    if opened_last:
        start, inside = opened_last[0]
        if not outer or all(box.stop <= start for box in outer):
            outer.append(Box(start, len(text), text[inside:], closed=False))
        else:
            # Boxes that opened inside an unclosed one are part of it.
            outer = [box for box in outer if box.stop <= start] + [Box(start, len(text), text[inside:], closed=False)]
    if outer and not outer[-1].closed:
        last = outer[-1]
        if (at := _stray_close(last.content)) is not None:
            outer[-1] = Box(last.start, last.stop - len(last.content) + at + 2, last.content[:at])
    return outer


def _stray_close(content: str) -> int | None:
    r"""Where a `\}` without its `\{` stands: in `\boxed{185\}` it is the box's end behind a stray backslash."""
    depth = 0
    for match in ESCAPED.finditer(content):
        depth += {"\\{": 1, "\\}": -1}.get(match.group(), 0)
        if depth < 0:
            return match.start()
    return None


def after_thinking(text: str, *, think_end: str) -> str | None:
    """The text after the last `think_end`; None while the response is still thinking."""
    if not think_end:
        return text
    at = text.rfind(think_end)
    if at >= 0:
        return text[at + len(think_end) :]
    start = think_end.replace("/", "", 1)
    if start != think_end and start in text:
        return None
    return text


def opening(prompt: str, *, think_end: str, prefill: str = "") -> str:
    """The mark of a thinking that the prompt opened and the response goes on with, else nothing.

    prefill: the end of the prompt that opens the assistant turn.

    >>> opening("<|im_start|>assistant\\n<think>\\n", think_end="</think>"), opening("<think>\\n\\n</think>\\n", think_end="</think>")
    ('<think>', '')
    """
    start = think_end.replace("/", "", 1)
    if start == think_end:
        return ""
    begun = prompt.rstrip().endswith(start) or prefill.rfind(start) > prefill.rfind(think_end)
    return start if begun else ""


def _squeeze(text: str) -> str:
    return re.sub(r"[\s$]+", "", text)


def _retracts(earlier: Box, unclosed: Box, between: str) -> bool:
    """Whether the cut-off last box says something else than the complete one before it."""
    old, new = _squeeze(earlier.content), _squeeze(unclosed.content)
    if new == old:
        return False
    if old.startswith(new):
        return bool(RETRACTION.search(between))
    if new.startswith(old):
        return not TAIL.match(new, len(old))
    return True


def _joint(gap: str) -> re.Match[str] | None:
    """A match if the text between two boxes only joins them; its group `name` is the second box's `y=`, if any."""
    return JOINT.fullmatch(FILLER.sub("", gap)) if len(gap) <= 80 else None


def boxed_answer(text: str, *, join: bool = True) -> str | None:
    """The answer of the last complete box; joined neighbours as one list; None without one or if it was taken back."""
    found = boxes(text)
    if not found:
        return None
    if not found[-1].closed:
        unclosed = found.pop()
        if not found or _retracts(found[-1], unclosed, text[found[-1].stop : unclosed.start]):
            return None
    group = [found[-1]]
    names: list[str | None] = []
    while join and len(group) < min(len(found), MAX_JOINED):
        previous = found[-1 - len(group)]
        joint = _joint(text[previous.stop : group[-1].start])
        if joint is None:
            break
        names.append(joint.group("name"))
        group.append(previous)
    group.reverse()
    names.reverse()
    contents = [box.content for box in group]
    if len({_squeeze(content) for content in contents}) == 1:
        return contents[-1]
    contents = [content for content in contents if content.strip()]
    first = NAME_BEFORE.search(text[max(0, group[0].start - 40) : group[0].start])
    labels = [first.group(1) if first else None, *names]
    if len(contents) == len(group) and all(labels) and not any("=" in content for content in contents):
        contents = [f"{label} {content}" for label, content in zip(labels, contents, strict=True)]
    return ", ".join(contents)


def hashed_answer(text: str) -> tuple[int, str] | None:
    """Position and content of the last `#### answer` line."""
    start = text.rfind("####")
    match = HASHES.match(text, start) if start >= 0 else None
    return None if match is None else (start, match.group(1).strip())


def extract(text: str, *, task: str, form: str, think_end: str, join: bool) -> str | None:
    """The answer in `text`, None if there is none.

    A bare answer (`form="answer"`) is taken whole, without a box around it if there is one. A response must hold a box
    (math) or a `####` line (gsm8k, where a box after it or without it counts too).
    """
    if form == "answer":
        if "boxed" in text or "fbox" in text or "<|begin_of_box|>" in text:
            inside = boxed_answer(text, join=join)
            text = text if inside is None else inside
        if task == "gsm8k" and (line := hashed_answer(text)) is not None:
            text = line[1]
        return text.strip() and text
    visible = after_thinking(text, think_end=think_end)
    if visible is None:
        return None
    answer = boxed_answer(visible, join=join)
    if task == "gsm8k":
        line = hashed_answer(visible)
        found = boxes(visible)
        if line is not None and (answer is None or line[0] > found[-1].start):
            answer = line[1]
    if answer is None or not answer.replace("$", "").strip():
        return None
    return answer
