"""``tseeds engine``: one warm engine for stage commands run by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tseeds_cli.options import PolicyOption, SetOption

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Keep an engine warm between stage commands.")


@app.callback()
def _engine() -> None:
    """Keep an engine warm between stage commands."""


@app.command()
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory whose stage commands use the engine.")],
    policy: PolicyOption = None,
    sets: SetOption = None,
) -> None:
    """Serve the run's engine until Ctrl-C: vLLM's own server on 127.0.0.1, its key readable by you alone."""
    import sys

    from tseeds import config as configuration
    from tseeds.artifacts.rundir import open_run
    from tseeds.engines import serve as served
    from tseeds_cli.console import quiet

    where = open_run(run)
    pipeline = configuration.load(where.pipeline, sets or ())
    where.root.joinpath("logs").mkdir(exist_ok=True)
    quiet(where.root / "logs" / "engine.log")
    step = where.finished()
    newest = where.policy(step)
    first = policy or (newest if newest.is_dir() else Path(pipeline.policy.path))
    sys.stderr.write(f"starting the engine on {first} (about a minute)\n")

    def ready(record: served.Record) -> None:
        sys.stderr.write(f"serving {run} at {', '.join(record.urls)}; Ctrl-C stops it\n")

    response = max(pipeline.rollout.max_response_tokens, pipeline.evaluate.max_response_tokens)
    served.serve(where.root, pipeline, first, max_model_len=pipeline.problems.max_prompt_tokens + response, ready=ready)
    sys.stderr.write("stopped\n")
