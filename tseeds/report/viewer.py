"""The trajectory viewer: one page, over a server on this machine or as static files.

Static pages: FILE.html holds everything; a directory holds index.html and ``rows/*.js``, chunks that the page loads when a
row is looked at (as scripts, because a page opened from disk may not fetch).
"""

from __future__ import annotations

import html
import json
import logging
import re
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tseeds.artifacts.disk import make_directories, make_parent, refusals
from tseeds.artifacts.store import write_file
from tseeds.errors import UserError
from tseeds.report.page import as_json, asset, build
from tseeds.report.trajectories import RowSet, Trajectories

log = logging.getLogger(__name__)

CHUNK_ROWS = 100
INLINE_ROWS = 2000
"""A single file holds at most this many rows; more need a directory."""
_LIGHT = (
    *("n", "row_id", "problem_id", "group", "sample", "snapshot_step", "position", "seed_length", "length"),
    *("finish_reason", "verdict", "reward", "step", "advantage"),
)


def page(title: str, data: dict[str, Any], *, chunks: bool = False) -> str:
    """The viewer's page. data: {"mode": "server"} or the static bundle; chunks: it loads scripts of its own directory."""
    return build(
        title=f"{title} · tseeds view",
        style=asset("theme.css") + asset("view.css"),
        body=asset("view.html").replace("{title}", html.escape(title)),
        scripts=[asset("theme.js"), asset("view.js")],
        data=as_json(data),
        policy="'strict-dynamic'" if chunks else "",
    )


def write(path: Path, out: Path, *, limit: int = 0) -> Path:
    """Write a static page of everything at ``path``: one file (OUT ends in .html) or a directory. Returns the page.

    Raises:
        UserError: nothing to view, a damaged file, too many rows for one file, or nothing can be written there.
    """
    if out.is_file() and out.suffix != ".html":
        raise UserError(f"{out}: a file, no .html; name FILE.html or a new directory")
    source = Trajectories(path)
    about = source.about()
    if out.suffix == ".html":
        rows = sum(min(s["rows"], limit or s["rows"]) for s in about["sets"])
        if rows > INLINE_ROWS:
            raise UserError(
                f"{out}: {rows} rows are too many for one file (at most {INLINE_ROWS}); name a directory, or --limit"
            )
        bundle = _bundle(source, about, limit)
        bundle["rows"] = {s.id: [source.full(s, n) for n in range(_count(s, limit))] for s in source.sets.values()}
        make_parent(out)
        write_file(out, page(about["title"], bundle))
        return out
    index = out / "index.html"
    if out.exists() and any(out.iterdir()) and not index.is_file():
        raise UserError(f"{out}: holds other files; name a new directory")
    with refusals(out):
        make_directories(out / "rows")
    for s in source.sets.values():
        for k in range(-(-_count(s, limit) // CHUNK_ROWS)):
            numbers = range(k * CHUNK_ROWS, min((k + 1) * CHUNK_ROWS, _count(s, limit)))
            chunk = as_json([source.full(s, n) for n in numbers])
            file = out / "rows" / f"{_slug(s.id)}-{k:05d}.js"
            with refusals(file):
                file.write_text(f"window.tseedsChunk({as_json(s.id)},{k},{chunk});\n", encoding="utf-8")
    bundle = _bundle(source, about, limit) | {"chunk": CHUNK_ROWS, "files": {s: _slug(s) for s in source.sets}}
    write_file(index, page(about["title"], bundle, chunks=True))
    return index


def _count(s: RowSet, limit: int) -> int:
    return min(s.index.height, limit) if limit else s.index.height


def _bundle(source: Trajectories, about: dict[str, Any], limit: int) -> dict[str, Any]:
    """What a static page knows before it loads any row: the index by columns, and the problems' texts once."""
    index, problems = {}, {}
    for s in source.sets.values():
        frame = s.index.head(_count(s, limit))
        index[s.id] = {c: [None if isinstance(v, float) and v != v else v for v in frame[c].to_list()] for c in _LIGHT}
        problems[s.id] = dict(zip(s.texts["problem_id"].to_list(), s.texts["problem"].to_list(), strict=True))
    return {"mode": "static", "about": about, "index": index, "problems": problems}


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text)


def server(path: Path, *, port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers /, /api/about, /api/rows and /api/row; ``serve_forever`` runs it.

    Requests that name another host are refused, so that a page from elsewhere cannot read through a rebound name.

    Raises:
        UserError: nothing to view, or the port is taken.
    """
    source = Trajectories(path)
    title = source.path.resolve().name
    text = page(title, {"mode": "server"}).encode()
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):
                self._send(403, b"this server answers its own machine only", "text/plain")
                return
            where = urlsplit(self.path)
            query = dict(parse_qsl(where.query))
            answers: dict[str, Callable[[], Any]] = {
                "/api/about": source.about,
                "/api/rows": lambda: source.rows(query),
                "/api/row": lambda: source.row(query),
            }
            if where.path == "/":
                self._send(200, text, "text/html; charset=utf-8")
            elif where.path in answers:
                try:
                    with lock:
                        answer, status = answers[where.path](), 200
                except UserError as error:
                    answer, status = {"error": str(error)}, 400
                self._send(status, json.dumps(answer, ensure_ascii=False).encode(), "application/json; charset=utf-8")
            else:
                self._send(404, b"nothing here", "text/plain")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            log.info("%s", format % arguments)

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; choose another --port, or 0 for a free one") from None


def serve(path: Path, *, port: int, open_browser: bool, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; ``ready`` hears the address."""
    with server(path, port=port) as httpd:
        url = f"http://127.0.0.1:{httpd.server_address[1]}/"
        ready(url)
        if open_browser:
            webbrowser.open(url)
        with suppress(KeyboardInterrupt):
            httpd.serve_forever()
