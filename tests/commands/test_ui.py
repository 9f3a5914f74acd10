"""`miles ui`: what it refuses, and what it says."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from milescli.web import serve
from tests.commands.conftest import Miles


@pytest.fixture
def run_dir(miles: Miles) -> Path:
    folder = Path("runs/quickstart-1")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: quickstart\n")
    return folder


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> list[serve.PageSocket]:
    """Sockets that were opened; nobody is let in."""
    sockets = list[serve.PageSocket]()

    def ended(page_socket, shown, *, on_fault, ready) -> None:  # type: ignore[no-untyped-def]
        sockets.append(page_socket)
        ready()
        page_socket.listener.close()

    monkeypatch.setattr(serve, "serve", ended)
    return sockets


def test_a_run_that_is_not_there_is_refused(miles: Miles, run_dir: Path) -> None:
    said = miles("ui", "quickstart-2")
    assert (said.code, said.out) == (6, "")
    assert "quickstart-1" in said.err


def test_a_port_in_use_is_refused(miles: Miles, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = miles("ui", "--port", str(taken.getsockname()[1]))
    assert said.code == 4 and "is in use" in said.err and "miles ui --port" in said.err


def test_the_url_is_data(miles: Miles, run_dir: Path, ends_at_once: list[serve.PageSocket]) -> None:
    said = miles("ui", "quickstart-1")
    assert (said.code, said.out) == (0, ends_at_once[0].url + "\n")
    assert "Ctrl-C" in said.err and "warning" not in said.err
    told = json.loads(miles("ui", "--json").out)
    assert (told["kind"], told["url"]) == ("ui", ends_at_once[1].url)


def test_a_folder_without_runs_is_served(
    miles: Miles, ends_at_once: list[serve.PageSocket]
) -> None:
    assert miles("ui").code == 0 and len(ends_at_once) == 1


def test_who_lets_others_in_is_told_what_it_means(
    miles: Miles, run_dir: Path, ends_at_once: list[serve.PageSocket]
) -> None:
    said = miles("ui", "--host", "0.0.0.0")
    assert said.code == 0 and said.err.startswith("warning: other computers can reach 0.0.0.0")
    assert "not encrypted" in said.err and "ssh -L" in said.err


def test_the_server_does_not_wait_for_the_browser(
    miles: Miles,
    run_dir: Path,
    ends_at_once: list[serve.PageSocket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some return only when they are closed, and all wait for the page."""
    opened, closed, returned = threading.Event(), threading.Event(), list[bool]()

    def browse(url: str) -> bool:
        opened.set()
        returned.append(closed.wait(60.0))
        return True

    monkeypatch.setattr(serve.webbrowser, "open", browse)
    assert miles("ui", "--open").code == 0
    assert returned == [] and opened.wait(60.0)
    closed.set()
