"""How many processes of this control group the kernel has ended for want of memory. Asked by the
parent of a driver, before and after."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def oom_kills(*, root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Since the group was made, its subgroups included; None where the system does not say."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                files = (root / path.lstrip("/") / "memory.events", root / "memory.events")
            elif controllers == "memory":
                v1 = root / "memory"
                files = (v1 / path.lstrip("/") / "memory.oom_control", v1 / "memory.oom_control")
            else:
                continue
            for file in files:
                with suppress(OSError):
                    if count := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                        return int(count[1])
    return None
