"""Options of the grader: the `[score]` table of a pipeline file. Imports neither torch, vllm nor sympy."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

TASKS = ("math", "gsm8k", "countdown")


def _known_task(task: str) -> str:
    if task in TASKS:
        return task
    kind, _, rest = task.partition(":")
    path, _, function = rest.rpartition(":")
    if kind == "python" and path and function.isidentifier():
        return task
    raise ValueError(f"unknown task {task!r}: use math, gsm8k, countdown or python:path/to/file.py:function")


Task = Annotated[str, AfterValidator(_known_task)]
"""What a correct answer is."""


class Conventions(BaseModel):
    """How answers are graded. Every convention that is a choice is one switch; docs/grading.md has an example of each."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    time_limit: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """Seconds per answer; then the worker is killed and replaced and the verdict is `timeout`."""
    memory_limit_mb: Annotated[int, Field(ge=512)] = 1024
    """Address space of each worker in MiB; an answer that needs more gets the verdict `error`."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """Worker processes; they start when the first answer leaves the fast path. Never changes a verdict."""
    decimal_tolerance: Annotated[float, Field(ge=0, lt=0.1)] = 1e-7
    """Relative error within which a decimal equals an exact value that is not an integer; 0 demands equality."""
    percent_as_number: bool = True
    """`28` equals `28\\%` (the sign is missing); by value `0.28` equals it in any case."""
    degrees_as_radians: bool = True
    """`180^\\circ` equals `\\pi`; that it equals a bare `180` holds in any case."""
    base_by_value: bool = True
    """`52_8` equals `42`; otherwise the base must be the gold's."""
    unevaluated: bool = True
    """`2^3` equals `8`; otherwise a gold that is a plain number wants a plain number, fraction or decimal."""
    unordered_lists: bool = True
    """A bare comma list is unordered; otherwise its order counts."""
    join_boxes: bool = True
    """Neighbouring boxes joined by commas or "and" are one list; otherwise only the last one counts."""
    think_end: str = "</think>"
    """Only text after the last of these markers is read; empty reads the whole response."""


class GradingOptions(Conventions):
    """The conventions and the task of one grader."""

    task: Task = "math"
    """`math` (boxed), `gsm8k` (`####`, boxed accepted too), `countdown`, or `python:path/to/file.py:function`."""
