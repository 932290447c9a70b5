"""Where the time of one iteration goes: sample, swap, grade, update, write, other.

    python benchmarks/iteration.py [PIPELINE] [--iterations 3] [--set section.key=value ...]

Runs one iteration to warm everything up (engine start, first compile), then measures the next ones in the same process.
Only time of the main thread counts: grading and writing that happen behind sampling cost nothing here. Each second
belongs to the innermost of the measured calls. CPU seconds stand beside wall seconds for busy machines.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tseeds import config as configuration
from tseeds import update
from tseeds.artifacts import parts, store
from tseeds.config import Pipeline
from tseeds.context import Context
from tseeds.pipeline import run_pipeline


class Clock:
    """Seconds by name; a call inside another takes its time from the outer one."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self._stack: list[str] = ["other"]
        self._last = (time.perf_counter(), time.thread_time())

    def _tick(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        self.wall[self._stack[-1]] += now[0] - self._last[0]
        self.cpu[self._stack[-1]] += now[1] - self._last[1]
        self._last = now

    def inside(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its main-thread time counted under ``name``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._tick()
            self._stack.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._tick()
                self._stack.pop()

        return timed

    def rows(self, name: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """A generator, the time between its rows counted under ``name``."""

        def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            rows = function(*args, **kwargs)
            step = self.inside(name, lambda: next(rows, None))
            while (row := step()) is not None:
                yield row

        return timed

    def reset(self) -> None:
        """Forget everything so far."""
        self._tick()
        self.wall.clear()
        self.cpu.clear()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Where an iteration's time goes.")
    parser.add_argument("pipeline", type=Path, nargs="?")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    arguments = parser.parse_args()
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="tseeds-bench-") as place:
        config = load(arguments, Path(place))
        grade = Context.grade
        Context.grade = clock.inside("grade", grade)  # type: ignore[method-assign]
        update.run = clock.inside("update", update.run)
        for name in ("_begin", "part", "table", "_commit"):
            setattr(store.Writer, name, clock.inside("write", getattr(store.Writer, name)))
        parts.Parts.__exit__ = clock.inside("write", parts.Parts.__exit__)  # type: ignore[method-assign]
        with Context(config) as context:
            engine: Any = context.engine()
            engine.load = clock.inside("swap", engine.load)
            engine.sample = clock.rows("sample", engine.sample)
            warm = with_iterations(config, 1)
            run_pipeline(warm, Path(place) / "run", context)
            clock.reset()
            begin = time.perf_counter()
            run_pipeline(with_iterations(config, 1 + arguments.iterations), Path(place) / "run", context)
            total = (time.perf_counter() - begin) / arguments.iterations
            clock._tick()
    cpu = sum(clock.cpu.values())
    print(f"one iteration: {total:.2f} s wall (mean of {arguments.iterations}), main thread only")
    print(f"{'':10}{'wall s':>9}{'wall %':>8}{'CPU s':>9}{'CPU %':>8}")
    for name in ("sample", "swap", "grade", "update", "write", "other"):
        wall, spent = clock.wall[name] / arguments.iterations, clock.cpu[name] / arguments.iterations
        share = 100 * clock.cpu[name] / cpu
        print(f"{name:10}{wall:9.3f}{100 * wall / total:8.1f}{spent:9.3f}{share:8.1f}")


def load(arguments: argparse.Namespace, place: Path) -> Pipeline:
    """The named pipeline, or the toy's, without evaluation."""
    if arguments.pipeline is not None:
        return configuration.load(arguments.pipeline, ["evaluate.every=0", *arguments.sets])
    toy = Path("toy")  # just loop leaves one
    if not (toy / "policy" / "config.json").is_file():
        from tseeds.toy import make

        toy = place / "toy"
        make(toy)
    here = Path(__file__).parents[1] / "pipelines" / "toy.toml"
    sets = [
        f"policy.path={toy}/policy",
        f"problems.path={toy}/train.jsonl",
        "evaluate.every=0",
        "evaluate.benchmarks=[]",
    ]
    return configuration.load(here, [*sets, "snapshot.every=1", *arguments.sets])


def with_iterations(config: Pipeline, number: int) -> Pipeline:
    """The pipeline, trained for another number of iterations."""
    return config.model_copy(update={"run": config.run.model_copy(update={"iterations": number})})


if __name__ == "__main__":
    main()
