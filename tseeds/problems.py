"""Stage problems: ingest data sets into one table of problems with their prompt token ids.

Reads the files of ``problems.path`` and a policy's tokenizer. Writes the columns of schema.PROBLEMS, ``quarantine.parquet``
(every row that was left out, with its reason) and ``report.json`` (rows kept, quarantined by reason, findings with
examples). Which finding does what is one policy each in ``[problems.findings]``.

Simplifications: multi-turn prompts keep their turns but grade only the last answer; images and tools are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tseeds import sources
from tseeds.artifacts import schema
from tseeds.artifacts.policy import TOKENIZER_FILES, file_digest
from tseeds.artifacts.store import Identity, Manifest, writing
from tseeds.config import BenchmarkConfig, FindingsConfig, Pipeline, ProblemsConfig, ScoreConfig
from tseeds.errors import UserError

if TYPE_CHECKING:
    from tseeds.context import Context
    from tseeds.grading import Grader

log = logging.getLogger(__name__)

STAGE = "problems"
VERSION = 1
EXAMPLES = 5
"""Examples of each finding in the report."""

_NAMES: dict[str, tuple[str, ...]] = {
    "id": ("id", "problem_id", "unique_id", "uuid"),
    "problem": ("problem", "question_concat", "question", "prompt", "messages", "query", "instruction", "input"),
    "gold": (
        "gold",
        "final_answer",
        "ground_truth",
        "answer",
        "expected_answer",
        "gt_answer",
        "reward_model.ground_truth",
        "target",
        "solution",
        "response",
        "output",
    ),
    "source": ("source", "data_source", "dataset"),
    "difficulty": ("difficulty", "level"),
}
"""Column names in the order in which they are tried, case ignored."""

_SOLUTIONS = ("solution", "response", "output", "generated_solution")
_ROLES = ("system", "developer", "user", "assistant")
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]|\t(?:imes|ext|heta|an|au|frac|herefore|riangle|o\b)|\r(?:ight|ho\b|angle|m\b)"
)
_ASKS_LIST = re.compile(r"separated by (?:a )?comma", re.IGNORECASE)
_ASKS_ANY = re.compile(r"\bnot both\b|\bonly one of\b|\bany one of\b", re.IGNORECASE)
_LIST_LIKE = re.compile(r",|;|\\cup|\\pm|\bor\b|\band\b|\\text\{ ?(?:or|and)|\\emptyset|\bnone\b|\bno\b", re.IGNORECASE)
_PLAIN_NUMBER = re.compile(r"[-+]?\d{1,18}(?:\.\d{1,18})?")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_]+")
_SAME = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]|[-+*/=<>^!%|]|(?<!\\)\((?!\s*[^\W\d_]{2})")


@dataclass(frozen=True)
class Inputs:
    """policy: model directory whose tokenizer writes the prompts."""

    policy: Path


@dataclass(slots=True)
class _Problem:
    """A row that was read; messages is None where the data has text alone."""

    file: str
    row: int
    id: str | None
    problem: str
    messages: list[dict[str, str]] | None
    gold: str
    source: str
    difficulty: str | None
    key: bytes = b""
    ids: list[int] = field(default_factory=list)
    prompt: str = ""
    dropped: bool = False


class _Unusable(Exception):
    """A row without what every problem needs; says which reason and why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Findings:
    """Collects what was found, by kind, and quarantines by policy."""

    def __init__(self, policies: FindingsConfig) -> None:
        self.policies = policies
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[dict[str, Any]]] = {}
        self.quarantine: dict[str, list[Any]] = {name: [] for name in schema.QUARANTINE.names}

    def unusable(self, file: str, row: int, reason: str, detail: str) -> None:
        """A row that never became a problem."""
        self._note("unusable", file, row, None, f"{reason}: {detail}")
        self._put(file, row, None, reason, detail)

    def found(self, kind: str, problem: _Problem, detail: str) -> None:
        """A finding in a problem; a problem goes into quarantine once, for its first finding."""
        self._note(kind, problem.file, problem.row, problem.id, detail)
        if getattr(self.policies, kind) != "keep" and not problem.dropped:
            problem.dropped = True
            self._put(problem.file, problem.row, problem.id, kind, detail)

    def _note(self, kind: str, file: str, row: int, problem_id: str | None, detail: str) -> None:
        self.counts[kind] += 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            examples.append({"file": file, "row": row, "problem_id": problem_id, "detail": _clean(detail)})

    def _put(self, file: str, row: int, problem_id: str | None, reason: str, detail: str) -> None:
        for name, value in zip(
            schema.QUARANTINE.names, (_clean(file), row, problem_id, reason, _clean(detail)), strict=True
        ):
            self.quarantine[name].append(value)

    def check(self) -> None:
        """Refuse data with a finding whose policy is "fail".

        Raises:
            UserError: naming count, first row and the mend.
        """
        for kind, count in self.counts.items():
            if getattr(self.policies, kind) == "fail":
                first = self.examples[kind][0]
                raise UserError(
                    f"{first['file']} row {first['row']}: {kind} ({first['detail']}), {count} such rows; mend the data or set "
                    f'problems.findings.{kind} = "quarantine"'
                )


def _clean(text: str) -> str:
    """Short text that every Parquet reader can take."""
    text = text if len(text) <= 300 else text[:297] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def words(text: str) -> list[str]:
    """Lower-case words and numbers of a text (each CJK character is a word); punctuation and signs do not count."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def same_key(text: str) -> str:
    """What two writings of one problem share: letters, numbers, operators and the parentheses that open before mathematics,
    without space, case and punctuation.

    >>> same_key("Compute $x + 2.$") == same_key("compute \\\\(x+2\\\\)") != same_key("Compute $x - 2$")
    True
    """
    return " ".join(_SAME.findall(unicodedata.normalize("NFKC", text).lower()))


class Benchmarks:
    """Finds texts that are equal or close to benchmark problems, by word n-grams."""

    def __init__(self, problems: Iterable[tuple[str, str]], *, ngram: int, overlap: float) -> None:
        """problems: (label, text) of benchmark rows."""
        self.ngram = ngram
        self.overlap = overlap
        self.labels: list[str] = []
        self._sizes: list[int] = []
        self._equal: dict[str, int] = {}
        self._grams: dict[tuple[str, ...], list[int]] = {}
        for label, text in problems:
            number = len(self.labels)
            grams = self._ngrams(text)
            self.labels.append(label)
            self._sizes.append(len(grams))
            self._equal.setdefault(same_key(text), number)
            for gram in grams:
                self._grams.setdefault(gram, []).append(number)

    def _ngrams(self, text: str) -> set[tuple[str, ...]]:
        listed = words(text)
        return {tuple(listed[k : k + self.ngram]) for k in range(len(listed) - self.ngram + 1)}

    def closest(self, text: str) -> tuple[float, str] | None:
        """(overlap, label) of the closest benchmark problem at or above the threshold, else None.

        Overlap is the share of the shorter text's n-grams that the other holds; 1.0 for equal texts. Texts of a few
        n-grams share them by chance ("find the value of the following expression ..."), so at least 3 must be shared.
        """
        equal = self._equal.get(same_key(text))
        if equal is not None:
            return 1.0, self.labels[equal]
        grams = self._ngrams(text)
        shared = Counter(number for gram in grams for number in self._grams.get(gram, ()))
        best = max(
            ((count / min(len(grams), self._sizes[n]), -n) for n, count in shared.items() if count >= 3), default=None
        )
        return (best[0], self.labels[-best[1]]) if best and best[0] >= self.overlap else None


def _lookup(row: sources.Row, name: str) -> Any:
    """A column's value; dots enter structs."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _columns(row: sources.Row, mapping: dict[Any, str]) -> dict[str, list[str]]:
    """Columns of this row for each field, in the order in which they are tried."""
    lower = {str(name).lower(): str(name) for name in reversed(list(row))}
    found: dict[str, list[str]] = {}
    for target, candidates in _NAMES.items():
        if target in mapping:
            found[target] = [mapping[target]]
            continue
        found[target] = []
        for name in candidates:
            head, _, rest = name.partition(".")
            if head in lower:
                found[target].append(f"{lower[head]}.{rest}" if rest else lower[head])
    return found


def _text(value: Any, what: str) -> str:
    """A cell as text: numbers as people write them, structs as compact JSON."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool) or value is None:
        text = "" if value is None else str(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _Unusable(f"bad_{what}", f"{what} is {value}")
        text = str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
    elif isinstance(value, int):
        if abs(value) >= 10**4000:
            raise _Unusable(f"bad_{what}", f"{what} is a number of thousands of digits")
        text = str(value)
    elif isinstance(value, (dict, list)):
        try:
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise _Unusable(f"bad_{what}", f"{what} is no text") from None
    elif isinstance(value, bytes):
        raise _Unusable(f"bad_{what}", f"{what} is binary")
    else:
        text = str(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Unusable(
            f"bad_{what}", f"{what} is not valid Unicode (a lone surrogate, or bytes that are not UTF-8)"
        ) from None
    return text


def _messages(value: Any) -> list[dict[str, str]]:
    """Turns of a conversational prompt; trailing assistant turns (a solution) are left to the caller."""
    turns: list[dict[str, str]] = []
    for turn in value:
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            raise _Unusable("bad_messages", f"a turn wants a role of {', '.join(_ROLES)} and a content")
        content = turn.get("content")
        if isinstance(content, list):
            parts = [
                p.get("text") if isinstance(p, dict) and p.get("type", "text") == "text" else None for p in content
            ]
            if not all(isinstance(p, str) for p in parts):
                raise _Unusable("bad_messages", "a turn has a part that is no text")
            content = "".join(p for p in parts if p)
        if not isinstance(content, str):
            raise _Unusable("bad_messages", "a turn has no text content")
        turns.append({"role": turn["role"], "content": _text(content, "messages")})
    return turns


def _conversation(value: Any) -> list[dict[str, str]] | None:
    """The turns where a cell holds a conversation (as a list, or as JSON text), else None."""
    if isinstance(value, str) and value.lstrip().startswith("[{") and '"role"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return _messages(value)
    return None


def final_answer(text: str) -> str | None:
    """The gold inside a worked solution: after the last ``####``, else the last box (joined neighbours are one list).

    >>> final_answer("5 - 1 = 4 so\\n#### 4"), final_answer(r"Thus $x=\\boxed{\\frac12}$."), final_answer("four")
    ('4', '\\\\frac12', None)
    """
    from tseeds.grading.extract import boxed_answer, hashed_answer

    line = hashed_answer(text)
    return line[1] if line is not None else boxed_answer(text)


def _gold(row: sources.Row, columns: list[str], mapped: bool, task: str, turns: list[dict[str, str]] | None) -> str:
    """The gold of a row: the first column with something in it, taken out of a worked solution where it stands in one."""
    graded_text = task in ("math", "gsm8k")
    for name in columns:
        value = _lookup(row, name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        text = _text(value, "gold").strip()
        if not text:
            continue
        if graded_text and text.startswith('["') and text.endswith('"]') and text.count('"') == 2:
            text = text[2:-2]
        if graded_text and ("####" in text or "\\boxed" in text or "\\fbox" in text):
            inner = final_answer(text)
            if not (inner or "").strip():
                raise _Unusable("no_gold", f"column {name} holds a solution without a final answer")
            return (inner or "").strip()
        if graded_text and not mapped and name.lower() in _SOLUTIONS:
            raise _Unusable("no_gold", f"column {name} holds a solution without #### or \\boxed{{}}")
        return text
    if graded_text and turns and turns[-1]["role"] == "assistant":
        inner = final_answer(turns[-1]["content"])
        if inner:
            return inner.strip()
    raise _Unusable("no_gold", f"empty {' and '.join(columns) or 'gold: no column for it'}")


def _problem(file: str, number: int, row: sources.Row, config: ProblemsConfig) -> _Problem:
    """A problem from one row of data."""
    columns = _columns(row, config.columns)
    mapping: dict[Any, str] = dict(config.columns)
    if not columns["problem"]:
        raise _Unusable("no_problem", f"no column for the problem among {', '.join(map(str, list(row)[:12]))}")
    turns: list[dict[str, str]] | None = None
    text = ""
    for name in columns["problem"]:
        value = _lookup(row, name)
        turns = _conversation(value)
        if turns is not None:
            users = [t["content"] for t in turns if t["role"] == "user"]
            text = users[-1] if users else ""
        else:
            if value is not None and not isinstance(value, (str, int, float)):
                raise _Unusable("no_problem", f"column {name} is a {type(value).__name__}, not text or a conversation")
            text = _text(value, "problem")
        if text.strip():
            break
    if not text.strip():
        absent = [name for name in columns["problem"] if name.partition(".")[0] not in row]
        if absent:
            raise _Unusable("no_problem", f"no column {absent[0]} among {', '.join(map(str, list(row)[:12]))}")
        raise _Unusable("no_problem", f"empty {' and '.join(columns['problem'])}")
    gold = _gold(row, columns["gold"], "gold" in mapping, config.task, turns)
    if turns is not None:
        while turns and turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not turns or turns[-1]["role"] != "user":
            raise _Unusable("bad_messages", "the conversation does not end on a user turn")

    def first(target: str) -> str:
        return next((t for n in columns[target] if (t := _text(_lookup(row, n), target).strip())), "")

    problem = _Problem(
        file,
        number,
        first("id") or None,
        text,
        turns,
        gold,
        first("source") or Path(file).name,
        first("difficulty") or None,
    )
    context = "\x1e".join(t["content"] for t in turns[:-1]) if turns and len(turns) > 2 else ""
    problem.key = hashlib.sha256((same_key(text) + "\x1f" + context).encode()).digest()
    return problem


def _partial_gold(problem: _Problem, row: sources.Row) -> str | None:
    """Why the gold seems to hold only a part of the answer, or None."""
    from tseeds.grading.extract import boxed_answer

    for name in _SOLUTIONS:
        text = row.get(name)
        if isinstance(text, str) and "\\boxed" in text:
            joined, last = boxed_answer(text), boxed_answer(text, join=False)
            if joined and last and joined != last and _squeeze(problem.gold) == _squeeze(last):
                return f"the solution boxes {joined}, the gold holds only {last}"
    if _ASKS_LIST.search(problem.problem) and not _LIST_LIKE.search(problem.gold):
        return "the problem asks for a list, the gold holds one answer"
    if _ASKS_ANY.search(problem.problem):
        return "the problem accepts any one of several answers, the gold holds one"
    return None


def _squeeze(text: str) -> str:
    return re.sub(r"[\s$]+|\\[,;! ]", "", text)


def _damage(text: str) -> str | None:
    match = _CONTROL.search(text)
    if not match:
        return None
    return f"{text[max(0, match.start() - 15) : match.end() + 15]!r}"


class Prompter:
    """Writes problems as prompts of one tokenizer.

    Raises:
        UserError: the configuration does not fit the tokenizer's chat template.
    """

    def __init__(self, config: ProblemsConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        if config.prompt == "chat" and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                'problems.prompt = "chat": the tokenizer has no chat template; set problems.prompt = "plain"'
            )
        self.bos = self._leading_bos()
        special = [t for t in {*tokenizer.all_special_tokens, *_added_special(tokenizer)} if t.strip()]
        self._special = (
            re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None
        )
        if config.prompt == "chat":
            self._template([{"role": "user", "content": "1"}])

    def _leading_bos(self) -> int | None:
        """The id that the tokenizer puts before a text, where it does."""
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer("1")["input_ids"]
        return bos if bos is not None and ids and ids[0] == bos else None

    def special_token(self, problem: _Problem) -> str | None:
        """A special token that stands in the data as text."""
        if self._special is None:
            return None
        for text in [problem.problem, *(t["content"] for t in problem.messages or [])]:
            match = self._special.search(text)
            if match:
                return match.group()
        return None

    def text(self, problem: _Problem) -> str:
        """The whole prompt as text, special tokens shown."""
        body = self.config.template.replace("{problem}", problem.problem)
        if self.config.prompt == "plain":
            if len(problem.messages or []) > 1:
                raise UserError(
                    'a conversation of several turns, of which problems.prompt "plain" shows the last; use "chat"'
                )
            return body + self.config.prefill
        turns = [*(problem.messages or [])[:-1], {"role": "user", "content": body}]
        return self._template(turns) + self.config.prefill

    def _template(self, turns: list[dict[str, str]]) -> str:
        if self.config.system is not None and turns[0]["role"] not in ("system", "developer"):
            turns = [{"role": "system", "content": self.config.system}, *turns]
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            hint = "; put the text of problems.system into problems.template" if self.config.system is not None else ""
            raise UserError(f"the tokenizer's chat template refuses the prompt: {reason}{hint}") from error

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids; exactly one beginning-of-sequence where a plain prompt of this tokenizer has one, none added in chat."""
        encoded: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        if self.config.prompt == "plain" and self.bos is not None:
            encoded = [ids if ids[:1] == [self.bos] else [self.bos, *ids] for ids in encoded]
        return encoded


def _added_special(tokenizer: Any) -> list[str]:
    return [str(t) for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if getattr(t, "special", False)]


def _check_golds(problems: list[_Problem], grader: Grader, findings: Findings) -> None:
    """Find golds that the task's grader cannot read, and problems whose golds differ in value."""
    plain = grader.options.task in ("math", "gsm8k")
    known: dict[str, str | None] = {}
    for problem in problems:
        if plain and _PLAIN_NUMBER.fullmatch(problem.gold):
            continue
        if problem.gold not in known:
            known[problem.gold] = grader.check_gold(problem.gold)
        reason = known[problem.gold]
        if reason is not None:
            findings.found("unparsable_gold", problem, reason)
    for group in _repeated(problems).values():
        golds = sorted({p.gold for p in group})
        grades = grader.grade([(golds[0], gold) for gold in golds[1:]], form="answer")
        if any(grade.verdict != "correct" for grade in grades):
            for problem in group:
                findings.found("conflicting_gold", problem, f"golds {' | '.join(golds[:4])}")
        elif grades:
            for problem in group[1:]:
                findings.found("duplicate", problem, "the same problem and gold again")


def _repeated(problems: list[_Problem]) -> dict[bytes, list[_Problem]]:
    """Rows by problem, for problems that occur more than once."""
    groups: dict[bytes, list[_Problem]] = {}
    for problem in problems:
        if not problem.dropped:
            groups.setdefault(problem.key, []).append(problem)
    return {key: group for key, group in groups.items() if len(group) > 1}


def _load(config: ProblemsConfig, findings: Findings) -> tuple[list[_Problem], int]:
    """All usable rows and the number of rows read; repeated (problem, gold) pairs are found here and not kept in memory."""
    problems: list[_Problem] = []
    seen: set[bytes] = set()
    total = 0
    for file, number, row in sources.read(config.path):
        total += 1
        if isinstance(row, sources.Broken):
            findings.unusable(file, number, "unreadable", row.detail)
            continue
        try:
            problem = _problem(file, number, row, config)
        except _Unusable as error:
            findings.unusable(file, number, error.reason, str(error))
            continue
        pair = hashlib.sha256(problem.key + _squeeze(problem.gold).encode()).digest()
        if not (_damage(problem.problem) or _damage(problem.gold)):  # a damaged row goes, its sound copy stays
            if pair in seen:
                findings.found("duplicate", problem, "the same problem and gold again")
            seen.add(pair)
        if problem.dropped:
            continue
        partial = _partial_gold(problem, row)
        if partial:
            findings.found("partial_gold", problem, partial)
        problems.append(problem)
    if total and not problems:
        reason, count = Counter(findings.quarantine["reason"]).most_common(1)[0]
        first = findings.quarantine["detail"][findings.quarantine["reason"].index(reason)]
        raise UserError(
            f"problems.path {config.path}: no usable row among {total} ({count} {reason}: {first}); name the columns in "
            "problems.columns if the data is sound"
        )
    if not total:
        raise UserError(f"problems.path {config.path}: holds no rows")
    return problems, total


def _identify(problems: list[_Problem]) -> None:
    """Ids of the data where they are all there and unique; else hashes of problem and gold (numbered where they repeat)."""
    ids = [p.id for p in problems]
    if all(ids) and len(set(ids)) == len(ids):
        return
    times: Counter[str] = Counter()
    for problem in problems:
        digest = hashlib.sha256(f"{problem.problem}\x1f{problem.gold}".encode()).hexdigest()[:16]
        times[digest] += 1
        problem.id = digest if times[digest] == 1 else f"{digest}-{times[digest]}"


def benchmark_texts(benchmarks: Sequence[BenchmarkConfig]) -> list[tuple[str, str]]:
    """(name:id, problem) of every readable row of the benchmarks."""
    labelled: list[tuple[str, str]] = []
    for benchmark in benchmarks:
        config = ProblemsConfig(path=benchmark.path, columns=benchmark.columns)
        for _, number, row in sources.read(benchmark.path):
            if isinstance(row, sources.Broken):
                continue
            try:
                columns = _columns(row, dict(config.columns))
                turns = [(_conversation(_lookup(row, n)), _lookup(row, n)) for n in columns["problem"]]
                texts = [
                    next((t["content"] for t in reversed(c) if t["role"] == "user"), "") if c else _text(v, "problem")
                    for c, v in turns
                ]
                label = next((t for n in columns["id"] if (t := _text(_lookup(row, n), "id").strip())), str(number))
            except _Unusable:
                continue
            text = next((t for t in texts if t.strip()), None)
            if text is not None:
                labelled.append((f"{benchmark.name}:{label}", text))
    return labelled


def ingest(
    config: ProblemsConfig,
    tokenizer: Any,
    *,
    score: ScoreConfig | None = None,
    benchmarks: Sequence[BenchmarkConfig] = (),
) -> tuple[pa.Table, pa.Table, dict[str, Any]]:
    """(problems, quarantine, report) of a data set; rows keep their order.

    score: limits of the grader that reads the golds; benchmarks: data sets that the rows must not come from.

    Raises:
        UserError: the data cannot be read at all, holds no usable row, or has a finding whose policy is "fail".
    """
    from tseeds.grading import Grader, GradingOptions

    findings = Findings(config.findings)
    problems, total = _load(config, findings)
    _identify(problems)
    for problem in problems:
        for where, text in (("problem", problem.problem), ("gold", problem.gold)):
            damage = _damage(text)
            if damage:
                findings.found("damaged_text", problem, f"{where}: {damage}")
    with Grader(GradingOptions(task=config.task, **(score or ScoreConfig()).model_dump())) as grader:
        _check_golds(problems, grader, findings)
    if benchmarks:
        index = Benchmarks(
            benchmark_texts(benchmarks), ngram=config.contamination_ngram, overlap=config.contamination_overlap
        )
        for problem in problems:
            close = index.closest(problem.problem)
            if close:
                findings.found("contaminated", problem, f"overlap {close[0]:.2f} with {close[1]}")
    prompter = Prompter(config, tokenizer)
    for problem in problems:
        token = prompter.special_token(problem)
        if token:
            findings.found("special_token", problem, f"holds {token}")
    good = [p for p in problems if not p.dropped]
    lengths: list[int] = []
    kept: list[_Problem] = []
    for start in range(0, len(good), 1024):
        if config.limit and len(kept) >= config.limit:
            break
        chunk = good[start : start + 1024]
        for problem in chunk:
            try:
                problem.prompt = prompter.text(problem)
            except UserError as error:
                if problem.messages is None:
                    raise
                findings.found("unusable", problem, f"bad_messages: {error}")
        chunk = [p for p in chunk if not p.dropped]
        for problem, ids in zip(chunk, prompter.ids([p.prompt for p in chunk]), strict=True):
            if len(ids) > config.max_prompt_tokens:
                findings.found(
                    "overlong", problem, f"{len(ids)} tokens, problems.max_prompt_tokens is {config.max_prompt_tokens}"
                )
                continue
            problem.ids = ids
            kept.append(problem)
    kept = kept[: config.limit or None]
    lengths = sorted(len(p.ids) for p in kept)
    findings.check()
    if not kept:
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in Counter(findings.quarantine["reason"]).most_common()
        )
        raise UserError(
            f"problems.path {config.path}: none of {total} rows is left ({reasons}; first: "
            f"{findings.quarantine['detail'][0]}); mend the data, or set what [problems] allows"
        )
    table = pa.table(
        {
            "problem_id": [p.id for p in kept],
            "prompt": [p.prompt for p in kept],
            "prompt_ids": [p.ids for p in kept],
            "problem": [p.problem for p in kept],
            "gold": [p.gold for p in kept],
            "task": [config.task] * len(kept),
            "source": [p.source for p in kept],
            "difficulty": [p.difficulty for p in kept],
        },
        schema=schema.PROBLEMS,
    )
    quarantine = pa.table(findings.quarantine, schema=schema.QUARANTINE)
    report = {
        "rows": total,
        "kept": len(kept),
        "quarantined": dict(sorted(Counter(findings.quarantine["reason"]).items())),
        "findings": {
            kind: {"rows": count, "policy": getattr(config.findings, kind), "examples": findings.examples[kind]}
            for kind, count in sorted(findings.counts.items())
        },
        "prompt_tokens": (
            {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]} if lengths else {}
        ),
    }
    return table, quarantine, report


def _guards(config: Pipeline) -> list[BenchmarkConfig]:
    """Benchmarks that training rows are compared with."""
    return [*config.evaluate.benchmarks, *config.problems.benchmarks]


def identity(config: Pipeline, inputs: Inputs) -> Identity:
    """What decides the problems: the data's digests, how it is read and prompted, and the tokenizer's files."""
    values = config.problems.model_dump(mode="json", exclude={"path", "benchmarks"})
    plain = type(config.score)().model_dump(mode="json")  # so that golds are compared, where it is not the default
    values |= {
        f"score.{k}": v for k, v in config.score.model_dump(mode="json").items() if k != "workers" and v != plain[k]
    }
    digests = sources.digests(config.problems.path)
    for n, benchmark in enumerate(_guards(config)):
        digests |= {f"benchmark {n} {name}": digest for name, digest in sources.digests(benchmark.path).items()}
        values[f"benchmark {n}"] = {"name": benchmark.name, "columns": benchmark.columns}
    digests |= {
        f"tokenizer {name}": file_digest(inputs.policy / name)
        for name in TOKENIZER_FILES
        if (inputs.policy / name).is_file()
    }
    named = {k if k.startswith("score.") else f"problems.{k}": v for k, v in values.items()}
    return Identity(STAGE, VERSION, named, digests)


def run(config: Pipeline, inputs: Inputs, out: Path, context: Context) -> Manifest:
    """Commit the problems at ``out``.

    Raises:
        UserError: the data is unusable, or has a finding whose policy is "fail".
    """
    ident = identity(config, inputs)
    context.progress.begin(STAGE, 1)
    with writing(out, ident) as writer:
        table, quarantine, report = ingest(
            config.problems, context.tokenizer(inputs.policy), score=config.score, benchmarks=_guards(config)
        )
        writer.table("quarantine.parquet", quarantine)
        (writer.path("") / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
        if 0 not in writer.parts:
            writer.part(0, table)
        writer.facts.update(report)
    context.progress.advance(1)
    context.progress.end()
    assert writer.manifest is not None
    return writer.manifest
