"""Easy word problems of one step for a small language model: python benchmarks/words.py [DIR]

Writes train.jsonl (256 problems) and test.jsonl (64), the same every time; no problem is in both. A model of 135 M parameters
that solves no problem of SVAMP solves some of these, so that there is something to learn from.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NAMES = ("Tom", "Ann", "Sam", "Eva", "Max", "Lea", "Ben", "Ida")
THINGS = ("apples", "pens", "books", "coins", "cards", "eggs", "stamps", "shells")


def problems(number: int, seed: int = 0) -> list[dict[str, str]]:
    """``number`` different problems: two numbers of 1 to 9 are added, or the smaller taken from the larger."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < number:
        a, b, name, thing = rng.randint(2, 9), rng.randint(1, 9), rng.choice(NAMES), rng.choice(THINGS)
        if a > b and rng.random() < 0.5:
            found[f"{name} has {a} {thing} and gives {b} away. How many {thing} are left?"] = str(a - b)
        else:
            found[f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"] = str(a + b)
    return [{"id": f"words-{k}", "problem": p, "answer": g} for k, (p, g) in enumerate(found.items())]


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "models/words")
    out.mkdir(parents=True, exist_ok=True)
    made = problems(320)
    for name, rows in (("test", made[:64]), ("train", made[64:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(out)
