"""A Hugging Face hub on loopback that can be read: as much of its API as a download speaks (info, tree, resolve). For tests."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@dataclass
class SmallHub:
    """What it holds, and what it was asked."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """`datasets/org/name` or `models/org/name` -> path -> content"""
    lies: set[str] = field(default_factory=set)
    """Paths whose content arrives with a byte changed."""
    gated: dict[str, str] = field(default_factory=dict)
    """`models/org/name` -> the token that it wants"""
    fetched: list[str] = field(default_factory=list)
    """Paths of contents that were sent."""
    parts: list[tuple[str, int]] = field(default_factory=list)
    """Path and bytes of those of which only a part was asked."""


class _Handler(BaseHTTPRequestHandler):
    hub: SmallHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._resolve(body=False)

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if not path.startswith("/api/"):
            self._resolve(body=True)
            return
        kind, org, name, *rest = [*path.removeprefix("/api/").split("/"), "", ""]
        repo = self.hub.files.get(f"{kind}/{org}/{name}")
        if self._is_shut(f"{kind}/{org}/{name}"):
            self._refuse()
        elif repo is None:
            self._send(
                json.dumps({"error": "Repository not found"}).encode(), status=404, headers={"X-Error-Code": "RepoNotFound"}
            )
        elif rest[:1] == ["tree"]:
            self._send(json.dumps([_entry(path, content) for path, content in repo.items()]).encode())
        else:
            self._send(json.dumps({"id": f"{org}/{name}", "sha": COMMIT, "siblings": []}).encode())

    def _resolve(self, *, body: bool) -> None:
        path = unquote(self.path.split("?")[0]).lstrip("/")
        repo, _, rest = path.partition("/resolve/")
        repo = repo if repo.startswith("datasets/") else f"models/{repo}"
        file = rest.partition("/")[2]
        if self._is_shut(repo):
            self._refuse()
            return
        content = self.hub.files.get(repo, {}).get(file)
        if content is None:
            self._send(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        entry = _entry(file, content)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]  # type: ignore[index]
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if body and part:
            piece = content[int(part[1]) : int(part[2]) + 1]
            self.hub.parts.append((file, len(piece)))
            self._send(piece, status=206, headers={"X-Repo-Commit": COMMIT})
            return
        if body:
            self.hub.fetched.append(file)
            if file in self.hub.lies:
                content = content[:-1] + bytes([content[-1] ^ 1])
        self._send(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body=body)

    def _is_shut(self, repo: str) -> bool:
        token = self.hub.gated.get(repo)
        return token is not None and self.headers.get("Authorization") != f"Bearer {token}"

    def _refuse(self) -> None:
        self._send(b"{}", status=401, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"})

    def _send(self, content: bytes, *, status: int = 200, headers: dict[str, str] | None = None, body: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
    }
    if path.endswith((".parquet", ".safetensors")):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    """Serves until the block ends."""
    hub = SmallHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
