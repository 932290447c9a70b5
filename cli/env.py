"""``tseeds env``: versions and hardware for a bug report."""

from __future__ import annotations

import typer

from tseeds_cli.options import JsonOption


def env(as_json: JsonOption = False) -> None:
    """Print versions and hardware, to paste into a bug report."""
    import json
    import os
    import platform
    import shutil

    import psutil

    from tseeds.artifacts.store import versions

    facts = {
        **versions(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory_gb": f"{psutil.virtual_memory().total / 1e9:.1f}",
        "gpu": _gpus() if shutil.which("nvidia-smi") else "none",
    }
    typer.echo(json.dumps(facts) if as_json else "\n".join(f"{k:14} {v}" for k, v in facts.items()))


def _processor() -> str:
    import platform
    from pathlib import Path

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _gpus() -> str:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return "; ".join(done.stdout.strip().splitlines()) or f"nvidia-smi failed: {done.stderr.strip()[:80]}"
