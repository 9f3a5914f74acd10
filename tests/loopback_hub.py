"""A Hugging Face hub on loopback: as much of its API as a download speaks (info, tree, resolve),
and as a push does (who am I, make a repository, upload, commit). What was pushed can be read. For
tests."""

from __future__ import annotations

import base64
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
WRITE_TOKEN = "hf_localtestlocaltestlocaltest"
"""Whose bearer is somebody, and may push."""


@dataclass
class LoopbackHub:
    """What it holds, what it was asked, and how it misbehaves."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """`datasets/org/name` or `models/org/name` -> path -> content"""
    gated: dict[str, str] = field(default_factory=dict)
    """`models/org/name` -> the token that it wants"""
    lies: set[str] = field(default_factory=set)
    """Paths whose content arrives with a byte changed."""
    fails: dict[str, int] = field(default_factory=dict)
    """Part of an address -> status with which a push is answered there"""
    asked: list[str] = field(default_factory=list)
    """Addresses of all requests of a push."""
    fetched: list[str] = field(default_factory=list)
    """Paths of contents that were sent."""
    parts: list[tuple[str, int]] = field(default_factory=list)
    """Path and bytes of those of which only a part was asked."""
    made: dict[str, str] = field(default_factory=dict)
    """`org/name` of repositories that were made -> public or private"""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> content, as large files arrive before a commit names them"""


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._resolve(body=False)

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if path == "/api/whoami-v2":
            if self._may_push():
                self._tell(
                    {
                        "name": "somebody",
                        "type": "user",
                        "orgs": [{"name": "my-org"}],
                        "auth": {"accessToken": {"role": "write"}},
                    }
                )
            return
        if not path.startswith("/api/"):
            self._resolve(body=True)
            return
        kind, org, name, *rest = [*path.removeprefix("/api/").split("/"), "", ""]
        repo = self.hub.files.get(f"{kind}/{org}/{name}")
        if self._is_shut(f"{kind}/{org}/{name}"):
            self._refuse()
        elif repo is None:
            self._tell({"error": "Repository not found"}, status=404, code="RepoNotFound")
        elif rest[:1] == ["tree"]:
            self._tell([_entry(path, content) for path, content in repo.items()])
        else:
            self._tell({"id": f"{org}/{name}", "sha": COMMIT, "siblings": []})

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

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.uploads[hashlib.sha256(content).hexdigest()] = content
        self._tell({})

    def do_POST(self) -> None:
        content = self._body()
        path = self.path.split("?")[0]
        if not self._may_push():
            return
        if path == "/api/repos/create":
            self._make(json.loads(content))
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(content)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self._tell(
                {
                    "files": [
                        {"path": name, "uploadMode": mode, "shouldIgnore": False}
                        for name, mode in modes.items()
                    ]
                }
            )
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {"href": f"{self.hub.url}/put", "header": {}}
            objects = [
                {**item, "actions": {"upload": upload}} for item in json.loads(content)["objects"]
            ]
            self._tell({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            self._commit("/".join(path.split("/")[3:5]), content)
        else:
            self._tell({})

    def _make(self, wanted: dict[str, object]) -> None:
        name = (
            f"{wanted['organization']}/{wanted['name']}"
            if wanted.get("organization")
            else str(wanted["name"])
        )
        self.hub.made[name] = str(
            wanted.get("visibility", "private" if wanted.get("private") else "public")
        )
        self.hub.files[f"models/{name}"] = {}
        self._tell({"url": f"{self.hub.url}/{name}", "name": name})

    def _commit(self, name: str, content: bytes) -> None:
        for line in content.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.files[f"models/{name}"][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.files[f"models/{name}"][value["path"]] = self.hub.uploads[value["oid"]]
        url = f"{self.hub.url}/{name}/commit/{COMMIT}"
        self._tell({"commitUrl": url, "commitOid": COMMIT, "success": True, "hookOutput": ""})

    def _may_push(self) -> bool:
        """Else a refusal was sent that says why not."""
        self.hub.asked.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {WRITE_TOKEN}":
            self._tell({"error": "Invalid username or password."}, status=401)
            return False
        for part, status in self.hub.fails.items():
            if part in self.path:
                self._tell({"error": f"no, because {part}"}, status=status)
                return False
        return True

    def _is_shut(self, repo: str) -> bool:
        token = self.hub.gated.get(repo)
        return token is not None and self.headers.get("Authorization") != f"Bearer {token}"

    def _refuse(self) -> None:
        self._tell({"error": "access is restricted"}, status=401, code="GatedRepo")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _tell(self, payload: object, *, status: int = 200, code: str = "") -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Error-Code": code} if code else {})
        if isinstance(payload, dict) and "error" in payload:
            headers["X-Error-Message"] = payload["error"]
        self._send(json.dumps(payload).encode(), status=status, headers=headers)

    def _send(
        self,
        content: bytes,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        body: bool = True,
    ) -> None:
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
        entry["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
    return entry


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """Serves on a free port until the block ends."""
    hub = LoopbackHub()
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
