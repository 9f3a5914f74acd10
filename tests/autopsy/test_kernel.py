"""What of the kernel's log is told."""

from __future__ import annotations

import time

from milescli.autopsy.kernel import kernel_lines


def test_lines_that_name_a_cause_since_then_are_told() -> None:
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    records = [
        "6,1,1000000,-;Out of memory: Killed process 1 (before)\n",
        "6,2,5000000,-;eth0: link becomes ready\n",
        "3,3,6000000,-;Out of memory: Killed process 42 (python) total-vm:9kB\n SUBSYSTEM=x\n",
        "3,4,7000000,c;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n",
        "3,5,8000000,-;amdgpu 0000:03:00.0: amdgpu: RAS controller interrupt triggered\n",
    ]
    told = kernel_lines(boot + 4.0, records=records)
    assert told is not None
    assert [line.split(" ", 1)[1][:20] for line in told] == [
        "Out of memory: Kille",
        "NVRM: Xid (PCI:0000:",
        "amdgpu 0000:03:00.0:",
    ]
