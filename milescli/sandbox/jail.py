"""How one run is shut off: the command that starts it, and the job that is sent inside. By
bubblewrap, or by Landlock with a warden around it. Starts nothing; called by the supervisor.

bubblewrap: namespaces of users, processes, network, IPC and host name; nothing of the machine but
/usr, Python and five devices, all read-only; no /proc; one folder in memory. Landlock: files as
they are, of which only those can be opened. Both: seccomp, rlimits, no new privileges, and, where
we are root, a user of its own for each run. What remains under Landlock: that files exist, and how
large they are, can be seen; without root the user is ours (seccomp then denies it to change files'
properties and, before Landlock 6, to send signals); process numbers are the machine's.
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.sandbox import landlock, seccomp
from milescli.sandbox.processes import tasks_of_user

PYTHON_INSIDE, PACKAGES_INSIDE, FOLDER_INSIDE = "/opt/python", "/opt/packages", "/tmp"
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/full"]
_SYSTEM = ["/usr", "/bin", "/lib", "/lib64", "/lib32"]
_SETTINGS = ["/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"]
NUM_SLOTS = 256
"""Number of concurrent runs and sessions; each has a user of its own."""
FIRST_UIDS = range(50_000, 65_000, NUM_SLOTS)
"""First user id of each range; every supervisor reserves one range for its runs."""
_reserved: list[socket.socket] = []
"""Sockets whose names reserve the user ids of this process."""
_BOOT = (
    "import marshal,os;c,j=marshal.loads(os.pread({0},os.fstat({0}).st_size,0));os.close({0});"
    "exec(c,{{'__name__':'inside','JOB':j}})"
)
_WARD = "import sys;sys.path.insert(0,{!r});from milescli.sandbox.warden import main;main()"
_OPTIONS = ["-I", "-S", "-B", "-X", "utf8"]
_NEW_NAMESPACE, _BIND, _PRIVATE = 0x20000, 0x1000 | 0x4000, 0x40000 | 0x4000
_ROOM_FOR_OURS = 64
"""Processes and threads that our own user may start meanwhile, if a run has no user of its own."""
_LOCK, _DETACH = 0x1000 | 0x20 | 0x1 | 0x2, 2
"""Remount what is bound read-only and without setuid; let go of a mount."""
_TOOLS = {"PATH": "/usr/bin:/bin"}


def reserve_users() -> int:
    """Return the first of NUM_SLOTS user ids that no other live supervisor on this computer has: a
    program may signal all processes of its user. Raises OSError if there are none left."""
    for first in FIRST_UIDS:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0miles-sandbox-users-{first}")  # gone with this process
        except OSError:
            name.close()
            continue
        _reserved.append(name)
        return first
    raise OSError(f"{len(FIRST_UIDS)} other sandboxes on this computer have all users for runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """Builds the commands of one supervisor's runs, and holds what they share."""

    kind: str
    """`bubblewrap` or `landlock`."""
    bwrap: str
    """Path of bubblewrap; empty for Landlock."""
    prefix: str
    """Folder of Python, as another user can reach it."""
    python: str
    """The interpreter, below the prefix."""
    packages: str
    """Folder of modules besides the standard library; empty: none."""
    root: str
    """Folder that holds our own package, for the warden."""
    folder: str
    """Folder of this supervisor."""
    first_uid: int = -1
    """First of its runs' users, if we are root."""

    def uid_of(self, slot: int) -> int | None:
        """Return the run's own user id if we are root, because the kernel does not count root's
        processes."""
        if os.geteuid() != 0:
            return None
        return self.first_uid + slot

    def command(self, job_fd: int, *, leash: int, filter_fd: int, file_bytes: int) -> list[str]:
        """Return the command that starts a run; it inherits the descriptors."""
        if self.kind == "landlock":
            boot, python = _WARD.format(self.root), f"{self.prefix}/{self.python}"
            return [python, *_OPTIONS, "-c", boot, str(job_fd), str(leash)]
        python = f"{PYTHON_INSIDE}/{self.python}"
        command = [
            self.bwrap,
            "--unshare-user",
            "--unshare-all",
            "--disable-userns",
            "--die-with-parent",
        ]
        command += ["--new-session", "--hostname", "sandbox", "--seccomp", str(filter_fd)]
        for path in _SYSTEM:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
        for path in _SETTINGS:
            command += ["--ro-bind-try", path, path]
        for path in DEVICES:
            command += ["--dev-bind", path, path]
        command += ["--symlink", FOLDER_INSIDE, "/dev/shm"]  # where semaphores live
        command += ["--ro-bind", self.prefix, PYTHON_INSIDE]
        if self.packages:
            command += ["--ro-bind", self.packages, PACKAGES_INSIDE]
        command += ["--size", str(max(file_bytes, 1 << 16)), "--tmpfs", FOLDER_INSIDE]
        command += ["--remount-ro", "/", "--chdir", FOLDER_INSIDE]
        return [*command, python, *_OPTIONS, "-c", _BOOT.format(job_fd)]

    def job(self, request: Mapping[str, Any], *, slot: int, folder: str, control: int) -> bytes:
        """Encode the job that is sent inside. `request` has code (None: a session), files and
        limits."""
        is_landlock, uid = self.kind == "landlock", self.uid_of(slot)
        num_processes = request["limits"]["num_processes"]
        others = 0 if is_landlock else 1  # bubblewrap's own
        if is_landlock and uid is None:
            others = tasks_of_user(os.getuid()) + _ROOM_FOR_OURS
        packages = self.packages if is_landlock or not self.packages else PACKAGES_INSIDE
        job = {
            "code": request["code"],
            "files": request["files"],
            "limits": request["limits"],
            "max_tasks": num_processes + others,
            "packages": [packages] if packages else [],
            "control": control,
        }
        if is_landlock:
            library = f"{self.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
            job |= {
                "uid": uid,
                "folder": folder,
                "filter": filter_for(uid),
                "readable": [*_SYSTEM, *_SETTINGS, self.prefix, *job["packages"]],
                "devices": DEVICES,
                "path": [library, f"{library}/lib-dynload"],
            }
        return marshal.dumps((_inside(), job))

    def environment(self, folder: str) -> dict[str, str]:
        """Return the complete environment of the code."""
        home = folder if self.kind == "landlock" else FOLDER_INSIDE
        python = self.prefix if self.kind == "landlock" else PYTHON_INSIDE
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": f"{python}/lib",
            # a thread for each core would count against the number of processes
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }


def filter_for(uid: int | None) -> bytes:
    """Return the seccomp filter that denies what this version of Landlock does not."""
    kernel, more = landlock.version(), []
    if kernel < landlock.TRUNCATE_SINCE:
        more.append(seccomp.TRUNCATE)
    if uid is None:
        more.append(seccomp.SAME_USER)
        if kernel < landlock.SIGNALS_SINCE:
            more.append(seccomp.SIGNALS)
    return seccomp.program(*more)


def reachable(path: str, *, folder: str, name: str, may_mount: bool) -> str:
    """Return `path` in a form that any user can read: itself, or bound to `folder`/`name` if a
    parent is closed, as /root is. Raises PermissionError with those parents if we may not mount."""
    closed = closed_folders(path) if os.geteuid() == 0 else []
    if not closed:
        return path
    if str(Path(path).resolve()) == closed[-1]:
        raise PermissionError(" ".join(closed))  # bound elsewhere it would be closed, too
    place = f"{folder}/{name}"
    os.mkdir(place)
    libc = ctypes.CDLL(None, use_errno=True)
    from_to = path.encode(), place.encode(), None
    if not may_mount or libc.mount(*from_to, _BIND, None) or libc.mount(*from_to, _LOCK, None):
        raise PermissionError(" ".join(closed))
    return place


def clear(folder: str) -> None:
    """Remove the leftovers of runs from a supervisor's folder; bind mounts there are unmounted and
    never entered."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.isdigit():
                remove(f"{folder}/{name}")
            else:
                libc.umount2(f"{folder}/{name}".encode(), _DETACH)
                os.rmdir(f"{folder}/{name}")
        os.rmdir(folder)


def remove(folder: str) -> None:
    """Remove what a run has left, at any depth and with any permissions; follows no link."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            if os.path.lexists(folder):
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    nothing = subprocess.DEVNULL
                    subprocess.run([*command, folder], env=_TOOLS, timeout=60.0, stderr=nothing)


def own_mounts() -> bool:
    """Move this process to its own mount namespace, so that only its children see its mounts.
    Return False if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACE) != 0:
        return False
    return libc.mount(b"none", b"/", None, _PRIVATE, None) == 0


def closed_folders(path: str) -> list[str]:
    """Return the folders from the root to `path` that others may not enter."""
    whole = Path(path).resolve()
    folders = [*reversed(whole.parents), whole]
    return [str(folder) for folder in folders if not folder.stat().st_mode & 0o001]


_compiled: list[Any] = []


def _inside() -> Any:
    if not _compiled:
        path = Path(__file__).with_name("inside.py")
        _compiled.append(compile(path.read_text(encoding="utf-8"), "<sandbox>", "exec"))
    return _compiled[0]
