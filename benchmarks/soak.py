"""Kill -9 the running loop at seeded random moments, hundreds of times, and compare with a run that nobody disturbed.

    python benchmarks/soak.py 500 [--out soak] [--seed 0] [--backend transformers|vllm]

Every round is one run: killed at a random moment, started again, killed again, until it is finished; then every data
column, every weight and every line of metrics must equal the undisturbed run's. What each attempt left behind is compared
too. The killer is a process outside the loop. Results are appended to OUT/kills.jsonl, one line a round; started again it
goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

from equal import Reference, artifacts
from forked import KILLED, Forked
from toy_loop import loop_config

from tseeds.artifacts import store
from tseeds.toy import make


def main() -> int:
    """Run rounds until the number of kills is reached; exit status 1 when anything was lost, doubled or different."""
    parser = argparse.ArgumentParser(description="Kill the loop at random moments and compare.")
    parser.add_argument("kills", type=int, nargs="?", default=500)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--nice", type=int, default=10)
    arguments = parser.parse_args()
    os.nice(arguments.nice)
    out: Path = arguments.out
    make(out / "toy")
    config = loop_config(
        out / "toy",
        run={"iterations": 4},
        snapshot={"keep_last": 2, "keep_states": 1},
        engine={"backend": arguments.backend},
    )
    forked = Forked()
    whole = out / f"whole-{arguments.backend}"
    done = forked.run(config, whole)
    assert done["status"] == 0, done["error"]
    reference = Reference(whole)
    shutil.rmtree(out / "start", ignore_errors=True)
    attempt = forked.run(loop_config(out / "toy", run={"iterations": 1}), out / "start")["seconds"]
    record = out / "kills.jsonl"
    total = totals(record)
    while total["kills"] < arguments.kills:
        result = one_round(
            config, out / "round", forked, reference, random.Random(f"{arguments.seed} {total['rounds']}"), attempt
        )
        store.append_line(record, {**result, "backend": arguments.backend})
        total = totals(record)
        print(", ".join(f"{name} {value}" for name, value in total.items()), flush=True)
        if result["lines"]:
            print("\n".join(result["lines"]), flush=True)
            shutil.copytree(out / "round", out / f"wrong-{total['rounds']}", dirs_exist_ok=True)
    forked.close()
    return 1 if total["lost"] + total["doubled"] + total["different"] else 0


def one_round(
    config: dict, run: Path, forked: Forked, reference: Reference, rng: random.Random, attempt: float
) -> dict:
    """One run killed at random moments until it is finished. attempt: seconds from a start to the end of an iteration."""
    shutil.rmtree(run, ignore_errors=True)
    kills, wrong, begin, seen = 0, [], time.monotonic(), set()
    phases: dict[str, int] = {}
    while True:
        done = forked.run(config, run, kill_after=max(0.02, rng.uniform(0.0, 0.8 * attempt)))
        if done["status"] not in (0, KILLED):
            wrong.append(f"different: exit {done['status']}: {done['error'][-600:]}")
            break
        if done["status"] == 0:
            break
        kills += 1
        phase = interrupted(run)
        phases[phase] = phases.get(phase, 0) + 1
        have = set(artifacts(run)) if run.is_dir() else set()
        wrong += [f"{name}: lost after a kill" for name in seen - have]
        wrong += reference.differences(run, finished=False, only=have - seen)
        seen |= have
        if wrong:
            break
    if not wrong:
        wrong = reference.differences(run, finished=True)
    return {
        "kills": kills,
        "lost": sum("lost" in line for line in wrong),
        "doubled": sum("doubled" in line for line in wrong),
        "different": sum("lost" not in line and "doubled" not in line for line in wrong),
        "seconds": round(time.monotonic() - begin, 1),
        "phases": phases,
        "lines": wrong[:20],
    }


def interrupted(run: Path) -> str:
    """Which stage a killed run was in."""
    partial = next(iter(run.rglob("*.partial")), None) if run.is_dir() else None
    if partial is None:
        return "between"
    name = partial.name.removesuffix(".partial")
    return "snapshot" if name.startswith("step-") else "evaluate" if "evaluations" in partial.parts else name


def totals(record: Path) -> dict[str, int]:
    """Sums over all rounds so far."""
    lines = store.read_lines(record)
    return {
        "rounds": len(lines),
        **{name: sum(line[name] for line in lines) for name in ("kills", "lost", "doubled", "different")},
    }


if __name__ == "__main__":
    sys.exit(main())
