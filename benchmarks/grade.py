"""Rows per second of the grader, against math-verify one row after the other in the same run.

    just bench grade                 # needs the development data (TSEEDS_SHARED), prints a table
    python benchmarks/grade.py --json

Answers are made from real golds: each gold as it is and rewritten, plus another problem's gold as a wrong answer, boxed in a
sentence. "first time" has no pair twice; a training batch, where most answers of a group agree, is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

from tseeds.grading import Grader, GradingOptions

SETS = {
    "gsm8k": ("gsm8k_test.jsonl",),
    "math500": ("math500.jsonl",),
    "olympiadbench": ("olympiadbench_math_en.jsonl",),
    "mixed": ("gsm8k_test.jsonl", "math500.jsonl", "olympiadbench_math_en.jsonl", "minerva_math.jsonl", "amc23.jsonl"),
}


def answers(
    folder: Path, files: tuple[str, ...], *, rng: random.Random, limit: int | None = None
) -> list[tuple[str, str]]:
    """(gold, response) pairs: four responses per gold, a quarter of them wrong, in random order."""
    golds = [json.loads(line)["answer"] for name in files for line in (folder / name).open(encoding="utf-8")]
    pairs = []
    for at, gold in enumerate(golds):
        variants = (gold, gold.replace("\\frac", "\\dfrac"), f" {gold} \\text{{ units}}", rng.choice(golds))
        pairs += [(gold, f"Step {at}. So the answer is $\\boxed{{{variant}}}$.") for variant in variants]
    rng.shuffle(pairs)
    return pairs[:limit]


def serial_math_verify(pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """Seconds for all rows and for the worst one."""
    from math_verify import parse, verify

    parse("$\\frac{1}{2}$")
    worst, start = 0.0, time.perf_counter()
    for gold, text in pairs:
        begin = time.perf_counter()
        verify(parse(f"${gold}$"), parse(text))
        worst = max(worst, time.perf_counter() - begin)
    return time.perf_counter() - start, worst


def ours(pairs: list[tuple[str, str]], *, workers: int, repeats: int = 3) -> tuple[float, float]:
    """Best of a few runs: seconds for all rows with a fresh grader whose workers are up, and the worst row's seconds."""
    best, worst = float("inf"), 0.0
    for _ in range(repeats):
        with Grader(GradingOptions(workers=workers)) as grader:
            grader.grade([(f"{k}+x", f"\\boxed{{x+{k}}}") for k in range(64)])
            start = time.perf_counter()
            grades = grader.grade(pairs)
            best = min(best, time.perf_counter() - start)
            worst = max(worst, *(grade.wall_ms / 1000 for grade in grades))
    return best, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--baseline-rows", type=int, default=400, help="rows that math-verify grades")
    arguments = parser.parse_args()
    shared = Path(os.environ.get("TSEEDS_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    folder = shared / "data" / "bench"
    if not folder.is_dir():
        sys.exit(f"no development data at {folder} (set TSEEDS_SHARED)")
    results = []
    for name, files in SETS.items():
        rng = random.Random(0)
        pairs = list(dict.fromkeys(answers(folder, files, rng=rng)))
        sample = pairs[: arguments.baseline_rows]
        seconds, worst = serial_math_verify(sample)
        row = {
            "set": name,
            "rows": len(pairs),
            "math_verify_rows_s": len(sample) / seconds,
            "math_verify_worst_s": worst,
        }
        for workers in (1, 2):
            spent, slowest = ours(pairs, workers=workers)
            row[f"rows_s_{workers}"], row[f"worst_s_{workers}"] = len(pairs) / spent, slowest
        row["speedup_1"] = row["rows_s_1"] / row["math_verify_rows_s"]
        results.append(row)
        if not arguments.json:
            print(
                f"{name:14s} {row['rows']:6d} rows | math-verify {row['math_verify_rows_s']:7.0f} rows/s, worst {worst:.2f} s"
                f" | 1 worker {row['rows_s_1']:8.0f} rows/s ({row['speedup_1']:.0f}x), 2 workers {row['rows_s_2']:8.0f} rows/s,"
                f" worst {row['worst_s_2']:.2f} s",
                flush=True,
            )
    if arguments.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
