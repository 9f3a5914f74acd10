"""An alert reaches a webhook, a command and a mailbox; what fails is tried again within a bound,
and told of without the secret."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from milescli.core.errors import RecipeError
from milescli.trackers import alerts
from milescli.trackers.alerts import AlertSender, require_target
from tests.waiting import assert_gone

ALERT = {"alert": "failure", "run": "sums-1", "text": "sums-1, failure at step 3: no memory"}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "PAUSES_S", (0.0, 0.0))


@dataclass
class Received:
    """A web server that answers with these codes, one after the other, the last one for ever."""

    codes: list[int]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@contextmanager
def server(*codes: int) -> Iterator[Received]:
    """Code 0: no answer until `held` is set."""
    got = Received(list(codes))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            code = got.codes.pop(0) if len(got.codes) > 1 else got.codes[0]
            if code == 0:
                got.held.wait(300)
                return
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        got.url = f"http://127.0.0.1:{web.server_address[1]}/hook?token=opensesame"
        try:
            yield got
        finally:
            got.held.set()
            web.shutdown()


def send(entry: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Send one alert; return what was not delivered."""
    sender = AlertSender(entry, environ or {})
    sender.event({**ALERT, "unix_s": 1.8e9})
    return [sender.failures.get() for _ in range(sender.failures.qsize())]


def test_a_webhook_gets_the_json_once() -> None:
    with server(200) as got:
        assert send("$MY_WEBHOOK", {"MY_WEBHOOK": got.url}) == []
    assert got.bodies == [ALERT]


def test_a_server_that_is_out_of_order_is_tried_again() -> None:
    with server(500, 429, 204) as got:
        assert send("$MY_WEBHOOK", {"MY_WEBHOOK": got.url}) == []
    assert len(got.bodies) == 3


@pytest.mark.parametrize(
    ("code", "tries", "said"),
    [
        (500, 3, "it replied HTTP 500 (3 tries)"),
        (404, 1, "it replied HTTP 404 (1 try)"),
        (302, 1, "it replied HTTP 302 (1 try)"),
    ],
)
def test_what_is_not_delivered_is_told_of_without_the_url(code: int, tries: int, said: str) -> None:
    with server(code) as got:
        [failure] = send("$MY_WEBHOOK", {"MY_WEBHOOK": got.url})
    assert len(got.bodies) == tries
    assert said in failure and "$MY_WEBHOOK" in failure
    assert "opensesame" not in failure and "127.0.0.1" not in failure


def test_a_server_that_hangs_is_given_up_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "TRY_S", 0.2)
    with server(0) as got:
        [failure] = send("$MY_WEBHOOK", {"MY_WEBHOOK": got.url})
    assert len(got.bodies) == 3 and "no reply within 0.2 s (3 tries)" in failure


def test_nobody_at_the_address_and_nobody_who_waits() -> None:
    with server(200) as got:
        pass
    sender = AlertSender(got.url.partition("?")[0], {})
    sender.gives_up.set()
    sender.event(ALERT)
    assert "Connection refused (1 try)" in sender.failures.get()


def test_a_command_gets_the_json_on_stdin_and_the_environment(tmp_path: Path) -> None:
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['A_TOKEN'] + sys.stdin.read())"
    command = f"{sys.executable} -c \"{code}\" '{tmp_path / 'two words'}'"
    assert send(command, {"A_TOKEN": "abc"}) == []
    assert (tmp_path / "two words").read_text() == "abc" + json.dumps(ALERT)


def test_a_command_that_fails_says_why_without_secrets() -> None:
    code = "import os, sys; sys.exit('no route; key ' + os.environ['A_TOKEN'])"
    [failure] = send(f'{sys.executable} -c "{code}"', {"A_TOKEN": "opensesame"})
    assert "exit code 1: no route; key $A_TOKEN (3 tries)" in failure


def test_a_command_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "TRY_S", 1.0)
    [failure] = send(f"sh -c 'sleep 1000 & echo $! >> {tmp_path}/pids; wait'")
    assert "it took more than 1 s (3 tries)" in failure
    assert_gone(*(int(pid) for pid in (tmp_path / "pids").read_text().split()))


@dataclass
class Mailbox:
    """A mail server of one page: it takes whatever comes, or refuses senders with `code`."""

    port: int = 0
    code: int = 250
    lines: list[str] = field(default_factory=list)


@contextmanager
def mailbox(code: int = 250) -> Iterator[Mailbox]:
    box = Mailbox(code=code)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("220 here")
            while line := self.rfile.readline().decode().strip():
                box.lines.append(line)
                word = line.split()[0].upper()
                if word == "DATA":
                    self.say("354 go on")
                    while (line := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                        box.lines.append(line)
                    self.say("250 taken")
                elif word == "MAIL":
                    self.say(f"{box.code} so")
                elif word == "EHLO":
                    self.say("250-here\r\n250 AUTH PLAIN")
                else:
                    self.say("235 yes" if word == "AUTH" else "250 yes")

        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as smtp:
        smtp.daemon_threads = True
        threading.Thread(target=smtp.serve_forever, daemon=True).start()
        box.port = smtp.server_address[1]
        try:
            yield box
        finally:
            smtp.shutdown()


def test_a_mail_goes_through_the_server_that_the_environment_names() -> None:
    with mailbox() as box:
        environ = {"MILES_SMTP": f"127.0.0.1:{box.port}", "MILES_SMTP_FROM": "runs@here"}
        assert send("mailto:me@example.org,you@example.org", environ) == []
    assert f"Subject: {ALERT['text']}" in box.lines and "From: runs@here" in box.lines
    assert "rcpt TO:<me@example.org>" in box.lines and "rcpt TO:<you@example.org>" in box.lines
    assert not any(line.startswith("AUTH") for line in box.lines)


def test_a_password_of_the_environment_logs_in_and_is_in_no_failure() -> None:
    with mailbox(code=553) as box:
        environ = {
            "MILES_SMTP": f"localhost:{box.port}",
            "MILES_SMTP_USER": "me",
            "MILES_SMTP_PASSWORD": "opensesame",
        }
        [failure] = send("mailto:me@example.org", environ)
    assert sum(line.startswith("AUTH PLAIN") for line in box.lines) == 3
    assert "the mail server replied 553 (3 tries)" in failure and "opensesame" not in failure


def test_no_mail_server_is_told_of() -> None:
    with mailbox() as box:
        pass
    [failure] = send("mailto:me@example.org", {"MILES_SMTP": f"localhost:{box.port}"})
    assert f"mail server localhost:{box.port}: Connection refused (3 tries)" in failure


@pytest.mark.parametrize(
    ("entry", "environ", "said"),
    [
        ("$MY_WEBHOOK", {}, "names $MY_WEBHOOK, which is not set"),
        ("$MY_WEBHOOK", {"MY_WEBHOOK": "opensesame"}, "cannot send to $MY_WEBHOOK"),
        ("no-such-command x", {}, "the command `no-such-command`, which is not here"),
        ("mailto:me@example.org", {"MILES_SMTP": "localhost:x"}, "does not name a mail server"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_the_run(
    entry: str, environ: dict[str, str], said: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        list(require_target(entry, environ))
    assert said in refused.value.what and "opensesame" not in str(refused.value)


def test_a_name_that_sounds_like_no_secret_is_a_doubt() -> None:
    [doubt] = require_target("$HOOK", {"HOOK": "https://x.org/y"})
    assert "$HOOK of `run.alerts` is passed on to all processes" in doubt
    assert not list(require_target("$A_WEBHOOK", {"A_WEBHOOK": "https://x.org/y"}))
    assert not list(require_target("cat", {}))
