"""What stages share while a process runs: one warm engine, one grader, tokenizers, progress, the wish to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tseeds.artifacts.policy import TOKENIZER_FILES, file_digest, model_directory, policy_files
from tseeds.config import Pipeline
from tseeds.errors import Interrupted, UserError, first_line

if TYPE_CHECKING:
    from tseeds.engines.base import Engine
    from tseeds.grading import Grade, Grader

log = logging.getLogger(__name__)


class Progress:
    """What a stage tells of its work; this one says nothing. The command line shows it."""

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """A stage starts; ``total`` rows, of which ``done`` are already committed."""

    def advance(self, rows: int, tokens: int = 0) -> None:
        """Rows (and tokens) finished."""

    def end(self) -> None:
        """The stage is over."""

    def note(self, message: str) -> None:
        """Something worth a line."""


class Context:
    """Opens what stages need once, on first use, and closes it at the end.

    Use as a context manager. ``max_model_len`` bounds prompt + response of the engine.
    """

    def __init__(self, config: Pipeline, *, progress: Progress | None = None, run: Path | None = None) -> None:
        self.config = config
        self.progress = progress or Progress()
        self.run = run
        self.stop_requested = False
        self.trainer: Any = None
        """The update stage's warm trainer, with what it was made from and holds."""
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._graders: dict[str, Grader] = {}
        self._verifiers: dict[str, dict[str, str]] = {}
        self._tokenizers: dict[tuple[tuple[str, str], ...], Any] = {}

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._engine = None
        self._graders.clear()

    def use(self, config: Pipeline) -> None:
        """Work under ``config`` from now on (values may change between iterations); what needs other values is closed."""
        if (config.score, config.engine.ray_address) != (self.config.score, self.config.engine.ray_address):
            for grader in self._graders.values():
                grader.close()
            self._graders.clear()
        before, after = ((c.engine, _engine_values(c)) for c in (self.config, config))
        if self._engine is not None and before != after:
            self._engine.close()
            self._engine = None
        self.config = config

    def check_stop(self) -> None:
        """Called where everything so far is committed.

        Raises:
            Interrupted: a signal asked to stop.
        """
        if self.stop_requested:
            raise Interrupted("stopped at your request; everything finished is committed")

    @property
    def engine_running(self) -> bool:
        """Whether the engine was opened."""
        return self._engine is not None

    def engine(self) -> Engine:
        """The engine, started on first use."""
        if self._engine is None:
            from tseeds.engines import open_engine

            self._engine = open_engine(self.config.engine, run=self.run, **_engine_values(self.config))
            self._stack.callback(self._engine.close)
        return self._engine

    def grade(self, items: Sequence[tuple[str, str, str, str]]) -> list[Grade]:
        """Grades of (task, gold, prompt, response text) in order; one grader per task, started on first use.

        A response that goes on with a thinking which its prompt opened is read as thinking until it ends that; a verifier
        of the user's own gets the response alone.
        """
        from tseeds.grading import Grader, GradingOptions
        from tseeds.grading.extract import opening
        from tseeds.score import grading

        def answer(task: str, gold: str, prompt: str, text: str) -> tuple[str, str]:
            if task.startswith("python:"):
                return gold, text
            end = self.config.score.think_end
            return gold, opening(prompt, think_end=end, prefill=self.config.problems.prefill) + text

        grades: list[Grade | None] = [None] * len(items)
        for task in dict.fromkeys(item[0] for item in items):
            digests = grading(self.config, task)[1]
            if task in self._graders and self._verifiers.get(task) != digests:
                self._graders.pop(task).close()  # the verifier's file was edited since
            self._verifiers[task] = digests
            if task not in self._graders:
                options = GradingOptions(task=task, **self.config.score.model_dump())
                pool = None
                if self.config.engine.ray_address is not None:
                    from tseeds.grading.remote import RayPool

                    pool = RayPool(options, self.config.engine.ray_address)
                self._graders[task] = self._stack.enter_context(Grader(options, pool))
            numbers = [k for k, item in enumerate(items) if item[0] == task]
            pairs = [answer(*items[k]) for k in numbers]
            for k, grade in zip(numbers, self._graders[task].grade(pairs), strict=True):
                grades[k] = grade
        return [g for g in grades if g is not None]

    def tokenizer(self, policy: Path) -> Any:
        """The policy's tokenizer, loaded once for all policies that share its files (every iteration makes a new one)."""
        if not Path(policy).is_dir():
            policy_files(policy)  # says why
        policy = model_directory(policy)
        files = [policy / name for name in (*TOKENIZER_FILES, "config.json")]
        mark = tuple((f.name, file_digest(f)) for f in files if f.is_file())
        if mark not in self._tokenizers:
            self._tokenizers[mark] = load_tokenizer(policy, self.config.policy.trust_remote_code)
        return self._tokenizers[mark]

    def on_close(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when the context closes."""
        self._stack.callback(callback)


def _engine_values(config: Pipeline) -> dict[str, Any]:
    """What an engine is opened with, beside its own section."""
    response = max(config.rollout.max_response_tokens, config.evaluate.max_response_tokens)
    return {
        "dtype": config.policy.dtype,
        "max_model_len": config.problems.max_prompt_tokens + response,
        "trust_remote_code": config.policy.trust_remote_code,
        "lora": config.update.lora,
    }


def load_tokenizer(policy: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a policy directory.

    Raises:
        UserError: its files are missing or damaged.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(policy, trust_remote_code=trust_remote_code)
    except Exception as error:
        there = any((policy / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        why = first_line(error) if there else "it has no tokenizer.json, tokenizer.model or vocab.json"
        raise UserError(
            f"{policy}: its tokenizer does not load: {why}; copy the model's tokenizer files again"
        ) from error
