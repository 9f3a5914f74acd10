"""Drives the real `miles` binary in real processes, and reads what it left behind. Shared by the
tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from milescli.core.run_processes import TOKEN_VARIABLE, processes_of
from tests.chaos.oracle import SECONDS
from tests.waiting import PIPE_BYTES, until

MILES = Path(sys.executable).with_name("miles")
SECRET_NAME = "SOME_SERVICE_TOKEN"
"""Of a variable that only the driver, and code of the user's, may see."""
ROOT = Path(__file__).resolve().parents[2]
TINY = """\
description: A very small run for tests
model:
  scratch: {hidden_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 16,
            ffn_hidden_size: 128}
data:
  prompts: "task:sums[0:512]"
  demonstrations: "task:sums[0:512]"
  eval: task:sums-heldout
  max_prompt_tokens: 48
warmup: {steps: 3, batch_size: 16, lr: 2e-3}
rollout: {prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 16,
          reward: "tests.end_to_end.rewards:variety"}
train: {steps: 6, optimizer: {lr: 3e-4}}
eval: {num_prompts: 8}
checkpoint: {every: 3, keep: 4}
run: {trackers: []}
machine: {cpu_threads: 1, start_timeout_s: 480, step_timeout_s: 120}
"""
"""`cpu_threads: 1`: sums over threads have a fixed order, and parallel tests of a small machine do
not starve each other."""


@dataclass(frozen=True)
class Finished:
    """How one `miles` process ended."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-6000:]}"


def _number(path: Path) -> int:
    """Of `step_3` or `step_3.jsonl`."""
    return int(path.stem.removeprefix("step_"))


@dataclass
class Workplace:
    """A folder with a recipe in it, where `miles` is called as a user would."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "tiny.yaml").write_text(TINY)
        self.environment = {
            # first, as no process changes it: one that does has no title (`sglang::scheduler`)
            "COLUMNS": "120",
            **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
            "HOME": str(self.folder),
            "PYTHONPATH": str(ROOT),
            SECRET_NAME: "not-for-everybody",
        }
        self.environment.pop(TOKEN_VARIABLE, None)

    def start(self, *arguments: str, import_from: Path | None = None) -> subprocess.Popen[str]:
        """Start `miles` and go on. `import_from`: a folder of the user's own modules."""
        environment = dict(self.environment)
        if import_from is not None:
            environment["PYTHONPATH"] += f"{os.pathsep}{import_from}"
        return subprocess.Popen(
            [str(MILES), *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            text=True,
            start_new_session=True,
        )

    def miles(
        self, *arguments: str, import_from: Path | None = None, timeout_s: float = 1200.0
    ) -> Finished:
        """Call `miles` and wait for its end."""
        return self.finish(self.start(*arguments, import_from=import_from), timeout_s=timeout_s)

    def finish(self, process: subprocess.Popen[str], *, timeout_s: float = 1200.0) -> Finished:
        """Wait for the end of a process that was started."""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(
                f"not finished after {timeout_s} s\n{Finished(process.returncode, out, err)}"
            ) from None
        return Finished(process.returncode, out, err)

    def resume_and_profile(self, name: str, *options: str) -> tuple[Finished, Finished]:
        """Resume a run, and ask for a profile while it starts: how both ended."""
        before = len(self.events(name))
        resumed = self.start("resume", name)
        self.wait_for(name, lambda event: event.get("phase") == "start", resumed, after=before)
        profiled = self.miles("profile", name, *options)
        return self.finish(resumed), profiled

    def run(self, name: str) -> Path:
        """The directory of a run."""
        return self.folder / "runs" / name

    def copy_run(self, name: str, to: str) -> Path:
        """Another run with the same past, for a test that goes on with it or changes it."""
        return Path(shutil.copytree(self.run(name), self.run(to), symlinks=True))

    def resume_without(self, name: str, *, step: int) -> str:
        """Do the end of a run once more, in a copy without its last checkpoint, that of `step`, and
        all that came behind the one before: the name of the copy."""
        again = f"{name}-again"
        run = self.copy_run(name, again)
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
        shutil.rmtree(run / "journal", ignore_errors=True)
        kept = max(_number(path) for path in (run / "checkpoints").glob("step_*"))
        for path in (run / "rollouts").glob("step_*.jsonl"):
            if _number(path) > kept:
                path.unlink()
        before = [event for event in self.events(again) if event.get("step", 0) <= kept]
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in before))
        finished = self.miles("resume", again)
        assert finished.code == 0, finished
        return again

    def export(self, name: str, *, step: int) -> Path:
        """A step of a run as a Hugging Face folder."""
        folder = self.folder / f"{name}-{step}"
        finished = self.miles("export", name, "--to", str(folder), "--step", str(step))
        assert finished.code == 0, finished
        return folder

    def events(self, name: str) -> list[dict]:
        """Everything that happened in a run, so far."""
        file = self.run(name) / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def samples(self, name: str, step: int) -> list[dict]:
        """Those of a step that are kept, without the log-probs of engines: which requests are
        computed together changes their last bits."""
        file = self.run(name) / "rollouts" / f"step_{step}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        for sample in samples:
            for line in sample["lines"]:
                del line["logprobs"]
        return samples

    def steps(self, name: str) -> list[dict]:
        """Its StepDone, of all attempts."""
        return [event for event in self.events(name) if event["event"] == "StepDone"]

    def wait_for(
        self,
        name: str,
        condition: Callable[[dict], bool],
        process: subprocess.Popen[str],
        *,
        after: int = 0,
        seconds: float = 800.0,
    ) -> dict:
        """Wait for an event of a run behind the first `after`; fails where its process ends
        before."""

        def look() -> dict | None:
            has_ended = process.poll() is not None
            found = next(filter(condition, self.events(name)[after:]), None)
            assert found or not has_ended, f"ended before the event\n{self.finish(process)}"
            return found

        try:
            return until(look, "an event", within_s=seconds)
        except AssertionError as error:
            process.kill()
            raise AssertionError(f"{error}; the last were {self.events(name)[-3:]}") from None


def tokens(file: Path) -> list[list[int]]:
    """Of the responses of a file of samples."""
    return [json.loads(line)["response_ids"] for line in file.read_text().splitlines()]


def learned(step: dict) -> tuple[dict, dict]:
    """What was sampled and learned in a step, without seconds."""
    report = {name: value for name, value in step["report"].items() if name not in SECONDS}
    return report, step["rollout"]


def step_done(step: int) -> Callable[[dict], bool]:
    """The event of one RL step."""
    return lambda event: event["event"] == "StepDone" and event["step"] == step


def saved(step: int) -> Callable[[dict], bool]:
    """The event of one complete checkpoint."""
    return lambda event: event["event"] == "CheckpointSaved" and event["step"] == step


def processes_of_run(driver: int) -> list[psutil.Process]:
    """All processes that carry the token of the run that `driver` drives."""
    for child in psutil.Process(driver).children(recursive=True):
        try:
            token = child.environ().get(TOKEN_VARIABLE)
        except psutil.Error:
            continue
        if token:
            return [psutil.Process(pid) for pid in processes_of(token)]
    raise AssertionError(f"process {driver} has no child with a token")


def actor_of(driver: int, log: str, *, mark: str = "ray::") -> psutil.Process:
    """The process of a run that writes this log, as `trainer-rank-0.log`, and is one of Ray's
    actors, or has another mark in its command line."""
    [actor] = [
        one
        for one in processes_of_run(driver)
        if any(Path(file.path).name == log for file in one.open_files())
        and mark in " ".join(one.cmdline())
    ]
    return actor


def wait_until_gone(
    processes: list[psutil.Process], seconds: float = 120.0
) -> list[psutil.Process]:
    """Those of the processes that still run after the wait."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def listening_beyond_loopback(processes: list[psutil.Process]) -> list[str]:
    """`name address` of every socket of the processes that others could reach."""
    pids = {process.pid for process in processes}
    return [
        f"{psutil.Process(socket.pid).name()} {socket.laddr.ip}:{socket.laddr.port}"
        for socket in psutil.net_connections(kind="inet")
        if socket.status == psutil.CONN_LISTEN
        and socket.pid in pids
        and not _is_loopback(socket.laddr.ip)
    ]


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"
