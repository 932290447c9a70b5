"""``tseeds problems``: data sets become problems, and what is wrong with them is said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tseeds_cli.options import ConfigOption, JsonOption, OutOption, PolicyOption, RunArgument, SetOption

if TYPE_CHECKING:
    from tseeds.artifacts.store import Manifest


def problems(
    run: RunArgument = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    out: OutOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read data sets into problems with prompt token ids; bad rows are quarantined, counted and listed."""
    from tseeds import problems as stage
    from tseeds.artifacts.store import read_manifest
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, from_run

    if run is not None:
        pipeline, where, step = from_run(run, stage.STAGE, 0, sets, config=config, policy=policy, out=out)
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        target: Path = step.out
    else:
        pipeline = explicit(config, sets, out=out)
        assert out is not None
        inputs = stage.Inputs(policy or Path(pipeline.policy.path))
        run_stage(pipeline, Step(stage, inputs, out, 0), as_json=as_json)
        target = out
    manifest = read_manifest(target)
    if manifest is not None and not as_json:
        typer.echo(summary(manifest))


def summary(manifest: Manifest) -> str:
    """The ingest report in a few lines: rows kept and quarantined, then each finding with its first example."""
    facts: dict[str, Any] = dict(manifest.facts)
    lines = [f"{facts['rows']} rows read, {facts['kept']} kept"]
    if facts["prompt_tokens"]:
        lines[0] += " (prompts of {min} to {max} tokens, median {median})".format(**facts["prompt_tokens"])
    for reason, count in facts["quarantined"].items():
        lines.append(f"  quarantined {count:6}  {reason}")
    for kind, finding in facts["findings"].items():
        first = finding["examples"][0]
        lines.append(
            f"  found       {finding['rows']:6}  {kind} ({finding['policy']}), such as {first['problem_id'] or ''} "
            f"row {first['row']}: {first['detail']}"
        )
    if facts["quarantined"]:
        lines.append(f"  all of them: {manifest.path / 'quarantine.parquet'}")
    return "\n".join(lines)
