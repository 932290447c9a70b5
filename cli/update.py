"""``tseeds update``: the mixed-loss policy update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tseeds_cli.options import ConfigOption, Iteration, JsonOption, OutOption, PolicyOption, RunArgument, SetOption

if TYPE_CHECKING:
    from tseeds.artifacts.rundir import RunDir
    from tseeds.config import Pipeline
    from tseeds.update import Inputs


def update(
    run: RunArgument = None,
    iteration: Iteration = None,
    config: ConfigOption = None,
    policy: PolicyOption = None,
    state: Annotated[
        Path | None, typer.Option(help="Trainer state of an earlier update; leave out to begin anew.")
    ] = None,
    rollouts: Annotated[Path | None, typer.Option(help="Rollout artifact.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Score artifact.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Model directory of the KL term.")] = None,
    out: OutOption = None,
    dry_run_gradient: Annotated[
        bool,
        typer.Option(
            "--dry-run-gradient",
            help="Train nothing: compare the gradients of --modes on committed rows (default: the newest iteration's).",
        ),
    ] = False,
    modes: Annotated[
        str | None, typer.Option(help="Prefix weights for --dry-run-gradient, comma-separated; default: all.")
    ] = None,
    at: Annotated[
        Path | None,
        typer.Option(
            help="With --dry-run-gradient: a later model directory to take gradients at; there the continuation clips too."
        ),
    ] = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on one iteration's rows and commit the new policy with its optimizer state and metrics.

    With --dry-run-gradient: what each way to weight seed tokens would do to these rows, without training.
    """
    from tseeds import update as stage
    from tseeds.errors import UserError
    from tseeds.pipeline import Step
    from tseeds_cli.console import run_stage
    from tseeds_cli.options import explicit, from_run

    if not dry_run_gradient and (modes is not None or at is not None):
        raise UserError("--modes and --at go with --dry-run-gradient")
    if run is not None:
        if dry_run_gradient and iteration is None:
            from tseeds.artifacts.rundir import open_run

            iteration = open_run(run).finished()
        pipeline, where, step = from_run(
            run, stage.STAGE, iteration, sets, config=config, policy=policy, state=state, rollouts=rollouts, scores=scores,
            reference=reference, out=out,
        )  # fmt: skip
        if dry_run_gradient:
            _compare(pipeline, replace(step.inputs, policy=_sampler(where, step.iteration)), modes, at, as_json=as_json)
            return
        run_stage(pipeline, step, as_json=as_json, run=where.root)
        return
    needed = {} if dry_run_gradient else {"out": out}
    pipeline = explicit(config, sets, policy=policy, rollouts=rollouts, scores=scores, **needed)
    assert policy is not None
    assert rollouts is not None
    assert scores is not None
    inputs = stage.Inputs(policy, state, rollouts, scores, iteration or 1, reference)
    if dry_run_gradient:
        _compare(pipeline, inputs, modes, at, as_json=as_json)
        return
    assert out is not None
    run_stage(pipeline, Step(stage, inputs, out, inputs.iteration), as_json=as_json)


def _sampler(run: RunDir, iteration: int) -> Path:
    """The policy that sampled an iteration's rows.

    Raises:
        UserError: retention removed it; the iterations of which it is there are named.
    """
    from tseeds.errors import UserError
    from tseeds_cli.options import kept_policy

    policy = kept_policy(run, iteration - 1)
    if policy is None:
        kept = [i for i in range(1, run.finished() + 1) if kept_policy(run, i - 1)]
        raise UserError(
            f"{run.root}: retention removed the policy that sampled iteration {iteration}; it is kept for iterations "
            f"{', '.join(map(str, kept))} (snapshot.every and snapshot.keep_states_every keep more)"
        )
    return policy


_TITLES = {
    "grad_norm": "grad norm",
    "clip_fraction_seed": "clip seed",
    "clipped_mass_seed": "mass lost seed",
    "clipped_mass_continuation": "mass lost cont",
    "clipped_mass_all": "mass lost all",
    "effective_entropy": "eff ent",
    "retained_entropy": "ent kept",
    "ratio_mean_seed": "ratio seed",
    "ess_share_seed": "ESS seed",
}
"""Headings of the figures: shares of 1, but for the norm, the entropy (nats) and the mean ratio."""


def _compare(pipeline: Pipeline, inputs: Inputs, modes: str | None, at: Path | None, *, as_json: bool) -> None:
    """Print what each mode does to the rows: one table of figures, one of cosines between the gradients."""
    import json
    import sys

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from tseeds import update as stage
    from tseeds_cli.console import quiet

    quiet()
    result = stage.compare_gradients(pipeline, inputs, modes.split(",") if modes is not None else None, at=at)
    if as_json:
        values = {m: {k: stage.known(v) for k, v in found.items()} for m, found in result.values.items()}
        cosine = [[stage.known(x) for x in line] for line in result.cosine]
        sys.stdout.write(json.dumps({"modes": result.modes, "values": values, "cosine": cosine}) + "\n")
        return
    figures = Table(
        title="one optimizer step over all rows, nothing trained",
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    cosines = Table(
        title="cosine between the gradients",
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    figures.add_column("prefix weight", no_wrap=True)
    cosines.add_column("", no_wrap=True)
    for name in _TITLES:
        figures.add_column(_TITLES[name], justify="right", overflow="fold")
    for mode in result.modes:
        cosines.add_column(mode, justify="right", overflow="fold", min_width=5)
    for mode, line in zip(result.modes, result.cosine, strict=True):
        figures.add_row(mode, *(_number(result.values[mode][name], ".3f") for name in _TITLES))
        cosines.add_row(mode, *(_number(x, ".2f") for x in line))
    console = Console()
    console.print(figures)
    console.print(cosines)


def _number(value: float, form: str) -> str:
    return "–" if value != value else format(value, form)
