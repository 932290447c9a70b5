"""Re-checks what is committed: files against manifests, artifacts against their run, log-probs against the policies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tseeds import pipeline
from tseeds.artifacts import store
from tseeds.artifacts.rundir import RunDir, open_run
from tseeds.errors import UserError
from tseeds.history import History


def check(path: Path) -> tuple[int, list[str]]:
    """(artifacts looked at, one line per damage) of a run directory or a single artifact.

    Raises:
        UserError: there is nothing to check at ``path``.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such run or artifact")
    run = RunDir(path)
    if run.pipeline.exists() or run.record.exists():
        folders = list(_artifacts(run))
        damages = [line for folder in folders for line in _damages(folder)]
        return len(folders), [*damages, *_of_run(run, damaged=bool(damages))]
    if not (path / store.MANIFEST).exists():
        if any(path.glob("*.parquet")) or any(path.glob("*.safetensors")):
            return 1, [f"{path}: no manifest; it was never committed, or its manifest is lost"]
        raise UserError(f"{path}: holds no committed artifact")
    return 1, list(_damages(path))


@dataclass(slots=True)
class Rescored:
    """tokens: log-probs taken anew; mean, most: |recorded - anew| in nats; skipped: rows some of whose writers are not kept;
    damages: one line per iteration and writer beyond the tolerance."""

    tokens: int
    mean: float
    most: float
    skipped: int
    damages: list[str]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens ids[start:stop] of one sequence that one policy wrote at one temperature, and what was recorded for them."""

    iteration: int
    ids: list[int]
    start: int
    stop: int
    recorded: list[float | None]
    temperature: float


def check_logprobs(path: Path, rows: int) -> Rescored:
    """Recompute the log-probs of the first ``rows`` trajectories of every committed rollout with the policies that wrote them.

    Seed tokens are scored by their snapshot at their seed's temperature, the others by the policy of their iteration at the
    rollout's, by transformers on the CPU. Policies that retention has removed are skipped and counted.

    Raises:
        UserError: ``path`` is no run, or a policy cannot be loaded.
    """
    from tseeds.engines.probe import TOLERANCE, open_model

    run = open_run(Path(path))
    history = pipeline.open_history(run)
    policy = history.config.policy
    work: dict[Path, list[_Stretch]] = defaultdict(list)
    skipped = 0
    for iteration in run.iterations():
        manifest = store.read_manifest(run.stage(iteration, "rollout"))
        if manifest is None:
            continue
        seeds = store.read_manifest(run.stage(iteration, "seed"))
        table = store.read_table(seeds).select(["seed_id", "temperature"]).to_pylist() if seeds is not None else []
        sampled_at = {row["seed_id"]: row["temperature"] for row in table}
        for row in store.read_table(manifest).slice(0, rows).to_pylist():
            written = list(_stretches(run, iteration, row, sampled_at.get(row["seed_id"], row["temperature"])))
            skipped += any(not writer.is_dir() for writer, _ in written)
            for writer, stretch in written:
                if writer.is_dir():
                    work[writer].append(stretch)
    gaps: list[float] = []
    damages: list[str] = []
    for writer, stretches in work.items():
        model = open_model(writer, policy.dtype, trust_remote_code=policy.trust_remote_code)
        by_iteration: dict[int, list[float]] = defaultdict(list)
        for stretch in stretches:
            by_iteration[stretch.iteration] += _gaps(model, stretch)
        mean, most = TOLERANCE[policy.dtype]
        for iteration, found in by_iteration.items():
            if found and not (sum(found) / len(found) <= mean and max(found) <= most):
                damages.append(
                    f"{run.stage(iteration, 'rollout')}: recorded log-probs differ from those of {writer}, which wrote the tokens, "
                    f"by {sum(found) / len(found):.2g} on average and {max(found):.2g} at most (allowed in {policy.dtype}: "
                    f"{mean:g} and {most:g})"
                )
            gaps += found
    return Rescored(len(gaps), sum(gaps) / max(1, len(gaps)), max(gaps, default=0.0), skipped, damages)


def _stretches(
    run: RunDir, iteration: int, row: dict[str, Any], seed_temperature: float
) -> Iterator[tuple[Path, _Stretch]]:
    """(writer, stretch) of a trajectory: what came before the seed, the seed, what came after it."""
    offset, end = len(row["prompt_ids"]), len(row["response_ids"])
    ids = [*row["prompt_ids"], *row["response_ids"]]
    for start, stop, seeded in (
        (0, row["off_start"], False),
        (row["off_start"], row["off_stop"], True),
        (row["off_stop"], end, False),
    ):
        if stop > start:
            writer = run.policy(row["snapshot_step"] if seeded else row["policy_step"])
            if seeded and run.snapshot(row["snapshot_step"]).is_dir():
                writer = run.snapshot(row["snapshot_step"])  # else sampler "current" or a replayed chain: no snapshot
            temperature = seed_temperature if seeded else row["temperature"]
            recorded = row["logprobs"][start:stop]
            yield writer, _Stretch(iteration, ids, offset + start, offset + stop, recorded, temperature)


def _gaps(model: Any, stretch: _Stretch) -> list[float]:
    """|recorded - anew| of every token with a recorded log-prob."""
    import torch

    tokens = torch.tensor([stretch.ids[: stretch.stop]], device=model.device)
    with torch.inference_mode():
        logits = model(tokens, use_cache=False).logits[0, stretch.start - 1 : stretch.stop - 1].float()
    written = tokens[0, stretch.start :, None]
    anew = (logits / stretch.temperature).log_softmax(-1).gather(-1, written)[:, 0].tolist()
    return [abs(a - b) for a, b in zip(stretch.recorded, anew, strict=True) if a is not None]


def _artifacts(run: RunDir) -> Iterator[Path]:
    """Every directory of a run that should be a committed artifact; interrupted ones are none."""
    yield from (folder for folder in (run.problems, run.curriculum) if folder.is_dir())
    for parent in (
        run.root / "snapshots",
        *sorted((run.root / "iterations").glob("*")),
        *sorted((run.root / "evaluations").glob("*")),
        *sorted((run.root / "mixed").glob("*")),
    ):
        if parent.is_dir():
            yield from sorted(
                p
                for p in parent.iterdir()
                if p.is_dir() and not p.name.startswith(".") and not p.name.endswith(".partial")
            )


def _damages(folder: Path) -> Iterator[str]:
    try:
        manifest = store.read_manifest(folder)
        if manifest is None:
            yield f"{folder}: no manifest; it was never committed, or its manifest is lost"
        else:
            yield from store.damages(manifest)
    except UserError as error:
        yield str(error)


def _steps(history: History, run: RunDir) -> Iterator[pipeline.Step]:
    """Every step up to the last iteration that has a directory."""
    yield from pipeline.setup_steps(history.at(0), run)
    for i in range(1, max(run.iterations(), default=0) + 1):
        yield from pipeline.iteration_steps(history, run, i)


def remakable(path: Path, damages: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """(artifacts that a run would remake once deleted, those whose inputs retention removed) among the damaged ones."""
    run = RunDir(path)
    can: list[Path] = []
    cannot: list[Path] = []
    try:
        for step in _steps(pipeline.open_history(run), run) if run.record.is_file() else ():
            if any(line.startswith((f"{step.out}/", f"{step.out}:")) for line in damages):
                inputs = [v for v in vars(step.inputs).values() if isinstance(v, Path)]
                (can if all(p.is_dir() for p in inputs) else cannot).append(step.out)
    except UserError:
        pass  # among the damages already: what the steps are cannot be told beyond it
    return can, cannot


def _of_run(run: RunDir, *, damaged: bool) -> Iterator[str]:
    """What is wrong between artifacts: one of another run, or made with other values than the run's record says."""
    try:
        for file in (run.metrics, *run.root.glob("iterations/*/*.partial/parts.jsonl")):
            store.read_lines(file)
        history = pipeline.open_history(run)
        if damaged:
            return  # the comparison below reads manifests that may be the damaged ones
        if not run.record.is_file():
            yield f"{run.record}: missing; it says what the run's values are and when they changed"
        reports = [pipeline.inspect_committed(history, step) for step in _steps(history, run)]
        last = max((k for k, r in enumerate(reports) if r.state in ("fresh", "stale")), default=-1)
        for k, report in enumerate(reports):
            if k < last and report.state == "missing":
                yield f"{report.step.out}: missing, while later stages are committed"
            if report.state == "stale":
                yield f"{report.step.out}: does not belong to this run as it stands ({'; '.join(report.reasons)})"
        lines = {line.get("iteration") for line in store.read_lines(run.metrics)}
        absent = [i for i in range(1, run.finished()) if i not in lines]
        if absent:
            yield f"{run.metrics}: has no line of iteration {', '.join(map(str, absent[:8]))}; tseeds run adds it"
    except UserError as error:
        yield str(error)
