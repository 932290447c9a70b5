"""The commands that only look start at once."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["--help", "validate", "status", "show"])
def test_neither_torch_nor_vllm_is_imported(command: str, tmp_path: Path) -> None:
    args = {
        "--help": ["--help"],
        "validate": ["validate", str(ROOT / "pipelines/toy.toml")],
        "status": ["status", str(tmp_path)],
        "show": ["show", str(tmp_path)],
    }[command]
    code = (
        "import sys; sys.argv[1:] = " + repr(args) + "\n"
        "from tseeds_cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'ray', 'sympy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_help_in_half_a_second() -> None:
    """Processor time, which a busy machine stretches less than the clock: one thread starts, so it bounds an idle start."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tseeds_cli.main", "--help"], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5, times
