"""Writes docs/claims.md, its figures and its tables from the records of ``tseeds compare``.

Verdicts follow one rule, so that nobody's hopes decide: a difference between two arms counts as shown when at least five
seeds have both and the 95 % interval of the paired difference lies on the claimed side of zero.

    python benchmarks/claims.py [--records docs/claims/records.jsonl] [--docs docs]
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tseeds.compare import Paired, by_arm, digest, essence, final, mean_sd, paired, read_records

ENOUGH = 5
"""Seeds that a verdict needs."""
MIXING = (
    "prefix_weight", "prefix_coef", "prefix_top_entropy", "prefix_cap", "advantage", "aggregation", "eps_high",
    "dual_clip", "ratio", "drop_degenerate", "kl_coef", "kl_reference", "kl_sampler", "entropy_coef",
)  # fmt: skip
"""Keys of [update] in which arms may differ, beside all of [seed]."""
SENSITIVE = ("run.iterations", "update.learning_rate", "update.minibatches", "snapshot.every")
"""Keys in which the pipelines of sensitivity/ differ too."""
FACTORS: dict[str, dict[str, str]] = {
    "seeded share": {"0": "on-policy", "0.25": "seeds-quarter", "0.5": "seeds", "0.5, falling to 0": "seeds-annealed"},
    "cut of the chain": {
        "5-25 %": "seeds-short", "0-50 %": "seeds", "20-80 %": "seeds-late", "steered to a pass rate of 0.5": "seeds-target",
    },
    "who writes": {
        "any snapshot": "seeds", "recent snapshots": "seeds-recent", "the initial policy": "base-only",
        "the current policy": "current", "the current policy, temperature 1.3": "hot-current",
    },
    "snapshot every": {"5 iterations": "seeds", "20 iterations": "seeds-sparse"},
    "baseline": {"whole group": "seeds", "split": "seeds-split"},
    "optimizer steps per iteration": {"4": "seeds", "2": "seeds-two-minibatches"},
    "learning rate, with seeds": {"5e-5": "seeds-lr-5e-5", "1e-4": "seeds", "2e-4": "seeds-lr-2e-4"},
    "learning rate, on-policy": {"5e-5": "on-policy-lr-5e-5", "1e-4": "on-policy", "2e-4": "on-policy-lr-2e-4"},
    "learning rate, KL 0.03": {
        "5e-5": "kl-snapshots-lr-5e-5", "1e-4": "kl-snapshots", "2e-4": "kl-snapshots-lr-2e-4",
    },
    "learning rate, KL 0.1": {"1e-4": "kl-snapshots-strong", "2e-4": "kl-snapshots-strong-lr-2e-4"},
    "learning rate, seeds and KL 0.03": {
        "5e-5": "seeds-kl-lr-5e-5", "1e-4": "seeds-kl", "2e-4": "seeds-kl-lr-2e-4",
    },
    "learning rate, seeds and KL 0.1": {"1e-4": "seeds-kl-strong", "2e-4": "seeds-kl-strong-lr-2e-4"},
    "seeded share at 5e-5": {
        "0": "on-policy-lr-5e-5", "0.25": "seeds-quarter-lr-5e-5", "0.5": "seeds-lr-5e-5",
        "0.5, falling to 0": "seeds-annealed-lr-5e-5", "0.5 by the current policy, temperature 1.3": "hot-current-lr-5e-5",
    },
    "iterations at 5e-5, on-policy": {"120": "on-policy-lr-5e-5", "240": "on-policy-lr-5e-5-long"},
    "iterations at 5e-5, with seeds": {"120": "seeds-lr-5e-5", "240": "seeds-lr-5e-5-long"},
    "KL to a snapshot at 5e-5, 240 iterations": {
        "none": "on-policy-lr-5e-5-long", "0.01": "kl-snapshots-weak-lr-5e-5-long", "0.03": "kl-snapshots-lr-5e-5-long",
    },
    "iterations at 5e-5, KL 0.03": {"120": "kl-snapshots-lr-5e-5", "240": "kl-snapshots-lr-5e-5-long"},
    "seeded share at 5e-5, 240 iterations": {
        "0": "on-policy-lr-5e-5-long", "0.25": "seeds-quarter-lr-5e-5-long", "0.5": "seeds-lr-5e-5-long",
        "0.5, falling to 0": "seeds-annealed-lr-5e-5-long",
        "0.5 by the current policy, temperature 1.3": "hot-current-lr-5e-5-long",
    },
    "weight of seed tokens": {
        "clip": "seeds", "clip, no dual clip": "seeds-no-dual-clip", "clip on the seed alone": "seeds-clip-only",
        "clip on the fifth of highest entropy": "seeds-entropy", "mask": "seeds-mask", "decoupled": "seeds-decoupled",
        "truncate": "seeds-truncate", "shape": "seeds-shape", "band": "seeds-band", "topr": "seeds-topr",
        "on_policy": "seeds-on-policy",
    },
    "KL to a snapshot": {
        "none": "on-policy", "0.01": "kl-snapshots-weak", "0.03": "kl-snapshots", "0.1": "kl-snapshots-strong",
        "0.03, recent": "kl-snapshots-recent", "0.03, the initial policy": "kl-snapshots-first", "0.03, with seeds": "seeds-kl",
        "0.1, with seeds": "seeds-kl-strong", "0.03, with seeds as context only": "seeds-mask-kl",
    },
    "seeds and KL 0.03": {
        "snapshots": "seeds-kl", "snapshots, share falling to 0": "seeds-kl-annealed",
        "snapshots, share falling to 0.25": "seeds-kl-half-annealed",
        "snapshots, share falling to 0, KL 0.1": "seeds-kl-strong-annealed",
        "snapshots, temperature 1.3": "seeds-kl-hot",
        "snapshots, temperature 1.3, share falling to 0": "seeds-kl-hot-annealed",
        "the current policy, temperature 1.3": "hot-current-kl",
    },
}  # fmt: skip
"""What the screening varies: factor -> value -> arm; everything else is as in arm seeds."""
TITLES = {
    "pass@1": "pass@1",
    "pass@4": "pass@4",
    "pass@16": "pass@16",
    "pass@64": "pass@64",
    "distinct": "distinct correct",
    "entropy": "entropy",
    "effective_entropy": "effective entropy",
    "clipped_mass_all": "gradient lost to clipping",
    "clipped_mass_seed": "of it on off-policy tokens",
    "probe_norm_ratio": "true norm ratio",
    "zero_variance_share": "groups without signal",
}
TABLE = tuple(TITLES)
FIRST = (
    "on-policy", "kl-snapshots", "seeds", "naive-replay", "whole-equal", "suffix", "seeds-mask", "seeds-kl",
    "kl-snapshots-strong", "base-only",
)  # fmt: skip
"""Arms that come first, and those that the figures draw."""
METRICS_TESTED = ("pass@1", "pass@16", "pass@64", "distinct", "entropy", "effective_entropy", "clipped_mass_all")


@dataclass(frozen=True)
class Check:
    """``arm`` is above (or below) ``other`` in ``metric``."""

    metric: str
    arm: str
    other: str
    above: bool = True

    @property
    def text(self) -> str:
        """For the table."""
        return f"{TITLES[self.metric]}: {self.arm} {'>' if self.above else '<'} {self.other}"


@dataclass(frozen=True)
class Claim:
    """What is claimed, and the differences that must all be shown for it."""

    title: str
    text: str
    checks: tuple[Check, ...]
    figure: str | None = None


_OFF_POLICY = ("naive-replay", "remix", "exgrpo", "luffy", "prefixrl", "pros")
_ON_POLICY = ("on-policy", "grpo", "dapo", "dr-grpo")
CLAIMS = (
    Claim(
        "Better than on-policy training and than existing off-policy mixing",
        "A claim of the paper's abstract. Both pass@1 and pass@16 must be better for it.",
        tuple(Check(m, "seeds", o) for o in (*_ON_POLICY, *_OFF_POLICY) for m in ("pass@1", "pass@16")),
        "pass-at-k",
    ),
    Claim(
        "Higher effective entropy",
        "A claim of the abstract; effective entropy as docs/loss.md defines it, for the paper's definition is unknown to us.",
        tuple(Check("effective_entropy", "seeds", o) for o in ("on-policy", "naive-replay", "kl-snapshots")),
        "effective-entropy",
    ),
    Claim(
        "Less gradient lost to clipping than whole-trajectory mixing",
        "A claim of the abstract: in total, at the same share of seeded rows and at equal off-policy tokens, and per "
        "off-policy token.",
        (
            Check("clipped_mass_all", "seeds", "naive-replay", above=False),
            Check("clipped_mass_all", "seeds", "whole-equal", above=False),
            Check("clipped_mass_seed", "seeds", "naive-replay", above=False),
        ),
        "clipped-mass",
    ),
    Claim(
        "A wider solution space",
        "A claim of the abstract: more problems solved within 64 tries, more distinct correct solutions.",
        tuple(Check(m, "seeds", o) for o in ("on-policy", "naive-replay") for m in ("pass@64", "distinct")),
        "pass-at-k",
    ),
    Claim(
        "The beginning is the right place",
        "Snapshots write the beginning (seeds), the end (suffix) or everything in fewer rows (whole-equal): an eighth of "
        "all response tokens in each.",
        tuple(Check(m, "seeds", o) for o in ("suffix", "whole-equal") for m in ("pass@1", "pass@16")),
        "pass-at-k",
    ),
    Claim(
        "It is the seeds, not a trust region",
        "Our control: on-policy training with a KL term to the same old snapshots has no seeds. A claim for seeds is a "
        "claim against it.",
        tuple(Check(m, "seeds", "kl-snapshots") for m in ("pass@1", "pass@16", "pass@64")),
        "pass-at-k",
    ),
    Claim(
        "It is history, not mere diversity",
        "Seeds by the current policy, by the hotter current policy, and by the initial policy alone.",
        tuple(Check("pass@16", "seeds", o) for o in ("current", "hot-current", "base-only")),
        "pass-at-k",
    ),
    Claim(
        "The recommended pipeline has both, pass@1 and reach",
        "Ours: a quarter of each group seeded, learning rate 5e-5, 240 iterations (`pipelines/thinking-seeds.toml`) against the "
        "arms without snapshots as writers of that rate and length.",
        tuple(
            Check(m, "seeds-quarter-lr-5e-5-long", f"{o}-lr-5e-5-long")
            for o in ("on-policy", "kl-snapshots-weak", "kl-snapshots", "hot-current")
            for m in ("pass@1", "pass@16", "pass@64")
        ),
        "frontier",
    ),
    Claim(
        "Training longer, seeds keep what on-policy training loses",
        "Ours: half of each group seeded, at learning rate 5e-5, after 240 iterations instead of 120.",
        tuple(
            Check(m, "seeds-lr-5e-5-long", f"{o}-lr-5e-5-long")
            for o in ("on-policy", "kl-snapshots", "hot-current")
            for m in ("pass@1", "pass@16", "pass@64")
        ),
        "frontier",
    ),
)


def setup_of(record: Mapping[str, Any]) -> str:
    """Digest of everything but the mixing and the seed: records of one setup may be compared."""
    allowed = {f"update.{k}" for k in MIXING} | {"run.seed", *SENSITIVE}
    kept = essence(record["values"])
    return digest({k: v for k, v in kept.items() if k not in allowed and not k.startswith("seed.")})


def setups(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Records by setup, the largest first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault(setup_of(record), []).append(record)
    return sorted(found.values(), key=len, reverse=True)


def arms_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arms in the order of the tables."""
    arms = {r["arm"] for r in records}
    return [a for a in FIRST if a in arms] + sorted(arms - set(FIRST))


def outcome(check: Check, records: Sequence[Mapping[str, Any]]) -> tuple[str, Paired | None]:
    """(shown | contradicted | no difference | not yet measured, the test)."""
    values = by_arm(records, check.metric)
    test = paired(values.get(check.arm, {}), values.get(check.other, {}))
    if test is None or test.seeds < ENOUGH:
        return "not yet measured", test
    low, high = (test.low, test.high) if check.above else (-test.high, -test.low)
    return ("shown" if low > 0 else "contradicted" if high < 0 else "no difference"), test


def verdict(outcomes: Sequence[str]) -> str:
    """One word for a claim from its checks.

    >>> verdict(["shown", "shown"]), verdict(["shown", "contradicted"]), verdict(["no difference"])
    ('shown', 'mixed', 'not shown')
    >>> verdict(["shown", "not yet measured"]), verdict(["shown", "contradicted", "not yet measured"])
    ('not yet measured', 'mixed so far')
    """
    measured = [o for o in outcomes if o != "not yet measured"]
    if len(measured) < len(outcomes):
        return "not yet measured" if all(o == "shown" for o in measured) else f"{verdict(measured)} so far"
    if all(o == "shown" for o in outcomes):
        return "shown"
    return "mixed" if "shown" in outcomes else "not shown"


def number(value: float | None, digits: int = 3) -> str:
    """Short decimal, a dash for nothing."""
    return "–" if value is None else f"{value:.{digits}f}"


def cell(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    mean, sd = mean_sd(values)
    return number(mean) if sd is None else f"{number(mean)} ± {number(sd)}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(r)} |" for r in (header, ["---"] * len(header), *rows)]


def final_table(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row per arm: seeds, then mean ± sd of every metric."""
    mixing = [r for r in records if r["values"]["seed.share"] > 0]  # the others have no off-policy tokens
    by_metric = {m: by_arm(mixing if m.endswith("_seed") else records, m) for m in TABLE}
    rows = []
    for arm in arms_of(records):
        seeds = {r["seed"] for r in records if r["arm"] == arm}
        rows.append([arm, str(len(seeds)), *(cell(list(by_metric[m].get(arm, {}).values())) for m in TABLE)])
    return rows


def paired_table(records: Sequence[Mapping[str, Any]], other: str) -> list[list[str]]:
    """One row per arm: seeds in common with ``other``, then difference and 95 % interval of every tested metric."""
    rows = []
    values = {m: by_arm(records, m) for m in METRICS_TESTED}
    for arm in arms_of(records):
        tests = [paired(values[m].get(arm, {}), values[m].get(other, {})) for m in METRICS_TESTED]
        known = [t for t in tests if t is not None]
        if arm != other and known:
            shown = ["–" if t is None else f"{t.mean:+.3f} [{t.low:+.3f}, {t.high:+.3f}]" for t in tests]
            rows.append([arm, str(known[0].seeds), *shown])
    return rows


def configuration_file(arm: str) -> Path:
    """The pipeline file of an arm."""
    pipelines = Path(__file__).parents[1] / "pipelines"
    return next(iter(sorted(pipelines.glob(f"*/{arm}.toml"))), pipelines / f"{arm}.toml")


def sensitivity(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of all factors: one line per value whose arm has run, with its paired difference to arm seeds."""
    metrics = ("pass@1", "pass@16", "pass@64")
    values = {m: by_arm(records, m) for m in metrics}
    rows = []
    for factor, levels in FACTORS.items():
        known = {level: arm for level, arm in levels.items() if values["pass@1"].get(arm)}
        for level, arm in known.items() if len(known) > 1 else ():
            tests = [paired(values[m][arm], values[m].get("seeds", {})) for m in metrics]
            differences = [
                "–" if arm == "seeds" or t is None else f"{t.mean:+.3f} ± {(t.high - t.low) / 2:.3f}" for t in tests
            ]
            finals = [cell(list(values[m][arm].values())) for m in metrics]
            rows.append([factor, level, str(len(values["pass@1"][arm])), *finals, *differences])
    if not rows:
        return []
    header = ["factor", "value", "seeds", *metrics, *(f"{m} less `seeds`" for m in metrics)]
    note = "Differences are paired by seed, with half of their 95 % interval."
    return ["## Sensitivity", "", note, "", *markdown(header, rows), ""]


def facts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was run on what, as a list."""
    base = next((r for r in records if r["arm"] == "on-policy"), records[0])
    v = base["values"]
    benchmark = next(iter(records[0]["evaluations"].get("0", {}).values()), {})
    seeds = sorted({r["seed"] for r in records})
    cpu = [r["cpu_s"] for r in records if r["cpu_s"]]
    sampled = [
        r["tokens"]["sampled"] / max(1, r["tokens"]["trained"]) for r in records if r["values"]["seed.share"] > 0
    ]
    machines = sorted({r["machine"] for r in records})
    versions = records[0]["versions"]
    lines = [
        f"{len(records)} runs: {len(arms_of(records))} arms, seeds {', '.join(map(str, seeds))} "
        "(not every arm has every seed; the tables say how many).",
        f"{base['iterations']} iterations of {v['rollout.problems_per_iteration']} problems x "
        f"{v['rollout.group_size']} responses, {v['update.minibatches']} minibatches, {v['update.epochs']} epoch, learning "
        f"rate {v['update.learning_rate']:g}, clip {v['update.eps_low']:g}/{v['update.eps_high']:g} where an arm does not "
        f"change it, a snapshot every {v['snapshot.every']} iterations. Every arm starts from the same policy, sees the "
        "same problems in the same order for a seed, and trains on the same number of responses (`-long`: twice as many).",
        f"Evaluation without seeds: {benchmark.get('problems', '?')} held-out problems x {v['evaluate.samples']} samples at "
        f"temperature {v['evaluate.temperature']:g}. Entropies, clipped mass and the like: mean over the last fifth of the "
        "iterations.",
        f"Machine: {'; '.join(machines)}. Sampling: {v['engine.backend']}. torch {versions.get('torch')}, transformers "
        f"{versions.get('transformers')}.",
    ]
    if benchmark:
        start = {k: benchmark[k] for k in ("pass@1", "pass@4", "pass@16", "pass@64", "distinct") if k in benchmark}
        lines.append("Start: " + ", ".join(f"{k} {number(x)}" for k, x in start.items()) + ".")
    if cpu:
        lines.append(f"CPU time of a run: {min(cpu):.0f} to {max(cpu):.0f} s, mean {sum(cpu) / len(cpu):.0f} s.")
    if sampled:
        lines.append(
            f"Seeded arms sample {min(sampled):.2f} to {max(sampled):.2f} tokens for each token trained on, for a live seed's "
            "chain is written whole before it is cut; on-policy arms sample 1. Tokens in the loss are equal, generation is not."
        )
    return [f"- {line}" for line in lines]


def claim_sections(records: Sequence[Mapping[str, Any]], figures: Mapping[str, str]) -> list[str]:
    """Every claim with its verdict, its checks and its figure."""
    lines: list[str] = []
    for claim in CLAIMS:
        results = [(check, *outcome(check, records)) for check in claim.checks]
        lines += [f"### {claim.title}: {verdict([o for _, o, _ in results])}", "", claim.text, ""]
        rows = []
        for check, word, test in results:
            if test is None:
                rows.append([check.text, "fewer than 2", "–", "–", word])
            else:
                interval = f"{test.mean:+.3f} [{test.low:+.3f}, {test.high:+.3f}]"
                rows.append([check.text, str(test.seeds), interval, f"{test.p_t:.3f} / {test.p_sign:.3f}", word])
        lines += markdown(["check", "seeds", "difference [95 % interval]", "p (t / sign flips)", "outcome"], rows)
        if claim.figure in figures:
            lines += ["", f"![{claim.title}]({figures[claim.figure]})"]
        lines.append("")
    return lines


def document(
    groups: Sequence[Sequence[Mapping[str, Any]]], figures: Mapping[str, str], reading: str, mixed: Sequence[str]
) -> str:
    """docs/claims.md."""
    lines = [
        "# The claims, reproduced",
        "",
        "Written by `just claims` from `docs/claims/records.jsonl` (one line per finished run; runs recorded there are not run "
        "again). Every arm is a file of `pipelines/arms/`: `pipelines/claims.toml` and its way of mixing, nothing else; those of "
        "`pipelines/sensitivity/` change the learning rate, the minibatches, the snapshots' spacing or the iterations, as their "
        "names say. "
        f"A verdict needs {ENOUGH} seeds and an interval of the paired difference clear of zero; below that the numbers are "
        "shown and the verdict is *not yet measured*. Intervals are not corrected for the number of comparisons.",
        "",
    ]
    if reading:
        lines += ["## Reading", "", reading.strip(), ""]
    if not groups:
        return "\n".join([*lines, "No run is recorded yet.", ""])
    for number_, records in enumerate(groups):
        main = number_ == 0
        values = records[0]["values"]
        task, rate = (values.get(k) for k in ("problems.task", "update.learning_rate"))
        other = f"## Other setup {number_}: task {task}, learning rate {rate}"
        lines += ["## What was run" if main else other, "", *facts(records), ""]
        if main:
            lines += ["## Verdicts", "", *claim_sections(records, figures), *sensitivity(records), "## All arms", ""]
        header = ["arm", "seeds", *TITLES.values()]
        lines += [*markdown(header, final_table(records)), ""]
        if main:
            lines += [
                "True norm ratio: norm of the gradient with clipping over that without, on a probe batch; 1 means that nothing "
                "is lost. Gradient lost to clipping: share of |weight x advantage| on clipped tokens, without the gradients "
                "themselves.",
                "",
            ]
        for other in ("on-policy", "kl-snapshots"):
            rows = paired_table(records, other)
            if rows:
                header = ["arm", "seeds", *(TITLES[m] for m in METRICS_TESTED)]
                lines += [f"### Difference to {other}, paired by seed", "", *markdown(header, rows), ""]
        if main:
            shown = [f"![{name}]({path})" for name, path in figures.items()]
            lines += ["## Over training", "", *shown, "", "## Mixed inference", "", *mixed]
    return "\n".join(lines)


def _curve(records: Sequence[Mapping[str, Any]], name: str, window: int) -> list[tuple[float, float, float]]:
    """(iteration, mean, half the spread) over seeds, smoothed by a running mean."""
    curves = [r["curves"][name] for r in records if name in r["curves"]]
    points = []
    for i in range(min(map(len, curves), default=0)):
        rows = [[v for v in c[max(0, i - window + 1) : i + 1] if v is not None] for c in curves]
        means = [sum(r) / len(r) for r in rows if r]
        if means:
            mean, sd = mean_sd(means)
            points.append((i + 1, mean, sd or 0.0))
    return points


def draw(records: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Figures as SVG, the same bytes for the same records; returns name -> path relative to docs."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "tseeds", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot

    arms = [a for a in arms_of(records) if a in FIRST]
    colours = {a: pyplot.get_cmap("tab10")(FIRST.index(a)) for a in arms}
    written: dict[str, str] = {}

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
        written[name] = f"{folder.name}/{name}.svg"

    for metric, title in (
        ("reward_unseeded", "reward of unseeded rows"),
        ("entropy", "entropy of unseeded rows (nats)"),
        ("effective_entropy", "effective entropy (nats)"),
        ("clipped_mass_all", "gradient lost to clipping"),
        ("probe_norm_ratio", "true norm ratio"),
    ):
        if not any(metric in r["curves"] for r in records):
            continue
        figure, axes = pyplot.subplots(figsize=(5.5, 3.2))
        for arm in arms:
            mine = [r for r in records if r["arm"] == arm]
            points = _curve(mine, metric, window=10 if metric != "probe_norm_ratio" else 1)
            if points:
                x, y, s = zip(*points, strict=True)
                axes.plot(x, y, label=f"{arm} ({len(mine)})", color=colours[arm], linewidth=1.3)
                axes.fill_between(
                    x,
                    [a - b for a, b in zip(y, s, strict=True)],
                    [a + b for a, b in zip(y, s, strict=True)],
                    color=colours[arm],
                    alpha=0.12,
                    linewidth=0,
                )
        axes.set_xlabel("iteration")
        axes.set_ylabel(title)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        save(figure, metric.replace("_all", "").replace("_unseeded", "").replace("_", "-"))

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2))
    ks = sorted(
        {
            int(m[1])
            for r in records
            for b in r["evaluations"].values()
            for e in b.values()
            for k in e
            if (m := re.fullmatch(r"pass@(\d+)", k))
        }
    )
    for arm in arms:
        values = {k: list(by_arm(records, f"pass@{k}").get(arm, {}).values()) for k in ks}
        known = [k for k in ks if values[k]]
        if known:
            spread = [mean_sd(values[k]) for k in known]
            axes.errorbar(
                known, [m for m, _ in spread], [s or 0.0 for _, s in spread], label=f"{arm} ({len(values[known[0]])})",
                color=colours[arm], linewidth=1.3, capsize=2,
            )  # fmt: skip
    start = [next(iter(r["evaluations"]["0"].values())) for r in records if "0" in r["evaluations"]]
    known = [k for k in ks if start and f"pass@{k}" in start[0]]
    if known:
        mean = [sum(e[f"pass@{k}"] for e in start) / len(start) for k in known]
        axes.plot(known, mean, color="0.6", linestyle="--", linewidth=1, label="start")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k on held-out problems")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "pass-at-k")

    figure, axes = pyplot.subplots(figsize=(6.5, 4.5))
    finals = {m: by_arm(records, m) for m in ("pass@1", "pass@16")}
    for arm in arms_of(records):
        x, y = (list(finals[m].get(arm, {}).values()) for m in ("pass@1", "pass@16"))
        if min(len(x), len(y)) >= ENOUGH:
            values = next(r["values"] for r in records if r["arm"] == arm)
            kind = "tab:orange" if values["seed.share"] > 0 else "tab:blue"
            point = (mean_sd(x)[0], mean_sd(y)[0])
            axes.scatter(*point, s=14, color=kind, marker="o" if values["update.learning_rate"] == 1e-4 else "^")
            axes.annotate(arm, point, xytext=(3, 2), textcoords="offset points", fontsize=5)
    axes.set_xlabel(f"pass@1, mean of at least {ENOUGH} seeds")
    axes.set_ylabel("pass@16")
    axes.set_title("orange: off-policy tokens, blue: none; triangles: another learning rate than 1e-4", fontsize=7)
    save(figure, "frontier")
    return written


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One row per run: arm, seed, setup, final value of every metric of the table, cost."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(["setup", "arm", "seed", "iterations", *TABLE, "tokens_trained", "tokens_sampled", "cpu_s"])
        for r in sorted(records, key=lambda r: (setup_of(r), r["arm"], r["seed"])):
            values = [final(r, m) for m in TABLE]
            writer.writerow(
                [setup_of(r), r["arm"], r["seed"], r["iterations"]]
                + ["" if v is None else f"{v:.5g}" for v in values]
                + [r["tokens"]["trained"], r["tokens"]["sampled"], r["cpu_s"]]
            )


def keep_mixed(run: Path, file: Path) -> None:
    """Copy the cells of the newest mixed inference of a run into ``file``, where the run has one."""
    grids = sorted(run.glob("mixed/*/*/manifest.json"))
    if grids:
        manifest = json.loads(grids[-1].read_text())
        cells = [{k: v for k, v in cell.items() if k != "ci"} for cell in manifest["facts"]["cells"]]
        kept = {"run": f"{run.parent.name}, {run.name}", "step": manifest["config"]["step"], "cells": cells}
        file.write_text(json.dumps(kept, indent=1) + "\n")


def mixed_section(file: Path) -> list[str]:
    """pass@k when snapshots write the first L tokens and the final policy finishes."""
    if not file.is_file():
        return ["Not yet measured.", ""]
    data = json.loads(file.read_text())
    ks = [f"pass@{k}" for k in (1, 4, 16, 64) if f"pass@{k}" in data["cells"][0]]
    rows = []
    for cell_ in data["cells"]:
        length, step = cell_["seed_length"], cell_["snapshot_step"]
        who = (
            "final policy alone"
            if length == 0
            else "snapshot alone"
            if length < 0
            else f"snapshot, first {length} tokens"
        )
        lag = "–" if length == 0 else "all, mixed" if step is None else str(cell_["lag"])
        rows.append([who, lag, *(number(cell_[k]) for k in ks), number(cell_["distinct"], 2)])
    first = data["cells"][0]
    return [
        f"Run {data['run']}, policy of step {data['step']}; {first['problems']} held-out problems x {first['samples']} samples "
        "in every row. Lag: iterations between snapshot and final policy; a row of all lags takes an equal part of its samples "
        "from every snapshot. One run: no spread, no verdict.",
        "",
        *markdown(["beginning by", "lag", *ks, "distinct"], rows),
        "",
    ]


def write(records: Path, docs: Path, mixed: Path | None = None) -> Path:
    """Everything; returns the page. mixed: an on-policy run on which mixed inference was measured."""
    folder = docs / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    grid = folder / "mixed.json"
    if mixed is not None:
        keep_mixed(mixed, grid)
    newest = {(setup_of(r), r["arm"], r["seed"]): r for r in read_records(records)}
    groups = setups(list(newest.values()))
    figures = draw(groups[0], folder) if groups else {}
    write_csv(folder / "runs.csv", list(newest.values()))
    reading = folder / "reading.md"
    page = docs / "claims.md"
    text = document(groups, figures, reading.read_text() if reading.is_file() else "", mixed_section(grid))
    page.write_text(text, encoding="utf-8")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=Path("docs/claims/records.jsonl"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--mixed", type=Path, help="run directory in which tseeds evaluate --mixed has run")
    arguments = parser.parse_args()
    print(write(arguments.records, arguments.docs, arguments.mixed))
