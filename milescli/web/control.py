"""Starts, resumes and stops runs for the page, and runs chats with their checkpoints: each is a
command of `miles` in a process of its own, which the page shows before it runs. Exists only in a
server that was started with `--control`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from milescli.checkpoint.run_control import write_note
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MilesError
from milescli.core.files import parse_json
from milescli.web.responses import BadRequest, Busy, NotFound

Json = dict[str, Any]
MAX_JOBS = 32
"""Number of commands that are remembered; the oldest that has ended is dropped first."""
MAX_CHATS = 4
MAX_ARGUMENTS = 200
"""Largest number of words of a command that the page sends."""
LONGEST_TEXT = 20_000
"""Largest number of characters of a chat message, and of a command."""
OUTPUT_BYTES = 16 * 1024
"""Bytes of the end of a command's output that the page shows."""
RESULT_BYTES = 64 * 1024**2
"""Bytes of a command's output that are searched for its result."""
MAX_FLIPS = 50
"""Largest number of samples with a changed verdict that the page shows."""
IDLE_S = 180.0
"""Seconds without a request from a page after which a chat is ended; an open page asks at least
once a minute."""
STOP_S = 20.0
"""Seconds that chats have to end with the server."""


@dataclass(slots=True, kw_only=True)
class Job:
    """Describes a command that is running, or has ended."""

    id: int
    command: Sequence[str]
    """Words after `miles`."""
    process: subprocess.Popen[bytes]
    output: Path
    """File with the command's output."""
    began_s: float

    def as_json(self) -> Json:
        """Return the fields for the page: the exit code is None while it runs."""
        return {
            "id": self.id,
            "command": shlex.join(["miles", *self.command]),
            "began_s": self.began_s,
            "exit_code": self.process.poll(),
            "output": _end_of(self.output),
        }


@dataclass(slots=True, kw_only=True)
class Chat:
    """Holds a conversation with the model of one `miles chat` process."""

    id: int
    subject: str
    process: subprocess.Popen[bytes]
    status: str = "starts"
    """Newest line of its standard error."""
    is_ready: bool = False
    messages: list[Json] = field(default_factory=list)
    """Messages so far: {who: user, model or miles, text, tokens}; miles says why there is no reply.
    """
    error: Json | None = None
    used_s: float = field(default_factory=time.monotonic)
    """Time of the page's last request."""

    def as_json(self) -> Json:
        """Return the fields for the page."""
        self.used_s = time.monotonic()
        return {
            "id": self.id,
            "subject": self.subject,
            "status": self.status,
            "is_ready": self.is_ready,
            "is_over": self.process.poll() is not None,
            "said": self.messages,
            "error": self.error,
        }

    def listen(self) -> None:
        """Read replies from stdout and messages from stderr until both end."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            if record.get("kind") == "reply":
                tokens = record.get("tokens", [])
                self.messages.append({"who": "model", "text": record["text"], "tokens": tokens})
            elif record.get("kind") == "refusal":
                self.messages.append({"who": "miles", "text": record["text"], "tokens": []})
            elif record.get("kind") == "error":
                names = ("error", "why", "fix")
                self.error = {name: record.get(name) for name in names}
            elif record.get("kind") == "chat":
                self.is_ready = True
            elif isinstance(text := record.get("text"), str):
                self.status = text


class Control:
    """Holds the commands and chats of one server. Called from threads."""

    def __init__(self) -> None:
        self._jobs = dict[int, Job]()
        self._chats = dict[int, Chat]()
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="miles-ui-jobs-"))  # 0700
        self._number = 0

    def launch(self, body: Json) -> Json:
        """Run `miles launch` with the words of `arguments`."""
        words = _split_words(_text(body, "arguments"))
        return self._start(["launch", *words])

    def stop(self, run: RunDir, body: Json) -> Json:
        """Run `miles stop`."""
        return self._start(["stop", str(run.path)])

    def rewards(self, run: RunDir, body: Json) -> Json:
        """Run `miles rewards try` with `reward`, on the newest `last` steps; empty: on all."""
        reward, last = _text(body, "reward").strip(), _text(body, "last").strip()
        if not reward or (last and not (last.isascii() and last.isdecimal())):
            raise BadRequest(
                "there is no reward to try",
                why="it needs the name of a reward, and a whole number of steps or none",
                fix='{"reward": "math", "last": "20"}',
            )
        newest = [f"--last={last}"] if last else []
        return self._start(
            ["--json", "rewards", "try", str(run.path), f"--reward={reward}", *newest]
        )

    def resume(self, run: RunDir, body: Json) -> Json:
        """Run `miles resume`, with the words of `arguments` after the run."""
        return self._start(["resume", str(run.path), *_split_words(_text(body, "arguments"))])

    def note(self, run: RunDir, body: Json) -> Json:
        """Save a note about a run."""
        try:
            write_note(run, _text(body, "note"))
        except (MilesError, OSError) as error:
            raise BadRequest(
                "the note was not kept",
                why=error.why if isinstance(error, MilesError) else str(error),
                fix=f"miles note {run.typed} TEXT",
            ) from None
        return {}

    def jobs(self) -> Json:
        """List the commands, newest first."""
        with self._lock:
            return {"jobs": [job.as_json() for job in reversed(self._jobs.values())]}

    def job(self, number: int) -> Json:
        """Return one command, and as `result` its JSON output: figures, or its error; None while it
        runs. Raises NotFound."""
        with self._lock:
            job = self._jobs.get(number)
        if job is None:
            raise NotFound(
                f"there is no command {number}",
                why="it is too old, or the server was started again",
                fix="run it again",
            )
        fields = job.as_json()
        return {
            **fields,
            "result": _result_in(job.output) if fields["exit_code"] is not None else None,
        }

    def chat(self, run: RunDir, body: Json) -> Json:
        """Start a chat with the checkpoint of step `step`; empty: the newest."""
        step = _text(body, "step")
        if step and not step.isdecimal():
            raise BadRequest(
                f"`{step[:40]}` is not a step", why="a step is a whole number", fix="step=0"
            )
        with self._lock:
            open_chats = [one for one in self._chats.values() if one.process.poll() is None]
            if len(open_chats) >= MAX_CHATS:
                raise Busy(
                    f"{MAX_CHATS} chats are open",
                    why="each holds a model in memory",
                    fix="end one of them",
                )
            subject = f"{run.path}@{step}" if step else str(run.path)
            process = subprocess.Popen(
                [sys.executable, "-m", "milescli", "--json", "chat", subject],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._number += 1
            shown = f"{run.name}@{step}" if step else run.name
            chat = self._chats[self._number] = Chat(id=self._number, subject=shown, process=process)
        chat.listen()
        return chat.as_json()

    def chat_of(self, number: int) -> Chat:
        """Return the chat with this number. Raises NotFound."""
        with self._lock:
            if (chat := self._chats.get(number)) is not None:
                return chat
        raise NotFound(
            f"there is no chat {number}",
            why="it was ended, or the server was started again",
            fix="start a new one",
        )

    def say(self, number: int, body: Json) -> Json:
        """Send a message to a model; its reply appears in `messages`."""
        chat, text = self.chat_of(number), _text(body, "text")
        if not text.strip():
            raise BadRequest("nothing was said", why="the text is empty", fix="type something")
        assert chat.process.stdin is not None
        try:
            chat.process.stdin.write(json.dumps({"text": text}).encode() + b"\n")
            chat.process.stdin.flush()
        except OSError:
            raise NotFound(
                f"chat {number} has ended", why=chat.status, fix="start a new one"
            ) from None
        chat.messages.append({"who": "user", "text": text, "tokens": []})
        return chat.as_json()

    def end(self, number: int, body: Json) -> Json:
        """End a chat."""
        chat = self.chat_of(number)
        _interrupt(chat)
        with self._lock:
            self._chats.pop(number, None)
        return {}

    def drop_unused(self) -> None:
        """End chats that no page has requested for a while."""
        with self._lock:
            for chat in [*self._chats.values()]:
                if time.monotonic() - chat.used_s > IDLE_S:
                    _interrupt(chat)
                    self._chats.pop(chat.id)

    def close(self) -> None:
        """End the chats, and remove the output of commands. Started runs continue: what they print
        goes to a file without a name."""
        with self._lock:
            chats = [*self._chats.values()]
        for chat in chats:
            _interrupt(chat)
        until = time.monotonic() + STOP_S
        for chat in chats:
            try:
                chat.process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(chat.process.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, words: Sequence[str]) -> Json:
        with self._lock:
            ended = [one for one in self._jobs.values() if one.process.poll() is not None]
            if len(self._jobs) >= MAX_JOBS and not ended:
                raise Busy(
                    f"{MAX_JOBS} commands run that this page started",
                    why="none of them has ended",
                    fix="miles runs   # which run; miles stop RUN ends one",
                )
            if len(self._jobs) >= MAX_JOBS:
                self._jobs.pop(ended[0].id).output.unlink(missing_ok=True)
            self._number += 1
            output = self._folder / f"{self._number}.log"
            with open(output, "xb") as opened:
                process = subprocess.Popen(
                    [sys.executable, "-m", "milescli", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=opened,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # it goes on when the page's server ends
                    env={**os.environ, "NO_COLOR": "1"},
                )
            job = Job(
                id=self._number,
                command=words,
                process=process,
                output=output,
                began_s=time.time(),
            )
            self._jobs[job.id] = job
            return job.as_json()


def _interrupt(chat: Chat) -> None:
    if chat.process.stdin is not None:
        with suppress(OSError):
            chat.process.stdin.close()  # as Ctrl-D
    with suppress(ProcessLookupError):
        chat.process.send_signal(signal.SIGINT)


def _text(body: Json, name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise BadRequest(
            f"`{name}` cannot be read",
            why=f"it is a text of at most {LONGEST_TEXT} characters",
            fix=f"send {name} as a shorter text",
        )
    return value


def _split_words(text: str) -> list[str]:
    """Split a command into words like a shell, without running one."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadRequest(
            "the command cannot be split into words", why=str(error), fix="close the quotes"
        ) from None
    if len(words) > MAX_ARGUMENTS:
        raise BadRequest(
            f"the command has {len(words)} words",
            why=f"at most {MAX_ARGUMENTS} are taken",
            fix="put the settings into a recipe: miles launch --recipe FILE",
        )
    return words


def _result_in(file: Path) -> Json | None:
    """Return the last object of a command with `--json`, with the first of many samples."""
    try:
        with open(file, "rb") as opened:
            lines = opened.read(RESULT_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with suppress(ValueError):
            found = parse_json(line)
            if isinstance(found, dict) and found.get("kind") in ("rewards", "error"):
                flips = found.get("flips", [])
                return {**found, "flips": flips[:MAX_FLIPS], "num_flips": len(flips)}
    return None


def _end_of(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - OUTPUT_BYTES))
            return opened.read(OUTPUT_BYTES).decode(errors="replace")
    except OSError:
        return ""
