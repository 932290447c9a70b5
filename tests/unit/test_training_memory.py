"""Memory that an update frees goes back to the machine when it ends."""

from __future__ import annotations

import psutil
import torch

from tseeds.training.memory import kept


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
