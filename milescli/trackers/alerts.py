"""Sends one alert to one target of `run.alerts`: a webhook, a command or an e-mail, with a bound on
each try and a few tries. A Tracker, so that `background` gives it a thread and a bounded queue.
`runtime.recording.alerting` decides when to alert."""

from __future__ import annotations

import getpass
import json
import os
import queue
import shlex
import shutil
import signal
import smtplib
import socket
import ssl
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from email.message import EmailMessage
from typing import Any

import milescli
from milescli.core.errors import RecipeError
from milescli.core.private import SMTP_PASSWORD, is_secret, without_secret_values
from milescli.recipe.alerts import (
    KEY,
    MAILTO,
    Kind,
    expand_variables,
    fault_of,
    kind_of,
    shown,
    variables_of,
)
from milescli.trackers.base import Tracker

TRY_S = 10.0
"""Time limit of one try, in seconds."""
PAUSES_S = (1.0, 4.0)
"""Seconds before the second and the third try."""
LONGEST_S = TRY_S * (len(PAUSES_S) + 1) + sum(PAUSES_S)
"""Longest time that one alert takes, in seconds."""
MAX_WAITING = 16
"""Alerts that wait for one target; further ones are dropped."""
SMTP, SMTP_USER, SMTP_FROM = "MILES_SMTP", "MILES_SMTP_USER", "MILES_SMTP_FROM"
"""Variables that name the mail server (HOST or HOST:PORT), the user who logs in there, and the
sender."""
_TLS_PORT = 465
_LOCAL = ("localhost", "127.0.0.1", "::1")
_RETRY_STATUSES = (408, 425, 429)
"""Status codes below 500 after which another try may succeed."""
_MAX_WHY = 200


class Undelivered(Exception):
    """Reports a failed try and its cause, without the address. `is_final`: True if another try
    would fail, too."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class AlertSender(Tracker):
    """Sends the alerts of a run to one target. Its events are alerts, as JSON values."""

    def __init__(self, entry: str, environ: Mapping[str, str]) -> None:
        """Resolve the address. `entry`: of `run.alerts`; `environ`: has its variables, see
        `require_target`."""
        self._environ = dict(environ)
        self._address = expand_variables(entry, environ)
        self.shown = shown(entry)
        """As logs and events name it."""
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What was not delivered, for the user."""
        self.gives_up = threading.Event()
        """Set when nobody waits for another try."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Send an alert. Never raises."""
        alert = {name: value for name, value in record.items() if name != "unix_s"}
        try:
            self._deliver(alert)
        except Undelivered as failed:
            why = " ".join(str(failed).replace(self._address, self.shown).split())
            self.failures.put(
                f"the alert of {alert['alert']} was not delivered to {self.shown}: {why[:_MAX_WHY]}"
            )

    def _deliver(self, alert: Mapping[str, Any]) -> None:
        """Try to send the alert. Raises Undelivered if all tries fail."""
        for number, pause_s in enumerate((*PAUSES_S, None), 1):
            try:
                self._send(alert)
                return
            except Undelivered as failed:
                if failed.is_final or pause_s is None or self.gives_up.wait(pause_s):
                    tries = f"{number} {'try' if number == 1 else 'tries'}"
                    raise Undelivered(f"{failed} ({tries})") from None

    def _send(self, alert: Mapping[str, Any]) -> None:
        if kind_of(self._address) is Kind.WEBHOOK:
            post(self._address, alert)
        elif kind_of(self._address) is Kind.MAIL:
            mail(self._address.removeprefix(MAILTO), alert, environ=self._environ)
        else:
            run_command(shlex.split(self._address), alert, environ=self._environ)


def post(url: str, alert: Mapping[str, Any]) -> None:
    """Post the alert as JSON. Raises Undelivered."""
    request = urllib.request.Request(
        url,
        data=json.dumps(alert).encode(),
        headers={
            "Content-Type": "application/json",
            "User-Agent": f"miles/{milescli.__version__}",
        },
    )
    try:
        with _OPENER.open(request, timeout=TRY_S):
            pass  # what it says is of no use
    except urllib.error.HTTPError as error:
        error.close()
        is_final = error.code < 500 and error.code not in _RETRY_STATUSES
        raise Undelivered(f"it replied HTTP {error.code}", is_final=is_final) from None
    except (OSError, ValueError) as error:  # http.client.InvalidURL is a ValueError too
        raise Undelivered(_reason(error)) from None
    except Exception as error:  # http.client.HTTPException: no HTTP was spoken
        raise Undelivered(type(error).__name__) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would be followed as a GET, without the alert."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no reply within {TRY_S:g} s"
    if isinstance(cause, OSError):
        return cause.strerror or type(cause).__name__
    return type(cause).__name__


def run_command(words: list[str], alert: Mapping[str, Any], *, environ: Mapping[str, str]) -> None:
    """Run the command with the alert on stdin. Raises Undelivered if it fails, or takes too long:
    then it is ended with its children."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            raise Undelivered(error.strerror or type(error).__name__, is_final=True) from None
        assert process.stdin is not None, "it has a pipe"
        with suppress(BrokenPipeError), process.stdin as pipe:  # a command need not read it
            pipe.write(json.dumps(alert).encode())
        try:
            code = process.wait(TRY_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Undelivered(f"it took more than {TRY_S:g} s") from None
        if code:
            output.seek(0)
            lines = without_secret_values(output.read().decode(errors="replace"), environ).split(
                "\n"
            )
            last = next((line for line in reversed(lines) if line.strip()), "")
            raise Undelivered(f"exit code {code}" + f": {last}" * bool(last))


def mail(to: str, alert: Mapping[str, Any], *, environ: Mapping[str, str]) -> None:
    """Send the alert by mail through MILES_SMTP, else this computer. Raises Undelivered. A password
    is only sent under TLS, or to this computer."""
    message = EmailMessage()
    message["Subject"] = str(alert["text"]).splitlines()[0][:_MAX_WHY]
    message["From"] = environ.get(SMTP_FROM) or f"{getpass.getuser()}@{socket.gethostname()}"
    message["To"] = to.replace(",", ", ")
    message.set_content(f"{alert['text']}\n\n{json.dumps(alert, indent=2)}\n")
    host, port = _mail_server(environ)
    try:
        with closing(_connected(host, port)) as server:
            is_safe = host in _LOCAL or port == _TLS_PORT
            server.ehlo()
            if not is_safe and server.has_extn("starttls"):
                server.starttls(context=ssl.create_default_context())
                is_safe = True
            if environ.get(SMTP_PASSWORD):
                if not is_safe:
                    raise Undelivered("the mail server offers no TLS", is_final=True)
                server.login(environ.get(SMTP_USER) or getpass.getuser(), environ[SMTP_PASSWORD])
            server.send_message(message)
            with suppress(smtplib.SMTPException, OSError):  # it has the mail
                server.quit()
    except smtplib.SMTPResponseException as error:
        raise Undelivered(f"the mail server replied {error.smtp_code}") from None
    except smtplib.SMTPException as error:
        raise Undelivered(type(error).__name__) from None
    except (OSError, ValueError) as error:
        raise Undelivered(f"mail server {host}:{port}: {_reason(error)}") from None


def _connected(host: str, port: int) -> smtplib.SMTP:
    if port == _TLS_PORT:
        return smtplib.SMTP_SSL(host, port, timeout=TRY_S, context=ssl.create_default_context())
    return smtplib.SMTP(host, port, timeout=TRY_S)


def _mail_server(environ: Mapping[str, str]) -> tuple[str, int]:
    text = environ.get(SMTP) or "localhost"
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdigit() else (text, 25)


def require_target(entry: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Check before anything starts that an alert can be sent: its variables are set, its command
    exists. Yields warnings. Raises RecipeError."""
    try:
        address = expand_variables(entry, environ)
    except KeyError as missing:
        name = missing.args[0]
        raise RecipeError(
            f"`{KEY}` names ${name}, which is not set",
            why="the environment of this shell has no such variable, or it is empty",
            fix=[f"export {name}=...", f"--set {KEY}=[]   # tell nobody"],
        ) from None
    if kind_of(entry) is not Kind.COMMAND:
        if fault := fault_of(address):
            raise RecipeError(
                f"`{KEY}` cannot send to {shown(entry)}",
                why=f"its value is no address: {fault}",
                fix=f"--set {KEY}=[https://ntfy.sh/my-runs]",
            )
        for name in variables_of(entry):
            if not is_secret(name):
                yield (
                    f"${name} of `{KEY}` is passed on to all processes of the run; one whose name "
                    f"has WEBHOOK, TOKEN or SECRET in it is not: {name}_WEBHOOK"
                )
    elif shutil.which(shlex.split(entry)[0]) is None:
        raise RecipeError(
            f"`{KEY}` names the command `{shown(entry)}`, which is not here",
            why="there is no such program in PATH, or the file may not be executed",
            fix=[
                f"chmod +x {shown(entry)}" if "/" in entry else "export PATH=...",
                f"--set {KEY}=[]",
            ],
        )
    if kind_of(address) is Kind.MAIL and ":" in (environ.get(SMTP) or ""):
        port = environ[SMTP].rpartition(":")[2]
        if not port.isdigit() or not 0 < int(port) < 65536:
            raise RecipeError(
                f"{SMTP} does not name a mail server",
                why="it must be HOST or HOST:PORT",
                fix=f"export {SMTP}=localhost:25",
            )
