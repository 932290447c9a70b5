"""Self-contained pages: everything inside one file, nothing fetched, data that cannot become code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def asset(name: str) -> str:
    """Text of a file that ships beside this module."""
    return (_HERE / name).read_text(encoding="utf-8")


def as_json(value: Any) -> str:
    """JSON that may stand inside a script element: no "<", so no tag can end or begin in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def build(
    *,
    title: str,
    style: str,
    body: str,
    scripts: list[str],
    data: str = "",
    policy: str = "",
    images: str = "data: blob:",
) -> str:
    """An HTML document that runs the given scripts and no other, and reaches nothing outside itself.

    data: JSON for the page (see as_json); policy: more sources for script-src; images: sources of img-src.
    """
    allowed = " ".join([*map(_hash, scripts), *([policy] if policy else [])])
    rule = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src {images}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        body,
        f'<script type="application/json" id="data">{data}</script>' if data else "",
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    return "\n".join(p for p in parts if p) + "\n"
