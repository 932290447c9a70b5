"""Fixtures for all tests: where the shared development data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Development data that is not part of the project; tests that need it skip where it is absent."""
    path = Path(os.environ.get("TSEEDS_SHARED", Path(__file__).parents[2] / "shared"))
    if not path.is_dir():
        pytest.skip(f"no development data at {path} (set TSEEDS_SHARED)")
    return path
