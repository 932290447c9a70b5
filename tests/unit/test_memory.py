"""Memory that an update frees goes back to the machine when it ends."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import psutil
import torch

from tseeds.memory import kept, peak


def test_freed_memory_stays_inside_and_leaves_at_the_end():
    process = psutil.Process()
    before = process.memory_info().rss
    with kept():
        blocks = [torch.ones(8 * 2**20) for _ in range(16)]  # 512 MB
        del blocks
        inside = process.memory_info().rss
    after = process.memory_info().rss
    assert after - before < 100 * 2**20
    assert inside >= after


def test_peak_is_of_this_program_and_not_of_the_one_that_started_it():
    held = np.ones(2**26)  # 512 MB
    code = "from tseeds.memory import peak; print(peak())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert peak() > held.nbytes > child > 2**20
