"""Memory and time of a checkpoint in the only trainer rank of a model.

    python bench/saving.py MODEL [--precision bf16]

MODEL is a Hugging Face folder. Each line has seconds, and what the process holds before, at most
within (as the kernel counts it) and after. The step beside a save waits for it before it changes
the weights; in a run there is a rollout between them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from milescli.backends.megatron import cpu_compat
from milescli.core.units import GIB
from milescli.platform.ports import free_ports

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def _held(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024 / GIB


def show(name: str, work: Callable[[], object]) -> None:
    """A line of it."""
    before, began = _held("VmRSS"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak until now
    work()
    took = time.monotonic() - began
    print(
        f"{name:24} {took:6.1f} s {before:7.2f} {_held('VmHWM'):7.2f} {_held('VmRSS'):7.2f} GiB",
        flush=True,
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    cpu_compat.install()
    import torch

    from tests.backends.megatron.harness import rows_shard, trainer

    torch.set_num_threads(options.threads)
    made = trainer(
        rank=0,
        size=1,
        port=free_ports(1)[0],
        model=str(options.model),
        layout={},
        precision=options.precision,
    )

    def step() -> None:
        made.step(rows_shard(made, [[5, 6, 7, 8, 9, 10]] * 2), 1e-5)

    step()
    with tempfile.TemporaryDirectory() as folder:
        show("step", step)
        show("save", lambda: made.save(folder, True))
        show("step beside it", step)
        show("finish", made.finish_save)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"{size / GIB:.2f} GiB on disk")
        show("load", lambda: made.load(folder))
    made.close()


if __name__ == "__main__":
    main()
