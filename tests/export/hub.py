"""A Hugging Face hub on loopback: as much of its API as a push speaks (who am I, make a repository, upload, commit). For tests."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_localtestlocaltestlocaltest"
"""Accepted by this server alone."""


@dataclass
class Hub:
    """What it was told."""

    url: str = ""
    repos: dict[str, dict[str, object]] = field(default_factory=dict)
    """name -> what create_repo asked for"""
    files: dict[str, bytes] = field(default_factory=dict)
    """path in the repository -> content, once committed"""
    objects: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> content, as large files arrive"""
    paths: list[str] = field(default_factory=list)
    """Of all requests."""
    fails: dict[str, int] = field(default_factory=dict)
    """Part of a path -> status to answer with"""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if not self._goes_on():
            return
        if self.path.startswith("/api/whoami-v2"):
            self._answer(
                {"name": "somebody", "type": "user", "orgs": [{"name": "my-org"}], "auth": {"accessToken": {"role": "write"}}}
            )
            return
        name = "/".join(self.path.split("?")[0].split("/")[3:5])
        known = name in self.hub.repos
        self._answer(
            {"id": name, "sha": "0" * 40, "siblings": []} if known else {"error": "Repository not found"},
            status=200 if known else 404,
        )

    def do_HEAD(self) -> None:
        self._answer({}, status=404)

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._answer({})

    def do_POST(self) -> None:
        content = self._body()
        if not self._goes_on():
            return
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.repos[name] = asked
            asked.setdefault("visibility", "private" if asked.get("private") else "public")
            self._answer({"url": f"{self.hub.url}/{name}", "name": name})
        elif "/preupload/" in path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(content)["files"]
            ]
            self._answer({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {"href": f"{self.hub.url}/put", "header": {}}
            objects = [{**each, "actions": {"upload": upload}} for each in json.loads(content)["objects"]]
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            self._commit(content)
        else:
            self._answer({})

    def _commit(self, content: bytes) -> None:
        for line in content.splitlines():
            told = json.loads(line)
            value = told["value"]
            if told["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif told["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.objects[value["oid"]]
        self._answer(
            {
                "commitUrl": f"{self.hub.url}/{'/'.join(self.path.split('/')[3:5])}/commit/{'1' * 40}",
                "commitOid": "1" * 40,
                "success": True,
                "hookOutput": "",
            }
        )

    def _goes_on(self) -> bool:
        self.hub.paths.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, status=401)
            return False
        for part, status in self.hub.fails.items():
            if part in self.path:
                self._answer({"error": f"no, because {part}"}, status=status)
                return False
        return True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, payload: dict[str, object], *, status: int = 200) -> None:
        content = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status >= 400:
            self.send_header("X-Error-Message", str(payload.get("error", "")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub on a free port."""
    hub = Hub()
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
