"""``tseeds run PIPELINE``: the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import JsonOption, SetOption


def run(
    pipeline: Annotated[Path, typer.Argument(help="Pipeline file (.toml), or a run directory to go on with.")],
    run: Annotated[Path | None, typer.Option("--run", help="Run directory; default runs/<pipeline name>.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Train up to this many iterations (run.iterations).")] = None,
    sets: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and what is stale; run nothing.")
    ] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Apply changed values from the next iteration on, and record the change.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train: chain the stages for N iterations; fresh stages are skipped, interrupted ones resumed."""
    import json

    from tseeds import config as configuration
    from tseeds import pipeline as chain
    from tseeds.artifacts.rundir import RunDir, open_run
    from tseeds.errors import UserError

    assignments = [*(sets or ()), *([f"run.iterations={iterations}"] if iterations is not None else [])]
    if pipeline.is_dir():
        root = run or pipeline
        source = open_run(pipeline).pipeline
    else:
        root, source = run or Path("runs") / pipeline.stem, pipeline
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: a file; name a directory for the run (--run NEW)")
    config = configuration.load(source, assignments)
    where = RunDir(root)
    if dry_run:
        from tseeds_cli.status import print_survey

        print_survey(config, where, accept=accept, as_json=as_json)
        return

    from tseeds.context import Context
    from tseeds.errors import Interrupted
    from tseeds.loggers import open_loggers
    from tseeds_cli.console import quiet, stoppable
    from tseeds_cli.panel import Panel

    panel = Panel(config, where)
    quiet(chain.attempt_log(where), panel.say)
    with (
        Context(config, progress=panel.progress, run=root) as context,
        stoppable(context),
        open_loggers(config, where) as loggers,
        panel,
    ):
        try:
            chain.run_pipeline(config, root, context, accept=accept, listener=chain.Listeners([panel, *loggers]))
        except Interrupted as stop:
            raise Interrupted(f"{stop}; tseeds run {root} goes on from here") from None
    panel.finish()
    if as_json:
        typer.echo(json.dumps({"run": str(root), "iterations": where.finished()}))
    else:
        panel.summary()
