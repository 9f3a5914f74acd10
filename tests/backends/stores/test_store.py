"""What an S3 server refuses is told with a cause and a fix, and without a secret."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from milescli.backends.stores import store as stores
from milescli.backends.stores.store import ObjectStore, StoreError
from tests.loopback_services import BUCKET, S3, needs_s3, s3_server

pytestmark = [needs_s3, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def opened(url: str) -> ObjectStore:
    return ObjectStore(url, instead="--to DIR")


def _refusal(url: str) -> StoreError:
    with pytest.raises(StoreError) as caught:
        opened(url).write("name", b"1")
    assert "not-for-any-log" not in str(caught.value) and caught.value.fixes[-1] == "--to DIR"
    return caught.value


def test_objects_are_written_listed_read_and_removed(tmp_path: Path) -> None:
    store = opened(f"s3://{BUCKET}/some/where")
    assert store.sizes() == {} and store.read("a") is None
    store.write("a/b", b"hello")
    file = tmp_path / "large"
    file.write_bytes(bytes(range(256)) * 2**18)
    told: list[int] = []
    store.put(file, "large", progress=told.append)
    assert store.sizes() == {"a/b": 5, "large": 2**26} and sum(told) == 2**26
    assert store.sizes("a") == {"b": 5} and store.read("a/b") == b"hello"
    store.get("large", tmp_path / "back", size_bytes=2**26, progress=told.append)
    assert (tmp_path / "back").read_bytes() == file.read_bytes() and sum(told) == 2**27
    store.remove(["a/b", "large", "never-there"])
    assert store.sizes() == {}


def test_a_bucket_that_is_not_there_is_named() -> None:
    error = _refusal("s3://no-such-bucket/x")
    assert "s3://no-such-bucket does not exist" in error.what and error.is_final
    assert error.fixes[0] == "aws s3 mb s3://no-such-bucket"


def test_a_folder_without_room_is_said_to_be_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = opened((tmp_path / "store").as_uri())
    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)
    with pytest.raises(StoreError, match="is full") as caught:
        store.write("name", b"1")
    assert "No space left" in caught.value.why
    assert caught.value.fixes[0].startswith(f"df -h {tmp_path / 'store'}")


def test_missing_credentials_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    error = _refusal(f"s3://{BUCKET}/x")
    assert "no credentials" in error.what and error.is_final
    assert error.fixes[0] == "export AWS_PROFILE=NAME"


def test_a_bucket_that_may_only_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which answers `Expect: 100-continue`

        def do_PUT(self) -> None:
            text = b"<Error><Code>AccessDenied</Code><Message>not-for-any-log</Message></Error>"
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), ReadOnly)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        error = _refusal(f"s3://{BUCKET}/x")
    finally:
        server.shutdown()
        server.server_close()
    assert "access to s3://bucket/x is denied" in error.what and error.is_final
    assert "$AWS_SECRET_ACCESS_KEY" in error.why


def test_a_server_that_is_away_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    error = _refusal(f"s3://{BUCKET}/x")
    assert "does not answer" in error.what and not error.is_final


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CALL_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        error = _refusal(f"s3://{BUCKET}/x")
    assert error.why == "writing name: no reply in time" and not error.is_final


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(StoreError) as caught:
        opened("az://container/x")
    assert caught.value.fixes[0] == "pip install adlfs" and caught.value.is_final
