"""Make the pinned environment of a peer: python benchmarks/peers/make.py trl

The environment lies in benchmarks/peers/<peer>/ and holds exactly what <peer>.lock names.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Create and fill the environment named on the command line."""
    locks = {p.stem: p for p in HERE.glob("*.lock")}
    if len(sys.argv) != 2 or sys.argv[1] not in locks:
        raise SystemExit(f"name one of: {', '.join(sorted(locks))}")
    out = HERE / sys.argv[1]
    venv.create(out, with_pip=True, clear=True)
    pip = [str(out / "bin" / "python"), "-m", "pip", "install", "--no-deps", "-r", str(locks[sys.argv[1]])]
    raise SystemExit(subprocess.run(pip, check=False).returncode)


if __name__ == "__main__":
    main()
