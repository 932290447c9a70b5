"""``tseeds show PATH``: rows of any artifact, readable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tseeds_cli.options import JsonOption


def show(
    path: Annotated[
        Path, typer.Argument(help="An artifact directory, a Parquet file, or a run (its newest rollouts).")
    ],
    rows: Annotated[int, typer.Option("-n", "--rows", min=0, help="How many rows.")] = 8,
    verdict: Annotated[
        str | None, typer.Option(help="Only rows of this verdict (rollouts: joined from score).")
    ] = None,
    seeded: Annotated[
        bool | None, typer.Option("--seeded/--unseeded", help="Only rows with, or without, a seed.")
    ] = None,
    problem: Annotated[str | None, typer.Option(help="Only rows of this problem_id.")] = None,
    group: Annotated[str | None, typer.Option(help="Only rows of this group_id.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show rows of any artifact: trajectories with seed and continuation told apart, tables otherwise."""
    import json

    import pyarrow as pa
    import pyarrow.compute as pc

    from tseeds.errors import UserError

    if verdict is not None:
        from tseeds.grading.verdict import Verdict

        if verdict not in {*Verdict}:
            raise UserError(f"--verdict {verdict}: choose one of {', '.join(Verdict)}")
    table, scores = load(path)
    if scores is not None:
        places = {row: k for k, row in enumerate(scores["row_id"].to_pylist())}
        order = pa.array([places.get(row) for row in table["row_id"].to_pylist()], pa.int64())
        for column in ("verdict", "reward", "extracted"):
            if column in scores.column_names:
                table = table.append_column(column, scores[column].take(order))
    for column, wanted in (("verdict", verdict), ("problem_id", problem), ("group_id", group), ("seed_id", seeded)):
        if wanted is None:
            continue
        if column not in table.column_names:
            raise UserError(f"{path}: has no column {column} to filter by")
        held = table[column]
        table = table.filter(pc.equal(pc.is_valid(held), wanted) if column == "seed_id" else pc.equal(held, wanted))
    total = table.num_rows
    records = table.slice(0, rows).to_pylist()
    if as_json:
        for record in records:
            typer.echo(json.dumps(record, ensure_ascii=False))
        return
    if "response_ids" in table.column_names:
        _trajectories(path, records, table.column_names)
    elif records:
        _table(records)
    typer.echo(f"{min(rows, total)} of {total} rows (-n for more, --json for all columns)")


def load(path: Path) -> tuple[Any, Any]:
    """(rows, scores or None) of an artifact directory, a Parquet file or a run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tseeds.artifacts.disk import readable
    from tseeds.artifacts.rundir import RunDir
    from tseeds.errors import UserError

    if (path / "pipeline.toml").is_file():
        run = RunDir(path)
        made = [i for i in run.iterations() if (run.stage(i, "rollout") / "manifest.json").is_file()]
        if not made:
            raise UserError(f"{path}: no rollouts yet")
        path = run.stage(made[-1], "rollout")
    if not path.exists():
        raise UserError(f"{path}: no such artifact")
    files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
    files = [f for f in files if f.name.startswith("part-")] or files[:1]
    if not files:
        raise UserError(f"{path}: holds no Parquet file; name an artifact such as RUN/iterations/000001/rollout")
    with readable(path):
        table = pa.concat_tables([pq.read_table(f, partitioning=None) for f in files])
        graded = sorted((files[0].parent.parent / "score").glob("part-*.parquet"))
        scores = (
            pa.concat_tables([pq.read_table(f, partitioning=None) for f in graded])
            if graded and "response_ids" in table.column_names and "verdict" not in table.column_names
            else None
        )
    return table, scores


def _decoder(path: Path) -> Any:
    """The run's own tokenizer.json through the small tokenizers library; None where there is none."""
    for parent in [path, *path.parents]:
        file = parent / "snapshots" / "step-000000" / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(file))
    return None


def _prompts(path: Path) -> dict[str, str]:
    """Prompts by problem_id of an evaluation, which keeps its problems beside its rows; {} elsewhere."""
    import pyarrow.parquet as pq

    from tseeds.artifacts.disk import readable

    file = (path.parent if path.is_file() else path) / "tables" / "problems.parquet"
    if not file.is_file():
        return {}
    with readable(file):
        table = pq.read_table(file, columns=["problem_id", "prompt"], partitioning=None)
    return dict(zip(table["problem_id"].to_pylist(), table["prompt"].to_pylist(), strict=True))


def _trajectories(path: Path, records: list[dict[str, Any]], columns: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    tokenizer, prompts = _decoder(path.resolve()), _prompts(path)
    for record in records:
        start, stop = record.get("off_start") or 0, record.get("off_stop") or 0
        head = Text(record["row_id"], style="bold")
        if record.get("verdict"):
            good = record["verdict"] == "correct"
            head.append(f"  {record['verdict']}", style="green" if good else "red")
        head.append(f"  problem {record['problem_id']}  policy step {record.get('policy_step')}", style="dim")
        if stop > start:
            head.append(
                f"  {record.get('position') or 'prefix'} [{start}, {stop}) by the snapshot of step {record.get('snapshot_step')}",
                style="magenta",
            )
        head.append(f"  {len(record['response_ids'])} tokens, {record['finish_reason']}", style="dim")
        console.print(head)
        body = Text()
        prompt = prompts.get(record["problem_id"], "")
        if tokenizer is not None and record.get("prompt_ids"):
            prompt = tokenizer.decode(record["prompt_ids"], skip_special_tokens=True)
        if prompt:
            body.append(prompt.strip() + "\n", style="dim")
        if tokenizer is None:
            body.append(record["text"])
        else:
            whole, at = record["response_ids"], 0
            for end, style, mark in (
                (start, "cyan", ""),
                (stop, "magenta", "⟦"),
                (len(whole), "cyan", "⟧" if stop > start else ""),
            ):
                before = tokenizer.decode(whole[:at], skip_special_tokens=True)
                text = tokenizer.decode(whole[:end], skip_special_tokens=True)[len(before) :]
                body.append((mark if end > at or mark == "⟧" else "") + text, style=style)
                at = end
            if stop == len(whole) and stop > start:
                body.append("⟧" if not body.plain.endswith("⟧") else "", style="cyan")
        console.print(body)
        console.print()


def _table(records: list[dict[str, Any]]) -> None:
    """One line a record where all columns fit the terminal, else one line a value."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    names = [k for k in records[0] if k not in ("prompt_ids", "logprobs")]
    cells = [[Text(_cell(record[name])) for name in names] for record in records]
    table = Table()
    for name in names:
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=28)
    for row in cells:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=10**6)).maximum <= console.width:
        console.print(table)
        return
    for row in cells:
        record = Table.grid(padding=(0, 2))
        record.add_column(style="dim", no_wrap=True)
        record.add_column(overflow="fold")
        for name, cell in zip(names, row, strict=True):
            record.add_row(name, cell)
        console.print(record)
        console.print()


_ITEMS = 10
"""Of a list, so many are shown."""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        more = [f"… {len(value)} in all"] if len(value) > _ITEMS else []
        return f"[{', '.join([*map(_cell, value[:_ITEMS]), *more])}]"
    return "" if value is None else str(value).replace("\n", "\\n")
