"""Finds the processes of a run by what they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from milescli.cluster.watchdog import WATCHED_VARIABLE
from milescli.core.run_processes import TOKEN_VARIABLE, processes_of


def _named(name: str) -> Callable[[psutil.Process], bool]:
    return lambda process: process.name().startswith(name)


def _titled(title: str) -> Callable[[psutil.Process], bool]:
    return lambda process: process.cmdline()[:1] == [title]


def _writes(log: str, mark: str) -> Callable[[psutil.Process], bool]:
    """With `mark` in its command line, and a log of this name open."""
    return lambda process: (
        mark in " ".join(process.cmdline())
        and any(Path(opened.path).name == log for opened in process.open_files())
    )


ROLES: dict[str, Callable[[psutil.Process], bool]] = {
    "scheduler": _writes("engine-0-server.log", "sglang::scheduler"),
    "detokenizer": _writes("engine-0-server.log", "sglang::detokenizer"),
    "server": _writes("engine-0-server.log", "warm_process"),
    "engine-actor": _writes("engine-0.log", "ray::"),
    "rank": _writes("trainer-rank-0.log", "ray::"),
    "raylet": _named("raylet"),
    "gcs": _named("gcs_server"),
    "warm-process": lambda process: (
        "sglang.warm_process" in " ".join(process.cmdline()) and not process.open_files()
    ),
    "ray-agent": _titled("ray::DashboardAgent"),
    "ray-environments": _titled("ray::RuntimeEnvAgent"),
    "reward": lambda process: "milescli.workers.child" in " ".join(process.cmdline()),
    "environment": lambda process: "milescli.workers.child" in " ".join(process.cmdline()),
}
"""Role -> whether a process of the run has it."""


class RunProcesses:
    """Of the run of one `miles launch` or `resume`."""

    def __init__(self, parent: int) -> None:
        """`parent`: process id of the command."""
        self.parent = psutil.Process(parent)
        self.tokens = set[str]()
        self.temp_dirs = set[Path]()
        """Below /tmp; to be gone with the run."""

    def look(self) -> None:
        """Learn what is to be gone afterwards. Called again and again: a driver that is started
        again has another token, and both must leave nothing."""
        try:
            children = self.parent.children(recursive=True)
        except psutil.Error:
            return
        for child in children:
            try:
                environment = child.environ()
            except psutil.Error:
                continue
            if token := environment.get(TOKEN_VARIABLE):
                self.tokens.add(token)
            place = Path(environment.get("TMPDIR", "/"))
            if place.parent.name.startswith("miles-"):
                self.temp_dirs.add(place.parent)

    def find(self, role: str) -> list[psutil.Process]:
        """Those that live in this role, oldest first."""
        if role == "parent":
            return [self.parent]
        if role == "driver":
            return self.parent.children()[:1]
        if role == "watchdog":
            return self.watchdogs()
        return sorted(
            (process for process in self.all() if _is(process, ROLES[role])),
            key=lambda process: (process.create_time(), process.pid),
        )

    def watchdogs(self) -> list[psutil.Process]:
        """Of the run: nobody's children, without its token."""
        self.look()
        marks = {f"{WATCHED_VARIABLE}={token}".encode() for token in self.tokens}
        found = []
        for process in psutil.process_iter():
            try:
                lines = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if marks & set(lines) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def all(self) -> list[psutil.Process]:
        """All that carry a token of the run now."""
        self.look()
        found = []
        for pid in (pid for token in self.tokens for pid in processes_of(token)):
            try:
                found.append(psutil.Process(pid))
            except psutil.Error:
                continue
        return found


def _is(process: psutil.Process, role: Callable[[psutil.Process], bool]) -> bool:
    try:
        return role(process)
    except psutil.Error:  # it has just ended
        return False
