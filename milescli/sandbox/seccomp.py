"""Builds the seccomp filter that denies system calls to a model's code, as a BPF program of the
kernel. Written by hand, because pyseccomp needs a libseccomp.so that not every machine has. Used by
both local kinds.

Calls that are not listed here are allowed; the kernel's own permissions, bubblewrap or Landlock
restrict them. Calls newer than the list return ENOSYS, as an older kernel would."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable

_NEWEST = 462
"""Newest system call that was considered for this list (mseal)."""
_NEITHER = -1
_ARCH = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""machine -> AUDIT_ARCH, and its column below."""

_DENIED: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64)
    "socket": (41, 198),  # also vsock and netlink, which no network namespace holds
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "personality": (135, 92),
    "modify_ldt": (154, _NEITHER),
    "iopl": (172, _NEITHER),
    "ioperm": (173, _NEITHER),
    "uselib": (134, _NEITHER),
    "lookup_dcookie": (212, 18),
    # what would outlive the run, or hold memory that is no process's
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # of other processes of the same user: what they have made of it
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_unlink": (241, 181),
    "inotify_init": (253, _NEITHER),
    "inotify_init1": (294, 26),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # of other processes of the same user
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
SAME_USER = {
    "chmod": (90, _NEITHER),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, _NEITHER),
    "fchown": (93, 55),
    "lchown": (94, _NEITHER),
    "fchownat": (260, 54),
    "utime": (132, _NEITHER),
    "utimes": (235, _NEITHER),
    "futimesat": (261, _NEITHER),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
"""System calls to forbid with Landlock without another uid: it does not restrict changes of a
file's properties."""
TRUNCATE = {"truncate": (76, 45)}
"""System calls to forbid with Landlock before its version 3."""
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
"""System calls to forbid with Landlock before its version 6, without another uid: signals would
reach our own processes."""
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_SOCKETPAIR, _IOCTL = (53, 199), (16, 29)
_NAMESPACES = 0x7E020080
"""The flags CLONE_NEW*."""
_TERMINAL = (0x5412, 0x541C, 0x5437)
"""TIOCSTI, TIOCLINUX, TIOCSETD: they type into a terminal."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def supported() -> bool:
    """Return True if there is a table of this machine's system calls."""
    return os.uname().machine in _ARCH


def program(*more: dict[str, tuple[int, int]]) -> bytes:
    """Return the filter for this machine; `more` are tables of further calls to deny."""
    architecture, column = _ARCH[os.uname().machine]
    denied = [numbers[column] for table in (_DENIED, *more) for numbers in table.values()]
    lines = [
        *_unless(_ARCHITECTURE, _EQUAL, architecture, _KILL),
        _line(_LOAD, _NUMBER),
        # beyond the list; on x86_64 also the calls of x32, which have a bit of their own
        *_where(_AT_LEAST, _NEWEST + 1, _errno(errno.ENOSYS)),
        *_where(_EQUAL, _CLONE3[column], _errno(errno.ENOSYS)),  # flags out of sight: clone instead
    ]
    for number in denied:
        if number != _NEITHER:
            lines += _where(_EQUAL, number, _errno(errno.EPERM))
    lines += _of(_CLONE[column], [(0, _ANY_BIT, _NAMESPACES, True)])
    lines += _of(_PRLIMIT[column], [(0, _EQUAL, 0, False)])  # of itself alone
    lines += _of(_SOCKETPAIR[column], [(0, _EQUAL, 1, False)])  # AF_UNIX alone
    lines += _of(_IOCTL[column], [(1, _EQUAL, request, True) for request in _TERMINAL])
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _errno(number: int) -> int:
    return _ERRNO | number


def _line(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _where(test: int, value: int, action: int) -> list[bytes]:
    """Return instructions that do `action` if the loaded value passes the test."""
    return [_line(test, value, if_false=1), _line(_RETURN, action)]


def _unless(place: int, test: int, value: int, action: int) -> list[bytes]:
    return [_line(_LOAD, place), _line(test, value, if_true=1), _line(_RETURN, action)]


def _of(number: int, rules: Iterable[tuple[int, int, int, bool]]) -> list[bytes]:
    """Return the instructions of one call's rules (argument, test, value, True if passing the test
    is denied); the number of the call is loaded again at the end."""
    body: list[bytes] = []
    for argument, test, value, is_denied in rules:
        body.append(_line(_LOAD, _FIRST_ARGUMENT + 8 * argument))
        deny = _line(_RETURN, _errno(errno.EPERM))
        if is_denied:
            body += [_line(test, value, if_false=1), deny]
        else:
            body += [_line(test, value, if_true=1), deny]
    body.append(_line(_RETURN, _ALLOW))
    return [_line(_EQUAL, number, if_false=len(body)), *body]
