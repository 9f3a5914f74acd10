"""SRC as a name on the hub, against a hub on loopback: what is fetched, with which token, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.runtime.test_convert import make

COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a snapshot needs."""

    def _answer(self, *, body: bool) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.asked.append((self.command, self.path, self.headers.get("Authorization")))
        if "org/secret" in self.path and self.headers.get("Authorization") != "Bearer sesame":
            self._send(
                401,
                b"{}",
                {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/secret is restricted"},
                body=body,
            )
        elif self.path.startswith("/api/models/org/") and "/revision/" in self.path:
            siblings = [{"rfilename": path.name} for path in sorted(hub.folder.iterdir())]
            answer = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body=body)
        elif self.path.startswith("/api/models/org/") and "/tree/" in self.path:
            files = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "b" * 40}
                for path in sorted(hub.folder.iterdir())
            ]
            self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"}, body=body)
        elif "/resolve/" in self.path and (path := hub.folder / self.path.rpartition("/")[2]).is_file():
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body=body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _send(self, code: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *args: object) -> None:
        """Not on the terminal."""


class Hub:
    """Serves one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
        self.server.hub = self  # type: ignore[attr-defined]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = make(tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    found = Hub(folder)
    yield found
    found.server.shutdown()
    found.server.server_close()


def _convert(hub: Hub, tmp_path: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [
        sys.executable,
        "-m",
        "milescli",
        "convert",
        "hf-to-megatron",
        name,
        str(tmp_path / "out"),
        "--verify",
        "tensors",
    ]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_a_name_on_the_hub_is_fetched_and_converted(hub: Hub, tmp_path: Path) -> None:
    done = _convert(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    assert "fetching org/tiny" in done.stderr
    assert (tmp_path / "out" / "hf" / "tokenizer.json").exists()
    assert not any("pytorch_model.bin" in path for _, path, _ in hub.asked), "pickles are not even fetched"


def test_a_gated_model_needs_a_token_and_takes_it_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    refused = _convert(hub, tmp_path, "org/secret")
    assert refused.returncode == 6 and "hf auth login" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr
    done = _convert(hub, tmp_path, "org/secret", HF_TOKEN="sesame")
    assert done.returncode == 0, done.stderr
    assert "sesame" not in done.stderr + done.stdout
    assert not any(b"sesame" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_a_name_that_nobody_has_is_refused(hub: Hub, tmp_path: Path) -> None:
    done = _convert(hub, tmp_path, "nobody/nothing")
    assert done.returncode == 6 and "neither a folder nor to be had from the hub" in done.stderr
    assert not (tmp_path / "out").exists()
