"""Restricts this process by Landlock: files, TCP, abstract sockets and signals. Uses system calls
through ctypes, because no maintained binding supports the newer versions. Called by the warden."""

from __future__ import annotations

import ctypes
import os
import struct

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_RIGHTS = (0, 13, 14, 15, 15, 16, 16, 16)
"""[version] number of access rights to files."""
_READ_FOLDER = (1 << 0) | (1 << 2) | (1 << 3)
"""Execute, read files, list folders."""
_READ_FILE, _WRITE_FILE = 1 << 2, 1 << 1
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6
TRUNCATE_SINCE, SIGNALS_SINCE = 3, 6

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none, or has it disabled."""
    return max(0, _libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION)))


def restrict(*, read: list[str], devices: list[str], write: str) -> None:
    """Restrict this process and its future children: folders in `read` can be read and executed,
    `devices` read and written, `write` fully used, and nothing else. Raises OSError."""
    kernel = version()
    known = min(kernel, len(_RIGHTS) - 1)
    rights = (1 << _RIGHTS[known]) - 1
    network = 0b11 if kernel >= _NETWORK_SINCE else 0  # to bind and to connect TCP
    scopes = 0b11 if kernel >= _SCOPES_SINCE else 0  # abstract sockets and signals
    fields = (rights, network, scopes)[: 3 if scopes else 2 if network else 1]
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    rules = _call(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    try:
        for path in read:
            _allow(rules, path, _READ_FOLDER)
        for path in devices:
            _allow(rules, path, _READ_FILE | _WRITE_FILE)
        _allow(rules, write, rights)
        no_new_privileges()
        _call(_RESTRICT, rules, ctypes.c_uint32(0))
    finally:
        os.close(rules)


def no_new_privileges() -> None:
    """Set no_new_privs, which seccomp and Landlock require of unprivileged processes."""
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")


def set_filter(program: bytes) -> None:
    """Install a seccomp filter made by `seccomp.program`. Raises OSError."""
    no_new_privileges()
    lines = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(lines))
    if _libc.prctl(_SECCOMP, _FILTER, described, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _READ_FILE | _WRITE_FILE | 1
        rule = struct.pack("<Qi", rights, place)
        _call(_ADD_RULE, rules, ctypes.c_uint32(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(place)


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result
