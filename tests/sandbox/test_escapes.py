"""Ways out of a sandbox, each tried against each kind: none may work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.sandbox.conftest import Run

SECRET = "a-secret-of-the-driver"
TRY = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    return "allowed" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def attempt(work):
    try:
        return f"allowed {work()!r:.80}"
    except (OSError, ValueError) as error:
        return f"refused {type(error).__name__}"
"""
X86_CALLS = {
    "ptrace": (101, 0),
    "socket": (41, 1, 1, 0),
    "vsock": (41, 40, 1, 0),
    "netlink": (41, 16, 3, 0),
    "io_uring": (425, 8, 0),
    "bpf": (321, 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "unshare user": (272, 0x10000000),
    "unshare mounts": (272, 0x20000),
    "clone into a user namespace": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "open_tree": (428, -100, 0, 0),
    "chroot": (161, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "userfaultfd": (323, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "shmget": (29, 0, 4096, 0o1666),
    "shmat of another": (30, 0, 0, 0),
    "shmctl of another": (31, 0, 2, 0),
    "semop of another": (65, 0, 0, 0),
    "msgrcv of another": (70, 0, 0, 0, 0, 0),
    "msgsnd of another": (69, 0, 0, 0, 0),
    "inotify": (294, 0),
    "memfd_create": (319, 0, 0),
    "open_by_handle_at": (304, -100, 0, 0),
    "personality": (135, 0x0040000),
    "clone3": (435, 0, 0),
    "x32": (0x40000000 + 41, 1, 1, 0),
    "newer than the list": (470, 0),
    "setpriority": (141, 0, 1, 5),
    "prlimit of another": (302, 1, 7, 0, 0),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_calls_that_lead_out_are_denied(run: Run) -> None:
    asked = [f"print({name!r}, call(*{numbers!r}))" for name, numbers in X86_CALLS.items()]
    told = run(TRY + "\n".join(asked)).stdout.splitlines()
    assert len(told) == len(asked)
    assert not [line for line in told if line.split()[-1] not in ("EPERM", "ENOSYS")]


def test_no_address_can_be_reached(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"socket.create_connection(('127.0.0.1', {port}), 2)"
        told = run(TRY + f"import socket\nprint(attempt(lambda: {reach}))").stdout
    assert told.startswith("refused")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/passwd",
        "/proc/1/environ",
        "/proc/self/environ",
        "/proc/self/mem",
        f"/proc/{os.getpid()}/environ",
        f"/proc/{os.getpid()}/maps",
        "/root/.bashrc",
        "/dev/mem",
        "/dev/tty",
        "/sys/kernel/notes",
        "/var/run/docker.sock",
        __file__,
        str(Path.home()),
        "/tmp/../etc/shadow",
    ],
)
def test_what_is_not_its_own_cannot_be_read(run: Run, path: str) -> None:
    code = f"""
def read():
    return os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}, "rb").read(1)
print(attempt(read))
"""
    assert run(TRY + code).stdout.startswith("refused")


@pytest.mark.parametrize(
    "path", ["/usr/x", "/usr/bin/python3", "/etc/x", "/x", "/var/tmp/x", "/dev/x", "/opt/x"]
)
def test_nothing_else_can_be_written(run: Run, path: str) -> None:
    assert run(TRY + f"print(attempt(lambda: open({path!r}, 'ab')))").stdout.startswith("refused")


def test_its_python_cannot_be_changed(run: Run) -> None:
    code = """
folder = os.path.dirname(os.__file__)
print(attempt(lambda: open(folder + "/os.py", "ab")))
print(attempt(lambda: open(folder + "/sitecustomize.py", "w")))
"""
    assert [line.split()[0] for line in run(TRY + code).stdout.splitlines()] == ["refused"] * 2


def test_a_link_leads_nowhere(run: Run) -> None:
    code = """
os.symlink("/etc/shadow", "soft")
print(attempt(lambda: open("soft").read()))
print(attempt(lambda: os.link("/etc/shadow", "hard")))
os.symlink("/", "root")
print(attempt(lambda: os.listdir("root/home")))
print(attempt(lambda: open("root/etc/new", "w")))
print(attempt(lambda: os.rename("/usr/bin/env", "env")))
print(attempt(lambda: os.truncate("/usr/bin/env", 0)))
print(attempt(lambda: os.chmod("/usr/bin/env", 0o777)))
"""
    assert {line.split()[0] for line in run(TRY + code).stdout.splitlines()} == {"refused"}


def test_files_of_ours_keep_their_properties(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(SECRET)
    before = mine.stat()
    path = str(mine)
    code = f"""
for work in (
    lambda: open({path!r}).read(),
    lambda: os.truncate({path!r}, 0),
    lambda: os.chmod({path!r}, 0o777),
    lambda: os.utime({path!r}, (0, 0)),
    lambda: os.setxattr({path!r}, "user.x", b"y"),
    lambda: os.unlink({path!r}),
    lambda: os.rename({path!r}, "here"),
):
    print(attempt(work))
"""
    told = run(TRY + code).stdout.splitlines()
    assert len(told) == 7 and {line.split()[0] for line in told} == {"refused"}
    after = mine.stat()
    assert mine.read_text() == SECRET
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_the_environment_of_the_driver_is_not_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", SECRET)
    code = """
import glob
print(dict(os.environ), sys.argv, sys.orig_argv)
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    print(attempt(lambda: open(path).read()))
"""
    told = run(TRY + code).stdout
    assert "PATH" in told and SECRET not in told and "A_KEY" not in told


def test_processes_of_others_cannot_be_signalled_or_traced(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        code = f"""
for pid in ({other.pid}, {os.getpid()}, os.getppid(), -1):
    print(attempt(lambda: os.kill(pid, {int(signal.SIGTERM)})) if pid > 0 else "")
print(call(101, 16, {other.pid}, 0, 0))
"""
        run(TRY + code)
        assert other.poll() is None
        other.communicate(timeout=120)


def test_a_signal_to_all_reaches_its_own_alone(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        run("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass")
        assert other.poll() is None
        other.communicate(timeout=120)
    assert run("print(1)").stdout == "1\n"


def test_a_daemon_does_not_outlive_its_run(run: Run, tmp_path: Path) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(256):
            try: os.close(descriptor)
            except OSError: pass
        time.sleep(1.5)
        while True: pass
    os._exit(0)
os.wait()
print("gone")
"""
    before = _busy()
    assert run(code).stdout == "gone\n"
    assert _busy() <= before


def _busy() -> set[int]:
    """Processes of the users that runs have, or of ours that are called as Python is."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and b"JOB" in Path(f"/proc/{name}/cmdline").read_bytes():
                found.add(int(name))
        except OSError:
            continue
    return found


def test_closing_or_flooding_the_descriptors_is_its_own_loss(run: Run) -> None:
    code = """
import os
for descriptor in range(256):
    try: os.write(descriptor, b"x" * 100)
    except OSError: pass
os.closerange(0, 256)
while True: pass
"""
    assert run(code, wall_s=1.0).ended == "timeout"
    assert run("print(1)").stdout == "1\n"


def test_nothing_of_ours_is_open_or_can_be_imported(run: Run) -> None:
    code = """
import os, sys
opened = []
for descriptor in range(256):
    try: os.fstat(descriptor); opened.append(descriptor)
    except OSError: pass
print(opened, [name for name in sys.modules if name.startswith("milescli")])
try:
    import milescli
    print("found", milescli)
except ImportError:
    print("none")
"""
    assert run(code).stdout == "[0, 1, 2] []\nnone\n"


def test_what_is_beside_the_code_is_not_run_by_itself(run: Run) -> None:
    files = dict.fromkeys(("sitecustomize.py", "usercustomize.py"), "print('ran by itself')")
    files["x.pth"] = "import os; print('ran by itself')"
    assert run("print(1)", files=files).stdout == "1\n"


def test_runs_at_once_do_not_see_each_other(run: Run) -> None:
    told: list[str] = []
    waits = "open('secret', 'w').write('s'); import time; time.sleep(2)"
    other = threading.Thread(target=lambda: told.append(run(waits).ended))
    other.start()
    code = """
import glob, os, time
seen = []
for _ in range(10):
    seen += glob.glob("/tmp/**/secret", recursive=True)
    for pid in range(os.getpid() - 50, os.getpid() + 50):
        try:
            if pid not in (os.getpid(), os.getppid()) and pid > 1: os.kill(pid, 9); seen.append(pid)
        except OSError: pass
    time.sleep(0.1)
print(seen)
"""
    assert run(code).stdout == "[]\n"
    other.join(timeout=120)
    assert told == ["exited"]


def test_privileges_are_gone_and_cannot_be_had(run: Run) -> None:
    code = """
for work in (lambda: os.setuid(0), lambda: os.setgroups([0]), lambda: os.nice(-5)):
    print(attempt(work))
print(os.getuid() == 0)
"""
    told = run(TRY + code).stdout.splitlines()
    assert {line.split()[0] for line in told[:3]} == {"refused"} and told[3] == "False"
