"""Trajectories of any number, looked up row by row: a light index in memory, tokens read from disk when asked for.

The index holds a few numbers per row (verdict, reward, lengths, where the row lies on disk) and no token; one row's ids and
per-token values are read from its part file alone. 100,000 rows cost some ten megabytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from tseeds.artifacts.disk import readable
from tseeds.errors import UserError

TOKEN_COLUMNS = ("ratio", "entropy", "clipped", "advantage", "weight", "logprob_old", "logprob", "used")
"""Of update/tokens.parquet, beside the behaviour log-prob that every row has."""
SNIPPET = 140
_CACHED_GROUPS = 8
_CACHED_UPDATES = 2


@dataclass(frozen=True)
class Part:
    """One Parquet file of a set, and the iteration (rollouts) or policy step (evaluations) of its rows."""

    file: Path
    step: int


@dataclass(frozen=True)
class RowSet:
    """Rows of one kind: the rollouts of a run, or its evaluations on one benchmark."""

    id: str
    label: str
    kind: str  # rollout | evaluation | mixed
    parts: tuple[Part, ...]
    problems: Path | None
    scores: tuple[Path, ...] = ()
    updates: Mapping[int, Path] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """First row number of each part, and the number of all rows at the end."""
        counts = [0]
        for part in self.parts:
            with readable(part.file):
                counts.append(counts[-1] + pq.read_metadata(part.file).num_rows)
        return counts

    @cached_property
    def index(self) -> pl.DataFrame:
        """One light row per trajectory, in the order of the files."""
        steps = pl.DataFrame(
            {"first": self.starts[:-1], "step": [p.step for p in self.parts]},
            schema={"first": pl.UInt32, "step": pl.Int32},
        ).filter(pl.col("first") < self.starts[-1])
        names = set(pq.read_schema(self.parts[0].file).names)
        rows = pl.scan_parquet([p.file for p in self.parts], row_index_name="n")

        def column(name: str, dtype: Any, instead: Any = None) -> pl.Expr:
            return (pl.col(name) if name in names else pl.lit(instead)).cast(dtype).alias(name)

        light = rows.select(
            pl.col("n").cast(pl.UInt32),
            "row_id",
            "problem_id",
            (pl.col("group_id") if "group_id" in names else pl.col("problem_id")).alias("group"),
            column("sample", pl.Int32),
            column("snapshot_step", pl.Int32),
            column("position", pl.String, "none"),
            (pl.col("off_stop") - pl.col("off_start") if "off_stop" in names else pl.lit(0))
            .cast(pl.Int32)
            .alias("seed_length"),
            pl.col("response_ids").list.len().cast(pl.Int32).alias("length"),
            column("finish_reason", pl.String),
            column("verdict", pl.String),
            column("reward", pl.Float32),
        ).collect(engine="streaming")
        light = light.sort("n").join_asof(steps.sort("first"), left_on="n", right_on="first").drop("first")
        if "group_id" not in names:
            light = light.with_columns(group=pl.format("{}@{}", "problem_id", "step"))
        if self.kind == "mixed":
            cells = pl.scan_parquet([p.file for p in self.parts]).select("seed_length").collect()["seed_length"]
            writer = pl.col("snapshot_step").cast(pl.String).fill_null("none")
            light = light.with_columns(group=pl.format("{}·s{}·L{}", "group", writer, cells.alias("cell")))
        if self.scores and "verdict" not in names:
            graded = pl.scan_parquet(list(self.scores)).select("row_id", "verdict", "reward").collect()
            light = light.drop("verdict", "reward").join(graded, on="row_id", how="left", maintain_order="left")
        advantages = [f / "rows.parquet" for f in self.updates.values() if (f / "rows.parquet").is_file()]
        if advantages:
            values = pl.scan_parquet(advantages).select("row_id", "advantage").collect()
            light = light.join(values, on="row_id", how="left", maintain_order="left")
        else:
            light = light.with_columns(advantage=pl.lit(None, pl.Float32))
        texts = self.texts.select("problem_id", snippet=pl.col("problem").str.slice(0, SNIPPET))
        return light.join(texts, on="problem_id", how="left", maintain_order="left")

    @cached_property
    def texts(self) -> pl.DataFrame:
        """problem_id, problem, prompt, gold, difficulty of the problems."""
        columns = ("problem_id", "problem", "prompt", "gold", "difficulty")
        if self.problems is None:
            return pl.DataFrame(schema={c: pl.String for c in columns})
        return pl.read_parquet(self.problems, columns=list(columns)).unique("problem_id", keep="first")

    @cached_property
    def has_tokens(self) -> bool:
        """Whether any iteration kept per-token values of the update."""
        return any((f / "tokens.parquet").is_file() for f in self.updates.values())


def discover(path: Path) -> list[RowSet]:
    """The sets of a run directory, or the one of a rollout, evaluation or mixed artifact.

    Raises:
        UserError: nothing at ``path`` holds trajectories.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such run or artifact")
    if (path / "pipeline.toml").is_file():
        sets = list(_of_run(path))
        if not sets:
            raise UserError(f"{path}: no rollouts and no evaluations yet")
        return sets
    folder = path.parent if path.is_file() else path
    files = [path] if path.is_file() else sorted(path.glob("part-*.parquet"))
    if not files:
        raise UserError(
            f"{path}: holds no part-*.parquet; name a run, or an artifact such as RUN/iterations/000001/rollout"
        )
    with readable(files[0]):
        names = set(pq.read_schema(files[0]).names)
    if "response_ids" not in names:
        raise UserError(f"{path}: rows without response_ids are not trajectories; tseeds show prints them")
    parent = folder.resolve().parent
    kind = "rollout" if "benchmark" not in names else "mixed" if "seed_length" in names else "evaluation"
    step = int(parent.name) if parent.name.isdigit() else 0
    beside = sorted((folder.parent / "score").glob("part-*.parquet")) if kind == "rollout" else []
    own = folder / "tables" / "problems.parquet"
    general = parent.parent.parent / "problems" / "part-00000.parquet"
    problems = own if own.is_file() else general if general.is_file() else None
    updates = {step: folder.parent / "update"} if (folder.parent / "update").is_dir() and kind == "rollout" else {}
    return [RowSet(kind, folder.name, kind, tuple(Part(f, step) for f in files), problems, tuple(beside), updates)]


def _of_run(root: Path) -> Iterator[RowSet]:
    rollouts = [
        Part(file, int(place.parent.name))
        for place in sorted(root.glob("iterations/*/rollout"))
        for file in sorted(place.glob("part-*.parquet"))
    ]
    problems = root / "problems" / "part-00000.parquet"
    if rollouts:
        yield RowSet(
            "rollout",
            "rollouts",
            "rollout",
            tuple(rollouts),
            problems if problems.is_file() else None,
            tuple(sorted(root.glob("iterations/*/score/part-*.parquet"))),
            {int(p.parent.name): p for p in sorted(root.glob("iterations/*/update")) if p.parent.name.isdigit()},
        )
    for kind, top in (("evaluation", "evaluations"), ("mixed", "mixed")):
        for name in sorted({p.name for p in root.glob(f"{top}/*/*") if (p / "manifest.json").is_file()}):
            places = [p for p in sorted(root.glob(f"{top}/*/{name}")) if (p / "manifest.json").is_file()]
            parts = [Part(f, int(p.parent.name)) for p in places for f in sorted(p.glob("part-*.parquet"))]
            yield RowSet(
                f"{kind}-{name}", f"{kind}: {name}", kind, tuple(parts), places[-1] / "tables" / "problems.parquet"
            )


def find_tokenizer(path: Path) -> Any:
    """The nearest tokenizer.json above ``path`` (of a run's step 0), or None."""
    for parent in [Path(path).resolve(), *Path(path).resolve().parents]:
        for file in (parent / "snapshots" / "step-000000" / "tokenizer.json", parent / "tokenizer.json"):
            if file.is_file():
                from tokenizers import Tokenizer

                return Tokenizer.from_file(str(file))
    return None


def pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds; together they are the text of all of them, special tokens shown.

    A token that ends inside a character adds "", and the one that completes it adds the character. Without a tokenizer a
    piece is the id.
    """
    if tokenizer is None:
        return [f"⟨{i}⟩" for i in ids]
    out: list[str] = []
    start = seen = 0  # ids[start:seen] is context that was already said: spaces depend on the token before
    for stop in range(1, len(ids) + 1):
        before = tokenizer.decode(list(ids[start:seen]), skip_special_tokens=False)
        now = tokenizer.decode(list(ids[start:stop]), skip_special_tokens=False)
        if now.endswith("\ufffd") and stop < len(ids):
            out.append("")
            continue
        out.append(now[len(before) :])
        start, seen = seen, stop
    return out


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _reads(method: _Method) -> _Method:
    """A method of Trajectories that reads files; a damaged one becomes one clear line."""

    @wraps(method)
    def wrapped(self: Trajectories, *arguments: Any) -> Any:
        with readable(self.path):
            return method(self, *arguments)

    return cast(_Method, wrapped)


class Trajectories:
    """Everything that the viewer asks: sets, pages of rows, one row in full.

    Every question raises UserError where a file that it reads is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.sets = {s.id: s for s in discover(self.path)}
        self.tokenizer = find_tokenizer(self.path)
        self._sizes: dict[Path, list[int]] = {}
        self._groups: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()
        self._texts: dict[str, dict[str, dict[str, Any]]] = {}
        self._answers: OrderedDict[Path, dict[str, str | None]] = OrderedDict()
        self._updates: OrderedDict[Path, tuple[pa.Table, dict[str, tuple[int, int]]]] = OrderedDict()

    @_reads
    def about(self) -> dict[str, Any]:
        """Title, and per set: rows, verdict counts, steps, snapshots, the largest lengths."""
        sets = []
        for s in self.sets.values():
            index = s.index
            verdicts = index.group_by("verdict").len().sort("len", descending=True)
            sets.append(
                {
                    "id": s.id,
                    "label": s.label,
                    "kind": s.kind,
                    "rows": index.height,
                    "verdicts": [[v, n] for v, n in verdicts.rows() if v is not None],
                    "steps": index["step"].unique().sort().to_list(),
                    "snapshots": index["snapshot_step"].drop_nulls().unique().sort().to_list(),
                    "longest": index["length"].max() or 0,
                    "longest_seed": index["seed_length"].max() or 0,
                    "tokens": s.has_tokens,
                }
            )
        return {"title": self.path.resolve().name, "sets": sets, "decoded": self.tokenizer is not None}

    def _set(self, query: Mapping[str, str]) -> RowSet:
        wanted = query.get("set") or next(iter(self.sets))
        if wanted not in self.sets:
            raise UserError(f"no set {wanted}")
        return self.sets[wanted]

    @_reads
    def rows(self, query: Mapping[str, str]) -> dict[str, Any]:
        """{total, rows}: one page of light rows. Filters: verdict, step, snapshot, seeded, reward_lo/hi, seed_lo/hi,
        problem, group, q (in ids, problem or response); sort, offset, limit.

        Raises:
            UserError: an unknown set, or a number that is none.
        """
        chosen = self._set(query)
        frame = chosen.index.lazy()
        for name, column in (("verdict", "verdict"), ("problem", "problem_id"), ("group", "group")):
            if query.get(name):
                frame = frame.filter(pl.col(column) == query[name])
        for name, column in (("step", "step"), ("snapshot", "snapshot_step")):
            if query.get(name):
                frame = frame.filter(pl.col(column) == int(_number(query, name)))
        for name, column in (("reward", "reward"), ("seed", "seed_length"), ("length", "length")):
            if query.get(f"{name}_lo"):
                frame = frame.filter(pl.col(column) >= _number(query, f"{name}_lo"))
            if query.get(f"{name}_hi"):
                frame = frame.filter(pl.col(column) <= _number(query, f"{name}_hi"))
        if query.get("seeded"):
            frame = frame.filter((pl.col("seed_length") > 0) == (query["seeded"] == "yes"))
        if query.get("q"):
            frame = frame.filter(self._found(chosen, query["q"]))
        sort = query.get("sort", "")
        if sort:
            column = sort.lstrip("-")
            if column not in ("reward", "length", "seed_length", "advantage", "step"):
                raise UserError(f"cannot sort by {column}")
            frame = frame.sort(column, descending=sort.startswith("-"), nulls_last=True, maintain_order=True)
        found = frame.collect()
        offset, limit = int(_number(query, "offset", 0)), min(500, int(_number(query, "limit", 50)))
        return {"total": found.height, "rows": _plain(found.slice(max(0, offset), max(0, limit)).to_dicts())}

    def _found(self, chosen: RowSet, text: str) -> pl.Expr:
        """Rows whose ids, problem or response hold ``text``; responses are searched on disk, file by file."""
        lower = text.lower()

        def holds(column: str) -> pl.Expr:
            return pl.col(column).str.to_lowercase().str.contains(lower, literal=True)

        problems = chosen.texts.filter(holds("problem"))["problem_id"]
        found = pl.col("problem_id").is_in(problems.implode()) | holds("row_id")
        if "text" in pq.read_schema(chosen.parts[0].file).names:
            responses = (
                pl.scan_parquet([p.file for p in chosen.parts], row_index_name="n")
                .filter(holds("text"))
                .select(pl.col("n").cast(pl.UInt32))
                .collect(engine="streaming")["n"]
            )
            found = found | pl.col("n").is_in(responses.implode())
        return found

    @_reads
    def row(self, query: Mapping[str, str]) -> dict[str, Any]:
        """One row in full (see ``full``), with the members of its group and the same problem elsewhere.

        Raises:
            UserError: no such row.
        """
        chosen = self._set(query)
        number = int(_number(query, "n", -1))
        if query.get("row_id"):
            found = chosen.index.filter(pl.col("row_id") == query["row_id"])
            number = found["n"][0] if found.height else -1
        if not 0 <= number < chosen.starts[-1]:
            raise UserError("no such row")
        record = self.full(chosen, number)
        index = chosen.index
        members = index.filter(pl.col("group") == record["group"]).sort("sample")
        others = (
            index.filter(pl.col("problem_id") == record["problem_id"])
            .group_by("group", maintain_order=True)
            .agg(pl.col("n", "step").first(), rows=pl.len(), correct=(pl.col("verdict") == "correct").sum())
        )
        record["members"] = _plain(members.select("n", "sample", "verdict", "reward", "seed_length").to_dicts())
        record["elsewhere"] = others.to_dicts()
        return record

    @_reads
    def full(self, chosen: RowSet, number: int) -> dict[str, Any]:
        """Light columns of row ``number`` with prompt, gold, extracted and the arrays of its tokens."""
        light = chosen.index.row(number, named=True)
        at = bisect_right(chosen.starts, number) - 1
        raw = self._read(chosen.parts[at].file, number - chosen.starts[at])
        if chosen.id not in self._texts:
            self._texts[chosen.id] = {r["problem_id"]: r for r in chosen.texts.to_dicts()}
        problem = self._texts[chosen.id].get(light["problem_id"], {})
        ids = raw["response_ids"]
        prompt = problem.get("prompt")
        if raw.get("prompt_ids") and self.tokenizer is not None:
            prompt = self.tokenizer.decode(raw["prompt_ids"], skip_special_tokens=False)
        tokens: dict[str, Any] = {
            "text": pieces(ids, self.tokenizer),
            "id": ids,
            "behaviour": raw["logprobs"],
        }
        if chosen.kind == "rollout":
            tokens |= self._tokens(chosen.updates.get(light["step"]), light["row_id"], len(ids))
        return _plain(
            light
            | {
                "problem": problem.get("problem"),
                "prompt": prompt,
                "gold": problem.get("gold"),
                "difficulty": problem.get("difficulty"),
                "extracted": raw.get("extracted", self._extracted(chosen, light["row_id"], at)),
                "policy_step": raw.get("policy_step"),
                "off_start": raw.get("off_start", 0),
                "off_stop": raw.get("off_stop", 0),
                "temperature": raw.get("temperature"),
                "text": raw.get("text") if self.tokenizer is None else None,
                "tokens": tokens,
            }
        )

    def _read(self, file: Path, row: int) -> dict[str, Any]:
        """One row of a file: its row group is read, and kept while it is among the newest few."""
        if file not in self._sizes:
            metadata = pq.read_metadata(file)
            self._sizes[file] = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
        group = 0
        while row >= self._sizes[file][group]:
            row -= self._sizes[file][group]
            group += 1
        key = (file, group)
        if key not in self._groups:
            self._groups[key] = pq.ParquetFile(file).read_row_group(group)
            while len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        table = self._groups[key]
        return {name: table[name][row].as_py() for name in table.column_names}

    def _extracted(self, chosen: RowSet, row_id: str, at: int) -> str | None:
        folder = chosen.parts[at].file.parent.parent / "score"
        if folder not in self._answers:
            files = sorted(folder.glob("part-*.parquet"))
            held = pl.read_parquet(files, columns=["row_id", "extracted"]) if files else None
            self._answers[folder] = dict(held.iter_rows()) if held is not None else {}
            while len(self._answers) > _CACHED_GROUPS:
                self._answers.popitem(last=False)
        return self._answers[folder].get(row_id)

    def _tokens(self, update: Path | None, row_id: str, length: int) -> dict[str, list[Any]]:
        """Per-token values of the update, aligned by position; {} where they were not kept."""
        file = update / "tokens.parquet" if update is not None else None
        if file is None or not file.is_file():
            return {}
        if file not in self._updates:
            table = pq.read_table(file, columns=["row_id", "position", *TOKEN_COLUMNS], partitioning=None)
            runs = pl.Series(table["row_id"].combine_chunks()).rle()
            lengths = runs.struct.field("len").to_list()
            starts = [0, *accumulate(lengths)]
            names = runs.struct.field("value").to_list()
            self._updates[file] = table, dict(zip(names, zip(starts, lengths, strict=False), strict=True))
            while len(self._updates) > _CACHED_UPDATES:
                self._updates.popitem(last=False)
        self._updates.move_to_end(file)
        table, places = self._updates[file]
        if row_id not in places:
            return {}
        mine = table.slice(*places[row_id])
        if mine["position"].to_pylist() != list(range(length)):
            return {}
        return {c: mine[c].to_pylist() for c in TOKEN_COLUMNS}


def _number(query: Mapping[str, str], name: str, default: float | None = None) -> float:
    text = query.get(name) or ""
    if not text and default is not None:
        return default
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name}: {text!r} is not a number") from None


def _plain(value: Any) -> Any:
    """JSON-ready: NaN and infinities become null, floats keep six decimals."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], (int, str)):  # one type throughout, as columns are
            return value
        return [_plain(v) for v in value]
    return value
