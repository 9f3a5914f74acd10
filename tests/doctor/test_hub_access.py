"""Tests of reaching the hub: a small one on loopback, one that is not there, tokens that are
refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from milescli.doctor.finding import Status
from milescli.doctor.hub_access import check_hub
from milescli.recipe.schema import Recipe

NOWHERE = "http://127.0.0.1:9"
GOOD = "hf_good"


def _recipe(model: str, prompts: str = "task:sums") -> Recipe:
    return Recipe.model_validate({"model": {"path": model}, "data": {"prompts": prompts}})


class _Hub(BaseHTTPRequestHandler):
    """Public, gated and absent repositories; one token is known."""

    def do_GET(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", GOOD):
            status = 401
        elif self.path.endswith("whoami-v2"):
            status = 200 if token else 401
        elif "absent" in self.path:
            status = 404
        else:
            status = 401 if "gated" in self.path and "resolve" in self.path and not token else 200
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Silent."""


@contextmanager
def _hub() -> Iterator[dict[str, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_a_hub_that_answers_is_ok_with_and_without_a_token() -> None:
    with _hub() as environ:
        assert "no token" in check_hub(None, environ=environ, token=None)[0].what
        finding = check_hub(_recipe("org/open", "hf:org/data"), environ=environ, token=GOOD)[0]
    assert (
        finding.status is Status.OK
        and "org/open exists; org/data exists" in finding.what
        and GOOD not in finding.what
    )


@pytest.mark.parametrize(
    ("name", "token", "why", "fix"),
    [
        ("org/gated", None, "there is no token", "hf auth login"),
        ("org/absent", None, "404", "--set model.path=NAME"),
        ("org/open", "hf_bad", "public models are refused", "hf auth logout"),
    ],
)
def test_what_is_refused_is_a_fail_with_its_reason(
    name: str, token: str | None, why: str, fix: str
) -> None:
    with _hub() as environ:
        finding = check_hub(_recipe(name), environ=environ, token=token)[0]
    assert finding.status is Status.FAIL and why in finding.why and finding.fix[0] == fix


def test_a_host_to_which_the_hub_redirects_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    got = list[tuple[str, str | None]]()

    def redirect(self: _Hub) -> None:
        is_elsewhere = self.path.startswith("/elsewhere")
        got.append((self.path, self.headers.get("Authorization")))
        self.send_response(200 if is_elsewhere else 302)
        port = self.server.server_address[1]
        self.send_header("Location", f"http://localhost:{port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    monkeypatch.setattr(_Hub, "do_GET", redirect)
    with _hub() as environ:
        check_hub(None, environ=environ, token=GOOD)
    assert got == [("/api/whoami-v2", f"Bearer {GOOD}"), ("/elsewhere", None)]


def test_a_repository_that_was_renamed_is_asked_for_with_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got = list[tuple[str, str | None]]()

    def redirect(self: _Hub) -> None:
        is_new = self.path.startswith("/new")
        got.append((self.path, self.headers.get("Authorization")))
        self.send_response(200 if is_new else 307)
        self.send_header("Location", "/new")
        self.send_header("Content-Length", "0")
        self.end_headers()

    monkeypatch.setattr(_Hub, "do_GET", redirect)
    with _hub() as environ:
        check_hub(None, environ=environ, token=GOOD)
    assert got == [("/api/whoami-v2", f"Bearer {GOOD}"), ("/new", f"Bearer {GOOD}")]


def test_a_hub_that_is_not_there_fails_only_recipes_that_need_it(tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": NOWHERE}
    finding = check_hub(_recipe("org/open"), environ=environ, token=GOOD)[0]
    assert finding.status is Status.FAIL and "Connection refused" in finding.why
    assert (
        finding.fix[0].startswith("unset HF_ENDPOINT")
        and "--set model.path=/path/to/a/copy" in finding.fix
    )
    assert check_hub(None, environ=environ, token=None)[0].status is Status.WARN
    snapshot = tmp_path / "models--org--open/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    assert check_hub(_recipe("org/open"), environ=environ, token=None)[0].status is Status.OK


def test_the_offline_switch_is_named() -> None:
    finding = check_hub(_recipe("org/open"), environ={"HF_HUB_OFFLINE": "1"}, token=None)[0]
    assert finding.status is Status.FAIL and finding.fix[0] == "unset HF_HUB_OFFLINE"


@pytest.mark.parametrize("endpoint", ["foo", "http://", "https://me:pw@127.0.0.1:notaport"])
def test_an_endpoint_that_is_no_address_is_found_and_its_command_mends_it(endpoint: str) -> None:
    finding = check_hub(_recipe("org/open"), environ={"HF_ENDPOINT": endpoint}, token=None)[0]
    assert finding.status is Status.FAIL and finding.fix[0].startswith("unset HF_ENDPOINT")


@pytest.mark.parametrize("status", [407, 503])
def test_a_gateway_that_does_not_reach_the_hub_is_no_hub(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Hub, "do_GET", lambda self: self.send_error(status))
    with _hub() as environ:
        finding = check_hub(_recipe("org/open"), environ=environ, token=None)[0]
    assert finding.status is Status.FAIL and f"it responded with {status}" in finding.why
