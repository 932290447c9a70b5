"""The grader that training, evaluation and the command line share."""

from __future__ import annotations

import ast
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tseeds.errors import UserError
from tseeds.grading import tasks
from tseeds.grading.options import GradingOptions
from tseeds.grading.pool import Died, Job, Pool, TimedOut
from tseeds.grading.verdict import Grade, Verdict

if TYPE_CHECKING:
    from tseeds.grading.remote import RayPool

CACHE_ROWS = 50_000
CACHE_TEXT = 4_000
FORMS = ("response", "answer")

Key = tuple[str, str, str]


class Grader:
    """Grades answers against golds; a context manager whose methods may be called from any thread.

    >>> with Grader(GradingOptions(task="math")) as grader:
    ...     [str(grade.verdict) for grade in grader.grade([("1/2", r"so \\boxed{0.5}"), ("4", "four, I think")])]
    ['correct', 'no_answer']
    """

    def __init__(self, options: GradingOptions | None = None, pool: Pool | RayPool | None = None) -> None:
        """pool: where to grade (closed with the grader); worker processes of this one by default."""
        self.options = options or GradingOptions()
        if tasks.kind(self.options.task) == "python":
            _check_verifier(self.options.task)
        self._pool = pool or Pool(self.options)
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, Grade] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._pool.pids()

    def grade(self, items: Sequence[tuple[str, str]], form: str = "response") -> list[Grade]:
        """Grades of (gold, text) pairs in their order; identical pairs are graded once.

        `form` is "response" (a whole response, the answer is extracted) or "answer" (a bare answer).
        """
        if form not in FORMS:
            raise UserError(f"form {form!r} is unknown: use response or answer")
        grades: dict[tuple[str, str], Grade] = {}
        waiting: dict[Key, list[tuple[str, str]]] = {}
        for pair in dict.fromkeys((gold, text) for gold, text in items):
            gold, text = pair
            if not isinstance(text, str):
                grades[pair] = Grade(Verdict.no_answer)
                continue
            start = time.perf_counter()
            found = tasks.before_worker(gold, text, form, self.options) if isinstance(gold, str) else _no_text(gold)
            spent = 1000 * (time.perf_counter() - start)
            if isinstance(found, tasks.Outcome):
                grades[pair] = _grade(found, spent)
                continue
            key = (gold, found, form)
            known = self._recall(key)
            if known is not None:
                grades[pair] = known
            else:
                waiting.setdefault(key, []).append(pair)
        if waiting:
            jobs: list[Job] = [("grade", *key) for key in waiting]
            for (key, pairs), (result, seconds) in zip(waiting.items(), self._pool.run(jobs), strict=True):
                grade = self._finish(key, result, seconds)
                for pair in pairs:
                    grades[pair] = grade
        seen: set[tuple[str, str]] = set()
        out = []
        for gold, text in items:
            pair = (gold, text)
            out.append(_again(grades[pair]) if pair in seen else grades[pair])
            seen.add(pair)
        return out

    def check_gold(self, gold: str, task: str | None = None) -> str | None:
        """Why a gold must be refused at ingest, None if answers can be graded against it."""
        task = task or self.options.task
        problem = tasks.gold_problem(gold, task)
        if problem is not None or tasks.kind(task) in ("countdown", "python"):
            return problem
        if tasks.fast.literal(tasks.fast.strip(gold)) is not None:
            return None
        from tseeds.grading.compare import read
        from tseeds.grading.normalise import normalise

        if read(normalise(tasks.gold_answer(gold, task))) is not None:
            return None
        ((result, _),) = self._pool.run([("check", gold, task)])
        if result is None or isinstance(result, str):
            return result
        return f"the gold {gold[:60]!r} could not be read within {self.options.time_limit} s"

    def _recall(self, key: Key) -> Grade | None:
        with self._lock:
            grade = self._known.get(key)
            if grade is not None:
                self._known.move_to_end(key)
        return None if grade is None else _again(grade)

    def _finish(self, key: Key, result: object, seconds: float) -> Grade:
        gold, answer, _ = key
        extracted = None if tasks.kind(self.options.task) == "python" else answer
        if result is TimedOut:
            return Grade(
                Verdict.timeout, extracted, None, 1000 * seconds, detail=f"more than {self.options.time_limit} s"
            )
        if result is Died:
            return Grade(Verdict.error, extracted, None, 1000 * seconds, detail="the worker died twice")
        assert isinstance(result, tasks.Outcome)
        grade = _grade(result, 1000 * seconds)
        if grade.verdict is Verdict.error:
            return Grade(Verdict.error, extracted, None, grade.wall_ms, detail=grade.detail)
        if len(gold) + len(answer) <= CACHE_TEXT:
            with self._lock:
                self._known[key] = grade
                while len(self._known) > CACHE_ROWS:
                    self._known.popitem(last=False)
        return grade


def _grade(outcome: tasks.Outcome, wall_ms: float) -> Grade:
    return Grade(outcome.verdict, outcome.extracted, outcome.canonical, wall_ms, outcome.reward, outcome.detail)


def _again(grade: Grade) -> Grade:
    return Grade(grade.verdict, grade.extracted, grade.canonical, 0.0, grade.reward, grade.detail)


def _no_text(gold: object) -> tasks.Outcome:
    return tasks.Outcome(Verdict.unparsable_gold, detail=f"the gold is no text but {type(gold).__name__}")


def _check_verifier(task: str) -> None:
    path = task.removeprefix("python:").rpartition(":")[0]
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read(), path)
    except OSError as error:
        raise UserError(f"{path}: the verifier cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}: the verifier is no Python: {error}") from error
    name = task.rpartition(":")[2]
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
    if not names & {name, "*"}:  # a star import may bring it
        raise UserError(f"{path}: defines no function {name}; name one as python:{path}:FUNCTION")
