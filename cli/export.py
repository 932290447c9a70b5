"""``tseeds export``: trajectories for other trainers, policies as model directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption


def export(
    path: Annotated[
        Path, typer.Argument(help="Run directory, rollout artifact, or (with --policy) a model directory.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write (.jsonl, .parquet), or model directory.")],
    layout: Annotated[str, typer.Option("--layout", help="trl or verl.")] = "trl",
    iteration: Annotated[int | None, typer.Option(help="Iteration of the run; default: the newest.")] = None,
    policy: Annotated[bool, typer.Option("--policy", help="Export the policy, not its trajectories.")] = False,
    base: Annotated[
        Path | None, typer.Option(help="With --policy and a LoRA adapter: the policy that it is merged into.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export rollouts to a TRL- or verl-style file, or a policy that transformers and vllm serve load as it is.

    A LoRA adapter, such as the policy of a run with update.lora, is merged into its base.
    """
    import json

    from tseeds import exchange
    from tseeds.artifacts.rundir import RunDir
    from tseeds.artifacts.store import read_manifest
    from tseeds.errors import UserError

    if layout not in exchange.NAMES:
        raise UserError(f"--layout {layout}: choose one of {', '.join(exchange.NAMES)}")
    if base is not None and not policy:
        raise UserError("--base goes with --policy")
    run = RunDir(path) if (path / "pipeline.toml").is_file() else None
    if run is None and iteration is not None:
        raise UserError(f"--iteration goes with a run; {path} is none")
    last = run.finished() if run is not None else 0
    number = last if iteration is None else iteration
    if policy:
        source = run.policy(number) if run is not None else path
        digest = exchange.export_policy(source, out, base=base)
        typer.echo(json.dumps({"path": str(out), "digest": digest}) if as_json else f"{out}  {digest}")
        return
    if out.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{out}: name a .jsonl or .parquet file")
    if run is not None:
        if number < 1:
            raise UserError(f"{path}: no finished iteration yet")
        rollouts, problems = run.stage(number, "rollout"), run.problems
    elif read_manifest(path) is None:
        raise UserError(f"{path}: not a run and not a rollout artifact")
    else:
        rollouts, problems = path, path.resolve().parents[2] / "problems" if len(path.resolve().parents) > 2 else path
    scores = rollouts.with_name("score")
    table = exchange.export_rows(
        rollouts,
        layout,  # type: ignore[arg-type]
        scores=scores if (scores / "manifest.json").is_file() else None,
        problems=problems if (problems / "manifest.json").is_file() else None,
    )
    exchange.write_file(table, out)
    record = {"path": str(out), "rows": table.num_rows, "columns": table.column_names}
    typer.echo(json.dumps(record) if as_json else f"{out}  {table.num_rows} rows: {', '.join(table.column_names)}")
