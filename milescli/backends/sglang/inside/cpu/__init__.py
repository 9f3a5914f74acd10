"""What SGLang needs to serve well on a CPU: attention over the whole batch, seeded sampling,
experts, one import at the start, weights that are all loaded; and, for some families, a piece of
their own.

`install()` is called by the plug-in in engine processes alone, before the engine reads its
arguments.
"""

from __future__ import annotations

import importlib


def install(pieces: tuple[str, ...] = ()) -> None:
    """Install every piece, and the named modules of this package, which some families need. The
    order does not matter; each patches its own names."""
    for name in (
        "serving",
        "layers",
        "attention",
        "prompts",
        "sampling",
        "softmax",
        *pieces,
    ):
        importlib.import_module(f"{__name__}.{name}").install()
