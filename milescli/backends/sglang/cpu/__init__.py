"""What SGLang needs to serve well on a CPU: attention over the whole batch, seeded sampling, experts, one import at the start.

`install()` is called by the plug-in in engine processes alone, before the engine reads its arguments.
"""

from __future__ import annotations


def install() -> None:
    """Put every piece in place. Order does not matter; each patches its own names."""
    from milescli.backends.sglang.cpu import attention, experts, launch, sampling

    launch.install()
    attention.install()
    sampling.install()
    experts.install()
