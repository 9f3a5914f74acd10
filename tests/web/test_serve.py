"""`miles ui` as a process: its socket, its end, and that it writes nothing."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

import httpx
import psutil
import pytest

from milescli.core.errors import ExitCode, MachineError
from milescli.web import serve
from milescli.web.gate import is_loopback
from milescli.web.serve import KEY_FILE, open_page_socket, user_key
from tests.fake_run import WrittenRun
from tests.web.browser.chromium import url_of

MILES = Path(sys.executable).with_name("miles")
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0


@contextmanager
def page(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`miles ui` in a folder that has `runs/`, and its URL."""
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    environment.pop("XDG_STATE_HOME", None)
    with subprocess.Popen(
        [str(MILES), "--json", "ui", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, url_of(process)
        finally:
            process.kill()


def state_of(folder: Path) -> dict[str, tuple[float, int]]:
    """Every file and folder, when it was changed, and its size."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")
    }


@pytest.mark.slow
def test_a_page_from_its_first_request_to_ctrl_c(run: WrittenRun, tmp_path: Path) -> None:
    """In a run that can only be read; with a page open that follows it."""
    run.attempt(engine_0="one\n")
    run.steps(1, 3)
    run.keep(3, {})
    for path in (*run.path.rglob("*"), run.path):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = state_of(tmp_path / "runs")
    with page(tmp_path) as (process, url):
        address, _, key = url.partition("?key=")
        assert address.startswith("http://127.0.0.1:") and len(key) == 22
        served = psutil.Process(process.pid)
        listening = [one.laddr.ip for one in served.net_connections() if one.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        assert key not in " ".join(served.cmdline()) and key not in str(served.environ())
        with httpx.Client(base_url=address, timeout=WAIT_S, follow_redirects=True) as client:
            assert client.get("api/runs").status_code == 403
            assert client.get("/", params={"key": key}).url == address
            [listed] = client.get("api/runs").json()["runs"]
            assert (listed["id"], listed["step"]) == ("tiny-1", 3)
            for name in ("summary", "names", "samples", "logs/latest/engine-0.log", "evaluations"):
                assert client.get(f"api/runs/tiny-1/{name}").status_code == 200
            with client.stream("GET", "api/runs/tiny-1/live") as stream:
                next(line for line in stream.iter_lines() if line == "event: news")
                process.send_signal(signal.SIGINT)
                assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        told = process.stderr.read()
        assert "the page has ended" in told and key not in told
    assert state_of(tmp_path / "runs") == before
    holding = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and key in path.read_text(errors="replace")
    ]
    assert [path.name for path in holding] == [KEY_FILE]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600


def test_sigterm_ends_it_as_well(run: WrittenRun, tmp_path: Path) -> None:
    with page(tmp_path, "tiny-1") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")
def test_a_run_that_is_not_ours_to_read_is_refused(run: WrittenRun) -> None:
    """By a process of another user; as root everything can be read."""
    run.path.chmod(0o700)
    # imported as root, as the interpreter may lie where only root reads
    script = (
        "import os, sys\n"
        "import milescli.web.serve, milescli.web.serve, milescli.recipe.load, httpx\n"
        "from milescli.commands.app import main\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(['ui', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run.path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd="/",
        env={**os.environ, "HOME": "/no-home", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == ExitCode.NOT_READY, done.stderr
    assert f"the run {run.path} cannot be read" in done.stderr, done.stderr
    assert "Permission denied" in done.stderr and "chmod -R a+rX" in done.stderr, done.stderr


def test_a_port_in_use_is_refused_with_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match="is in use") as refused:
            open_page_socket(host="127.0.0.1", port=port)
    assert f"miles ui --port {port + 1}" in refused.value.fixes


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "2001:db8::1"])
def test_an_address_of_somebody_else_is_refused(host: str) -> None:
    with pytest.raises(MachineError, match="cannot be served"):
        open_page_socket(host=host, port=0)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("node-1", False),
    ],
)
def test_what_only_this_computer_can_reach(host: str, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours


def test_no_body_waits_for_the_receipt_of_its_head() -> None:
    page_socket = open_page_socket(host="127.0.0.1", port=0)
    with (
        page_socket.listener,
        socket.create_connection(page_socket.listener.getsockname(), timeout=WAIT_S),
        page_socket.listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_each_door_has_its_own_key() -> None:
    sockets = [open_page_socket(host="127.0.0.1", port=0) for _ in range(3)]
    assert len({page_socket.gate.key for page_socket in sockets}) == 3
    for page_socket in sockets:
        page_socket.listener.close()
        assert page_socket.url.startswith(f"http://127.0.0.1:{page_socket.gate.port}/?key=")


def test_the_key_of_a_user_stays_until_others_could_have_read_it(tmp_path: Path) -> None:
    key = user_key(tmp_path / "state")
    assert key is not None and user_key(tmp_path / "state") == key
    file = tmp_path / "state" / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    second = user_key(tmp_path / "state")
    assert second not in (None, key) and stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()
    file.symlink_to("/etc/hostname")
    third = user_key(tmp_path / "state")
    assert third not in (None, key, second) and not file.is_symlink()
    file.write_text("short\n")
    assert user_key(tmp_path / "state") not in (None, third, "short")
    (tmp_path / "file").touch()
    assert user_key(tmp_path / "file") is None


def test_a_bookmark_works_again_on_this_computer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(serve, "DEFAULT_PORT", port)
    first = open_page_socket(host="127.0.0.1", port=None, state=tmp_path)
    beside = open_page_socket(host="127.0.0.1", port=None, state=tmp_path)
    first.listener.close()
    again = open_page_socket(host="127.0.0.1", port=None, state=tmp_path)
    outside = open_page_socket(host="0.0.0.0", port=0, state=tmp_path)
    for page_socket in (beside, again, outside):
        page_socket.listener.close()
    assert again.url == first.url == f"http://127.0.0.1:{port}/?key={first.gate.key}"
    assert beside.gate.port != port and beside.gate.key == first.gate.key
    assert outside.gate.key != first.gate.key and not outside.gate.is_permanent


def test_the_key_changes_where_somebody_else_listens_at_the_usual_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookmark has sent it the key."""
    monkeypatch.setattr(serve, "_listens", lambda port: os.getuid() + 1)
    key = user_key(tmp_path)
    page_socket = open_page_socket(host="127.0.0.1", port=0, state=tmp_path)
    page_socket.listener.close()
    assert page_socket.gate.key != key and user_key(tmp_path) == page_socket.gate.key


def test_who_listens_at_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve._listens(port) == os.getuid()
    assert serve._listens(port) is None


def test_a_browser_is_led_by_a_file_that_only_its_owner_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = list[str]()
    monkeypatch.setattr(serve.webbrowser, "open", lambda url: opened.append(url) or True)
    serve.open_page("http://127.0.0.1:8/?key=secret&a=1", failed=pytest.fail)
    [url] = opened
    file = Path(urlparse(url).path)
    assert "secret" not in url
    assert 'content="0;url=http://127.0.0.1:8/?key=secret&amp;a=1"' in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_computer_without_a_browser_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.webbrowser, "open", lambda url: False)
    told = list[str]()
    serve.open_page("http://127.0.0.1:8/?key=secret", failed=told.append)
    assert len(told) == 1 and "secret" not in told[0]
