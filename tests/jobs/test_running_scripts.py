"""How the scripts for SLURM and ssh behave: with stand-ins for srun, ssh, Ray and miles, since no
cluster is at hand that fails on demand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from milescli.jobs.script import Form, script
from tests.jobs.planned import job
from tests.waiting import until

STAND_INS = {
    "srun": """
while [ "$1" != bash ]; do
  case $1 in --nodelist=*) node=${1#*=} ;; --output=*) log=${1#*=} ;; esac
  shift
done
exec "$@" >"${log/\\%N/$node}" 2>&1""",
    "ssh": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$2" = hostnames ]; then printf "n1\\nn2\\n"; else echo "$@" >>scontrol.log; '
    "fi",
    "ray": 'echo "$*" >>ray.log; echo $$ >>ray.pids; exec sleep 60',
    "python": """
until [ -s ray.pids ]; do sleep 0.02; done
head -n "$(wc -l 2>/dev/null <ray.log)" present""",
    "miles": """
trap "kill %1; exit 75" TERM
trap 'echo "$MILES_GRACE_S" >>grace.log; kill %1; exit 75' USR1
echo "$*" >>miles.log; echo $$ >miles.pid; touch started
[ -f finish ] || { sleep 60 & wait; }""",
}
"""Name -> what it does. `present`: the hosts that Ray runs on, in the order in which it is started,
asked for once it runs on the first; `finish`: miles is done at once."""
WAIT_S = 120
"""For what takes a moment."""


def is_stand_in(pid: str) -> bool:
    """Whether this process still is the stand-in for Ray; its number may be another's by now."""
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A folder with a script for two nodes and all that it calls."""

    folder: Path
    file: Path

    def start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "HOSTS": "127.0.0.1 127.0.0.2",
        }
        return subprocess.Popen(
            ["bash", str(self.file)],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def log(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        until(happened, what, within_s=WAIT_S)

    def rays_alive(self) -> bool:
        return any(map(is_stand_in, (self.folder / "ray.pids").read_text().split()))

    def assert_clean(self) -> None:
        assert not self.rays_alive()
        assert not list(self.folder.glob(".miles-job-*"))


def stage(folder: Path, form: Form, *, present: str, start_timeout_s: float = 60.0) -> Stage:
    """`present`: the hosts that Ray runs on, a line each."""
    tools = folder / "tools"
    made = job(
        f"machine.start_timeout_s={start_timeout_s}",
        machine="2xcpu",
        folder=folder,
        bin_dir=tools,
        run__name="--name mine",
    )
    text = script(made, form)
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    (folder / "present").write_text(present)
    (folder / "job.sh").write_text(text)
    return Stage(folder=folder, file=folder / "job.sh")


ALL: dict[Form, str] = {"slurm": "n1\nn2\n", "ssh": "127.0.0.1\n127.0.0.2\n"}


@pytest.mark.parametrize("form", ALL)
def test_ray_is_started_everywhere_then_miles_on_its_address_and_all_is_ended(
    form: Form, tmp_path: Path
) -> None:
    at = stage(tmp_path, form, present=ALL[form])
    (tmp_path / "finish").touch()
    process = at.start()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    head, worker = at.log("ray")
    port = "10007" if form == "slurm" else "6379"
    assert "--head" in head and f"--port={port}" in head and "--num-gpus=0" in head
    (said,) = at.log("miles")
    address = said.rpartition("--address ")[2]
    assert f"--address={address}" in worker and address.endswith(f":{port}")
    assert (
        said.startswith("launch --recipe quickstart") and "--nodes 2 --gpus 0 --name mine" in said
    )
    at.assert_clean()


@pytest.mark.parametrize("form", ALL)
def test_a_run_that_is_there_already_is_gone_on_with(form: Form, tmp_path: Path) -> None:
    at = stage(tmp_path, form, present=ALL[form])
    for name in ("finish", "runs/mine/recipe.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    at.start().communicate(timeout=WAIT_S)
    said = [line.partition(" --address")[0] for line in at.log("miles")]
    assert said == ["resume runs/mine --supervised"]


@pytest.mark.parametrize(
    ("number", "requeues"), [(signal.SIGUSR1, ["requeue 7"]), (signal.SIGTERM, [])]
)
def test_only_a_time_limit_queues_a_job_again(
    number: signal.Signals, requeues: list[str], tmp_path: Path
) -> None:
    at = stage(tmp_path, "slurm", present=ALL["slurm"])
    process = at.start()
    at.until("miles starts", (tmp_path / "started").exists)
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    assert (process.returncode, at.log("scontrol")) == (75, requeues)
    grace = re.findall(r"--signal=B:USR1@(\d+)", at.file.read_text())
    assert at.log("grace") == grace[: len(requeues)]  # miles knows how long it has
    at.assert_clean()


def test_a_time_limit_before_the_start_is_a_failure_that_is_not_repeated(tmp_path: Path) -> None:
    at = stage(tmp_path, "slurm", present="n1\n")
    process = at.start()
    at.until("Ray starts on both nodes", lambda: len(at.log("ray")) == 2)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=WAIT_S)
    assert (
        process.returncode == 4
        and "error: the time limit is near" in err
        and not at.log("scontrol")
    )
    at.assert_clean()


@pytest.mark.parametrize(
    ("form", "present", "missing"), [("slurm", "n1\n", "n2"), ("ssh", "127.0.0.1\n", "127.0.0.2")]
)
def test_a_node_that_does_not_come_is_named(
    form: Form, present: str, missing: str, tmp_path: Path
) -> None:
    at = stage(tmp_path, form, present=present, start_timeout_s=1.0)
    process = at.start()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 4 and f"error: Ray did not start on {missing}\n" in err
    assert not at.log("miles")
    at.assert_clean()


@pytest.mark.parametrize("form", ALL)
def test_a_ray_that_ends_is_not_waited_for(form: Form, tmp_path: Path) -> None:
    at = stage(tmp_path, form, present="")
    (tmp_path / "tools/ray").write_text(
        "#!/bin/bash\necho $$ >>ray.pids; echo out of memory; exit 1\n"
    )
    process = at.start()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 4 and "error: Ray ended on" in err and "out of memory" in err
    at.assert_clean()


def test_ray_on_other_hosts_ends_with_the_script_however_that_ends(tmp_path: Path) -> None:
    at = stage(tmp_path, "ssh", present=ALL["ssh"])
    process = at.start()
    at.until("miles starts", (tmp_path / "started").exists)
    assert at.rays_alive()
    process.kill()
    process.wait(timeout=WAIT_S)
    at.until("Ray ends", lambda: not at.rays_alive())
    os.kill(int((tmp_path / "miles.pid").read_text()), signal.SIGTERM)


def test_ssh_wants_as_many_hosts_as_were_planned_for(tmp_path: Path) -> None:
    at = stage(tmp_path, "ssh", present="")
    done = subprocess.run(
        ["bash", str(at.file)],
        env={**os.environ, "HOSTS": "one"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (
        done.returncode == 4
        and "2 hosts are needed" in done.stderr
        and "HOSTS names 1" in done.stderr
    )


def test_no_key_and_no_token_is_in_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    at = stage(tmp_path, "ssh", present=ALL["ssh"])
    (tmp_path / "tools/ssh").write_text(f'#!/bin/bash\necho "$*" >>ssh.log\n{STAND_INS["ssh"]}\n')
    (tmp_path / "tools/ray").write_text(
        f"#!/bin/bash\necho $HF_TOKEN $(cat $RAY_AUTH_TOKEN_PATH) >>seen.log\n{STAND_INS['ray']}\n"
    )
    process = at.start()
    at.until(
        "both hosts start Ray, and miles",
        lambda: len(at.log("seen")) == 2 and bool(at.log("miles")),
    )
    process.terminate()
    process.communicate(timeout=WAIT_S)
    (seen,) = set(at.log("seen"))
    key, token = seen.split()
    assert (key, len(token)) == ("hf_verysecret", 64)
    commands = "\n".join([*at.log("ssh"), *at.log("ray"), *at.log("miles")])
    assert commands and key not in commands and token not in commands
