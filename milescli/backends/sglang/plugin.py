"""SGLang's plug-in entry point (group `sglang.srt.plugins`): what engines that miles started need beyond stock SGLang.

SGLang calls `register()` in every process that loads it, also in those that miles did not start: there it does nothing.
"""

from __future__ import annotations

import os

ENGINE_VARIABLE = "MILES_ENGINE"
"""Set to the device kind (cpu, cuda, rocm) by EngineServer, in the environment of the engines that it starts."""


def register() -> None:
    """Install our pieces. A piece that does not fit ends the process: an engine with half of them would answer wrongly."""
    if os.environ.get(ENGINE_VARIABLE) != "cpu":
        return
    from milescli.backends.sglang import cpu

    try:
        cpu.install()
    except Exception as error:  # SGLang logs and goes on when a plug-in raises; SystemExit is not caught
        raise SystemExit(f"miles: the CPU pieces do not fit this SGLang: {type(error).__name__}: {error}") from error
