"""The estimate against the peak memory and the files of a real update in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/estimate.py"


def test_estimate_agrees_with_a_real_update(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("estimate_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.make_small(tmp_path / "policy")
    result = bench.compare(
        bench.pipeline(str(tmp_path / "policy"), "float32", problems=2, group=4, prompt=64, response=64, tokens=384)
    )
    # less the libraries' constant, so that the parts which depend on the model must be right too
    constant = result["parts"]["libraries"]
    estimated, measured = result["estimated_peak"], result["measured_peak"]
    assert abs(estimated / measured - 1) < 0.2
    assert abs((estimated - constant) / (measured - constant) - 1) < 0.4
    assert result["estimated_files"] == result["measured_files"]
