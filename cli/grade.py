"""`tseeds grade`: verdicts for answers in a file or for one answer, by the score stage's own grader."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tseeds.grading import Grade

CHUNK = 512


def grade(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="JSONL with gold and prediction, and optionally id and form, on each line; - reads standard input."
        ),
    ] = None,
    gold: Annotated[str | None, typer.Option(help="Gold answer, instead of a file.")] = None,
    prediction: Annotated[str | None, typer.Option(help="Answer or response to be graded, instead of a file.")] = None,
    form: Annotated[
        str | None,
        typer.Option(
            help="response: a whole response, the answer is extracted. answer: a bare answer. [default: response; "
            "for a single answer without a box: answer]"
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="math, gsm8k, countdown or python:path/to/file.py:function.")] = "math",
    time_limit: Annotated[float, typer.Option(help="Seconds per answer.")] = 2.0,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
) -> None:
    """Grade answers: JSONL in (id, gold, prediction, form), JSONL out (id, verdict, extracted, wall_ms)."""
    try:
        _grade(file, gold, prediction, form, task, time_limit, workers)
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(0) from None


def _grade(
    file: Path | None,
    gold: str | None,
    prediction: str | None,
    form: str | None,
    task: str,
    time_limit: float,
    workers: int,
) -> None:
    from pydantic import ValidationError

    from tseeds.errors import UserError
    from tseeds.grading import Grader, GradingOptions

    try:
        if form not in (None, "response", "answer"):
            raise UserError(f"--form {form}: use response or answer")
        try:
            options = GradingOptions(task=task, time_limit=time_limit, workers=workers)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"--{'-'.join(str(p).replace('_', '-') for p in first['loc'])}: {first['msg'].removeprefix('Value error, ')}"
            ) from None
        with Grader(options) as grader:
            if file is not None:
                if gold is not None or prediction is not None:
                    raise UserError("give either a file or --gold and --prediction, not both")
                for rows in _chunks(_rows(file, form or "response")):
                    for row, result in zip(rows, _grades(grader, rows), strict=True):
                        sys.stdout.write(json.dumps({"id": row["id"], **_shown(result)}) + "\n")
                    sys.stdout.flush()
                return
            if gold is None or prediction is None:
                raise UserError("give a JSONL file, or --gold and --prediction")
            if form is None:
                bare = task in ("math", "gsm8k") and not any(
                    mark in prediction for mark in ("\\boxed", "\\fbox", "####")
                )
                form = "answer" if bare else "response"
            (result,) = grader.grade([(gold, prediction)], form)
            detail = {} if result.detail is None else {"detail": result.detail}
            sys.stdout.write(json.dumps({**_shown(result), **detail}) + "\n")
    except UserError as error:
        sys.stderr.write(f"tseeds: {error}\n")
        raise typer.Exit(error.exit_code) from None


def _shown(result: Grade) -> dict[str, Any]:
    return {"verdict": str(result.verdict), "extracted": result.extracted, "wall_ms": round(result.wall_ms, 3)}


def _grades(grader: Any, rows: list[dict[str, Any]]) -> list[Grade]:
    """Grades in row order, though each form is graded in one batch."""
    results: dict[int, Grade] = {}
    for form in ("response", "answer"):
        numbers = [k for k, row in enumerate(rows) if row["form"] == form]
        pairs = [(rows[k]["gold"], rows[k]["prediction"]) for k in numbers]
        results.update(zip(numbers, grader.grade(pairs, form), strict=True))
    return [results[k] for k in range(len(rows))]


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _rows(file: Path, form: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file with id, gold, prediction and form.

    Raises:
        UserError: the file, a line or a key is not what it should be.
    """
    from tseeds.errors import UserError

    def mistake(number: int, what: str) -> UserError:
        return UserError(f"{file}: line {number}: {what}")

    try:
        source = sys.stdin.buffer if str(file) == "-" else file.open("rb")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    with source:
        lines = enumerate(source, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error.strerror}") from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise mistake(number, f"no JSON object ({str(error)[:80]})") from None
            if not isinstance(row, dict):
                raise mistake(number, "no JSON object")
            for key in ("gold", "prediction"):
                if key not in row:
                    raise mistake(number, f"the key {key!r} is missing")
                if type(row[key]) is int:
                    row[key] = str(row[key])
                if not isinstance(row[key], str):
                    raise mistake(number, f"{key} must be text, not {type(row[key]).__name__}")
            if row.get("form", form) not in ("response", "answer"):
                raise mistake(number, f"form {row['form']!r} is unknown: use response or answer")
            yield {
                "id": row.get("id", number),
                "gold": row["gold"],
                "prediction": row["prediction"],
                "form": row.get("form", form),
            }
