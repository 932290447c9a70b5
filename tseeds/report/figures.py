"""Every figure of a report as data: which curves, which axes, which words. How it is drawn is decided elsewhere.

One curve per group: the mean over its runs, and a band of one standard deviation where there are several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tseeds.report.read import Group, Run

SERIES_LIMIT = 16


@dataclass(frozen=True)
class Series:
    """One curve or one set of bars. group: number of its colour; variant: number of its dash; lo, hi: band or error bars."""

    name: str
    group: int
    x: Sequence[Any]
    y: Sequence[float | None]
    lo: Sequence[float | None] = ()
    hi: Sequence[float | None] = ()
    variant: int = 0
    sizes: Sequence[int] = ()
    """Rows behind each point, shown on hover."""


@dataclass(frozen=True)
class Figure:
    """A figure: id names files; x, y are axis titles with units; note says how to read it."""

    id: str
    section: str
    title: str
    x: str
    y: str
    series: Sequence[Series]
    note: str = ""
    kind: Literal["line", "points", "bars", "heat"] = "line"
    x_log2: bool = False
    rows: Sequence[str] = ()
    """heat: names of the rows; series[0].x are the columns and ``cells`` the values."""
    cells: Sequence[Sequence[float | None]] = ()
    smooth: bool = False
    """Values of single iterations, which a reader may want smoothed."""


@dataclass(frozen=True)
class _Curve:
    key: str
    name: str


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def spread(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """(mean, mean - sd, mean + sd) over runs, sd with n - 1; without a band for fewer than two values."""
    held = [v for v in values if v is not None and not math.isnan(v)]
    if not held:
        return None, None, None
    mean = _mean(held)
    if len(held) < 2:
        return mean, None, None
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in held) / (len(held) - 1))
    return mean, mean - sd, mean + sd


def over(
    group: Group,
    number: int,
    points: Callable[[Run], dict[Any, float | None]],
    *,
    name: str,
    variant: int = 0,
    intervals: Callable[[Run], dict[Any, tuple[float, float]]] | None = None,
) -> Series | None:
    """A series of a group from each run's {x: y}; None where no run has a value.

    intervals: of a single run's points, used where the group has no second run to show a spread of.
    """
    per_run = [points(run) for run in group.runs]
    xs = sorted({x for p in per_run for x, y in p.items() if y is not None})
    if not xs:
        return None
    rows = [spread([p.get(x) for p in per_run]) for x in xs]
    y, lo, hi = ([r[i] for r in rows] for i in range(3))
    if intervals is not None and len(group.runs) == 1:
        own = intervals(group.runs[0])
        lo, hi = [own[x][0] for x in xs], [own[x][1] for x in xs]
    banded = any(v is not None for v in lo)
    return Series(name, number, xs, y, lo if banded else (), hi if banded else (), variant)


def metric(run: Run, key: str) -> dict[Any, float | None]:
    """{iteration: value} of a metrics.jsonl key."""
    return {line["iteration"]: line.get(key) for line in run.metrics}


def _training(
    groups: Sequence[Group], ident: str, section: str, title: str, y: str, curves: Sequence[_Curve], note: str = ""
) -> Figure | None:
    """A figure of metrics over iterations: colour by group, dash by curve; with one group, colour by curve."""
    series = []
    for g, group in enumerate(groups):
        for c, curve in enumerate(curves):
            many = len(groups) > 1
            name = group.name if many and len(curves) == 1 else f"{group.name}: {curve.name}" if many else curve.name
            one = over(group, g if many else c, lambda run, k=curve.key: metric(run, k), name=name, variant=c)  # type: ignore[misc]
            if one is not None and any(v for v in one.y):
                series.append(one)
    if not series:
        return None
    return Figure(ident, section, title, "iteration", y, series, note, smooth=True)


def _by_bin(
    groups: Sequence[Group], ident: str, section: str, title: str, y: str, key: str, note: str
) -> Figure | None:
    series = []
    for g, group in enumerate(groups):
        for r, region in enumerate(("seed", "continuation")):

            def points(run: Run, name: str = f"{key}_{region}") -> dict[Any, float | None]:
                return {
                    round(b / 10 + 0.05, 2): (None if math.isnan(v) else v)
                    for b, v in enumerate(run.bins.get(name, ()))
                }

            many = len(groups) > 1
            one = over(group, g if many else r, points, name=f"{group.name}: {region}" if many else region, variant=r)
            if one is not None and any(v for v in one.y):
                series.append(one)
    if not series:
        return None
    return Figure(ident, section, title, "position in the response (fraction)", y, series, note, kind="points")


def evaluated(
    run: Run, benchmark: str, name: str, *, step: int | None = None, k: int | None = None
) -> list[dict[str, Any]]:
    """Rows of all problems of a metric."""
    return [
        r
        for r in run.evaluations
        if r["benchmark"] == benchmark
        and r["metric"] == name
        and r["difficulty"] is None
        and (step is None or r["policy_step"] == step)
        and (k is None or r["k"] == k)
    ]


def benchmarks(groups: Sequence[Group]) -> list[str]:
    """Names of all benchmarks that any run was evaluated on."""
    return sorted({r["benchmark"] for g in groups for run in g.runs for r in run.evaluations})


def _pass_curves(groups: Sequence[Group], benchmark: str) -> Figure | None:
    """pass@k over k, before (dotted) and after training."""
    series = []
    for g, group in enumerate(groups):
        for when, pick in (("after", max), ("before", min)):

            def at(run: Run, pick: Any = pick) -> list[dict[str, Any]]:
                steps = {r["policy_step"] for r in evaluated(run, benchmark, "pass")}
                if not steps or (pick is min and len(steps) < 2):
                    return []
                return evaluated(run, benchmark, "pass", step=pick(steps))

            one = over(
                group,
                g,
                lambda run, at=at: {r["k"]: r["value"] for r in at(run)},  # type: ignore[misc]
                name=f"{group.name}: {when}",
                variant=0 if when == "after" else 2,
                intervals=lambda run, at=at: {r["k"]: (r["lo"], r["hi"]) for r in at(run)},  # type: ignore[misc]
            )
            if one is not None:
                series.append(one)
    if not series:
        return None
    return Figure(
        f"pass-at-k-{_slug(benchmark)}",
        "Evaluation",
        f"pass@k on {benchmark}, before and after training",
        "k (samples)",
        "pass@k",
        series,
        "Unbiased estimate, without seeds. Band: one standard deviation over the runs of a group; for a single run, the 95 % "
        "bootstrap interval over problems.",
        x_log2=True,
        kind="points",
    )


def _evaluation_over_training(groups: Sequence[Group], benchmark: str, name: str, ident: str, y: str) -> Figure | None:
    series = []
    for g, group in enumerate(groups):
        ks = {r["k"] for run in group.runs for r in evaluated(run, benchmark, name)}
        chosen = [None] if ks == {None} else sorted({min(ks), max(ks)}) if ks else []
        for variant, k in enumerate(chosen):

            def points(run: Run, k: int | None = k) -> dict[Any, float | None]:
                return {r["policy_step"]: r["value"] for r in evaluated(run, benchmark, name, k=k)}

            def bounds(run: Run, k: int | None = k) -> dict[Any, tuple[float, float]]:
                return {r["policy_step"]: (r["lo"], r["hi"]) for r in evaluated(run, benchmark, name, k=k)}

            label = group.name if k is None else f"{group.name}: {name}@{k}"
            one = over(group, g, points, name=label, variant=variant, intervals=bounds)
            if one is not None and len(one.x) > 1:
                series.append(one)
    if not series:
        return None
    return Figure(ident, "Evaluation", f"{y} on {benchmark} over training", "training step", y, series, kind="points")


def _difficulty(groups: Sequence[Group], benchmark: str) -> Figure | None:
    series = []
    for g, group in enumerate(groups):
        for variant, (when, pick) in enumerate((("after", max), ("before", min))):

            def points(run: Run, pick: Any = pick) -> dict[Any, float | None]:
                rows = [
                    r
                    for r in run.evaluations
                    if r["benchmark"] == benchmark and r["metric"] == "pass" and r["k"] == 1 and r["difficulty"]
                ]
                step = pick((r["policy_step"] for r in rows), default=None)
                return {str(r["difficulty"]): r["value"] for r in rows if r["policy_step"] == step}

            one = over(group, g, points, name=f"{group.name}: {when}", variant=variant)
            if one is not None:
                series.append(one)
    if not series:
        return None
    return Figure(
        f"difficulty-{_slug(benchmark)}",
        "Evaluation",
        f"pass@1 on {benchmark} by difficulty",
        "difficulty",
        "pass@1",
        series,
        kind="bars",
    )


def _mixed(groups: Sequence[Group]) -> list[Figure]:
    figures = []
    for group in groups:
        for run in group.runs:
            for (step, benchmark), cells in run.mixed.items():
                k = cells[0]["samples"]
                key = f"pass@{k}"
                lengths = sorted({c["seed_length"] for c in cells if c["seed_length"] > 0})
                columns = [0, *lengths, -1]
                steps = sorted({c["snapshot_step"] for c in cells if c["snapshot_step"] is not None})
                by = {(c["snapshot_step"], c["seed_length"]): c for c in cells}
                alone = by[None, 0][key]
                kinds = [(s, f"snapshot {s} (lag {step - s})") for s in steps]
                kinds += [(None, "all snapshots")] if (None, -1) in by else []
                values = [[alone if n == 0 else by[s, n][key] for n in columns] for s, _ in kinds]
                names = ["policy alone", *(f"L = {n}" for n in lengths), "snapshot alone"]
                figures.append(
                    Figure(
                        f"mixed-{_slug(run.root.resolve().name)}-{_slug(benchmark)}-{step}",
                        "Evaluation",
                        f"Mixed inference: {key} of {run.root.resolve().name} on {benchmark}",
                        "tokens that the snapshot writes",
                        "who begins",
                        [Series(key, 0, names, [])],
                        f"A snapshot writes the first L tokens and the policy of step {step} finishes, always {k} samples per "
                        f"problem. Policy alone: {alone:.3f}.",
                        kind="heat",
                        rows=[name for _, name in kinds],
                        cells=values,
                    )
                )
    return figures


def _ages(groups: Sequence[Group], key: str, ident: str, title: str, y: str, note: str) -> Figure | None:
    series = []
    for g, group in enumerate(groups):
        one = over(group, g, lambda run: {r["age"]: r[key] for r in run.ages}, name=group.name)
        if one is not None:
            rows = {r["age"]: 0 for run in group.runs for r in run.ages}
            for run in group.runs:
                for r in run.ages:
                    rows[r["age"]] += r["rows"]
            series.append(Series(one.name, one.group, one.x, one.y, one.lo, one.hi, 0, [rows[x] for x in one.x]))
    if not series:
        return None
    return Figure(ident, "Seeds", title, "age of the snapshot (iterations)", y, series, note, kind="points")


def _seed_lengths(groups: Sequence[Group]) -> Figure | None:
    series = []
    for g, group in enumerate(groups):
        one = over(group, g, lambda run: {round(r["share"], 2): r["reward"] for r in run.seed_lengths}, name=group.name)
        if one is not None:
            series.append(one)
    if not series:
        return None
    return Figure(
        "reward-by-seed-length",
        "Seeds",
        "Reward of seeded rows by seed length",
        "seed's share of the response (fraction)",
        "mean reward",
        series,
        "A response that ended early has a larger share of seed, whatever the cut was.",
        kind="points",
    )


def _time(groups: Sequence[Group]) -> Figure | None:
    stages = ("seed", "rollout", "score", "update")
    series = []
    for s, stage in enumerate(stages):
        totals = []
        for group in groups:
            per_run = [
                _mean([line["seconds"].get(stage, 0.0) for line in run.metrics]) for run in group.runs if run.metrics
            ]
            totals.append(_mean(per_run) if per_run else 0.0)
        if any(totals):
            series.append(Series(stage, s, [g.name for g in groups], totals))
    if not series:
        return None
    return Figure(
        "time",
        "Speed",
        "Where time went",
        "",
        "seconds per iteration",
        series,
        "Mean wall time of the stages of an iteration; stacked.",
        kind="bars",
    )


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _regions(key: str, *, whole: bool = True) -> list[_Curve]:
    found = [_Curve(f"{key}_seed", "seed"), _Curve(f"{key}_continuation", "continuation")]
    return [*found, _Curve(f"{key}_all", "all")] if whole else found


def all_figures(groups: Sequence[Group]) -> list[Figure]:
    """Every figure that the groups have data for, in reading order."""
    line = _training
    made: list[Figure | None] = [
        line(groups, "reward", "Reward", "Mean reward", "mean reward", [_Curve("reward", "all rows")]),
        line(
            groups,
            "reward-seeded",
            "Reward",
            "Mean reward of seeded and unseeded rows",
            "mean reward",
            [_Curve("reward_unseeded", "unseeded"), _Curve("reward_seeded", "seeded")],
            "Unseeded rows are the policy's own; seeded rows continue what a snapshot began.",
        ),
        line(
            groups,
            "zero-variance",
            "Reward",
            "Groups without signal",
            "share of groups",
            [_Curve("zero_variance_share", "zero variance")],
            "All rewards of the group are equal, so its advantages and gradient are zero.",
        ),
        line(
            groups,
            "entropy",
            "Entropy",
            "Entropy of the policy on unseeded rows",
            "nats per token",
            [_Curve("entropy", "entropy")],
        ),
        line(
            groups,
            "effective-entropy",
            "Entropy",
            "Effective entropy",
            "nats per token",
            [_Curve("effective_entropy", "effective")],
            "Mean entropy over the tokens that carry gradient: advantage not zero and not clipped (our definition).",
        ),
        line(
            groups,
            "entropy-regions",
            "Entropy",
            "Entropy by region",
            "nats per token",
            _regions("entropy", whole=False),
        ),
        line(
            groups,
            "clipped-mass",
            "Clipping",
            "Clipped mass: gradient lost to clipping",
            "share of Σ|w A|",
            _regions("clipped_mass"),
            "Share of the unclipped gradient weight that clipping removes.",
        ),
        line(groups, "clip-fraction", "Clipping", "Clipped tokens", "share of tokens", _regions("clip_fraction")),
        line(
            groups,
            "clip-sides",
            "Clipping",
            "Clipped tokens by sign of the advantage and side",
            "share of tokens",
            [
                _Curve("clip_fraction_positive_high_all", "A > 0, ratio high"),
                _Curve("clip_fraction_negative_low_all", "A < 0, ratio low"),
                _Curve("clip_fraction_negative_dual_all", "A < 0, dual clip"),
            ],
        ),
        _by_bin(
            groups,
            "clipped-mass-position",
            "Clipping",
            "Clipped mass by position",
            "share of Σ|w A|",
            "clipped_mass",
            "Ten bins of the response, mean over all optimizer steps.",
        ),
        line(
            groups,
            "ratio",
            "Importance ratios",
            "Mean importance ratio",
            "ratio",
            _regions("ratio_mean", whole=False),
        ),
        line(
            groups,
            "ratio-max",
            "Importance ratios",
            "Largest importance ratio",
            "ratio",
            _regions("ratio_max", whole=False),
        ),
        line(
            groups,
            "ess",
            "Importance ratios",
            "Effective sample size",
            "share of tokens",
            _regions("ess_share", whole=False),
            "(Σw)² / Σw² over the number of tokens, w the ratio to the policy that sampled the token.",
        ),
        _by_bin(
            groups,
            "ess-position",
            "Importance ratios",
            "Effective sample size by position",
            "share of tokens",
            "ess_share",
            "Ten bins of the response, mean over all optimizer steps.",
        ),
        line(
            groups,
            "kl",
            "Importance ratios",
            "KL to the behaviour policy (k3)",
            "nats per token",
            _regions("kl_k3", whole=False),
        ),
        _ages(
            groups,
            "advantage",
            "advantage-by-age",
            "Mean advantage of seeded rows by snapshot age",
            "mean advantage",
            "Below zero: seeds of that age lower the reward against the rest of their groups.",
        ),
        _ages(groups, "reward", "reward-by-age", "Reward of seeded rows by snapshot age", "mean reward", ""),
        _seed_lengths(groups),
    ]
    for benchmark in benchmarks(groups):
        made += [
            _pass_curves(groups, benchmark),
            _evaluation_over_training(groups, benchmark, "pass", f"pass-{_slug(benchmark)}", "pass@k"),
            _evaluation_over_training(
                groups, benchmark, "distinct", f"distinct-{_slug(benchmark)}", "distinct correct solutions"
            ),
            _difficulty(groups, benchmark),
        ]
    made += _mixed(groups)
    made += [
        line(groups, "length", "Length", "Response length", "tokens", [_Curve("response_length", "response")]),
        line(
            groups,
            "truncated",
            "Length",
            "Truncated responses",
            "share of rows",
            [_Curve("truncated_share", "truncated")],
        ),
        line(
            groups, "grad-norm", "Optimizer", "Gradient norm before clipping", "L2 norm", [_Curve("grad_norm", "mean")]
        ),
        line(
            groups,
            "mismatch",
            "Optimizer",
            "Engine against trainer",
            "max |Δ log-prob| (nats)",
            [_Curve("mismatch", "largest")],
            "Log-probs of the same tokens, as the engine sampled them and as the trainer recomputes them.",
        ),
        line(
            groups, "speed", "Speed", "Trained tokens per second", "tokens/s", [_Curve("tokens_per_second", "update")]
        ),
        _time(groups),
    ]
    return [f for f in made if f is not None]


@dataclass(frozen=True)
class Overview:
    """The table at the top: a header and one row per group; numbers are text, ready to show."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]] = field(default_factory=tuple)


def overview(groups: Sequence[Group]) -> Overview:
    """Per group: runs, iterations, reward at the end, entropy, clipped mass, pass@1 and pass@n before and after."""
    header = ["group", "runs", "iterations", "reward", "entropy (nats)", "clipped mass"]
    marks: list[tuple[str, int]] = []
    for benchmark in benchmarks(groups):
        ks = {r["k"] for g in groups for run in g.runs for r in evaluated(run, benchmark, "pass")}
        marks += [(benchmark, k) for k in sorted({min(ks), max(ks)})] if ks else []
    header += [f"{benchmark} pass@{k}" for benchmark, k in marks]
    rows = []
    for group in groups:
        lasts = [_tail(run) for run in group.runs if run.metrics]
        row = [group.name, str(len(group.runs)), "–".join(sorted({str(len(run.metrics)) for run in group.runs}))]
        for key in ("reward", "entropy", "clipped_mass_all"):
            row.append(_shown(spread([last.get(key) for last in lasts])))
        for benchmark, k in marks:
            before, after = [], []
            for run in group.runs:
                found = sorted(evaluated(run, benchmark, "pass", k=k), key=lambda r: r["policy_step"])
                if found:
                    before.append(found[0]["value"])
                    after.append(found[-1]["value"])
            row.append(f"{_shown(spread(before))} → {_shown(spread(after))}" if after else "–")
        rows.append(row)
    return Overview(header, rows)


def _tail(run: Run) -> dict[str, float | None]:
    """Means over the last fifth of the iterations."""
    lines = run.metrics[-max(1, len(run.metrics) // 5) :]
    out: dict[str, float | None] = {}
    for key in ("reward", "entropy", "clipped_mass_all"):
        values = [line[key] for line in lines if line.get(key) is not None]
        out[key] = _mean(values) if values else None
    return out


def _shown(value: tuple[float | None, float | None, float | None]) -> str:
    mean, _, hi = value
    if mean is None:
        return "–"
    return f"{mean:.3f}" if hi is None else f"{mean:.3f} ± {hi - mean:.3f}"
