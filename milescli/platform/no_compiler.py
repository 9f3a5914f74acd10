"""torch without its compiler, for processes that compile nothing. Torch loads it at the first
function that says it must not be compiled: a fifth of what a trainer rank does to start. Called by
engines and trainers on a CPU."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_NAME = "torch._dynamo"


def compile_nothing() -> None:
    """torch.compile returns functions as they are, and the compiler is loaded only where somebody
    wants more of it than to leave a function alone. Idempotent; nothing where it is loaded."""
    import torch

    torch.compile = lambda function=None, **options: function or (lambda decorated: decorated)
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(Path(torch.__file__).parent)


def _as_it_is(function: Any = None, *args: Any, **options: Any) -> Any:
    """Of a decorator, with or without arguments."""
    return function if callable(function) else _as_it_is


class _StandIn(ModuleType):
    """What is said to the compiler and means nothing without it; the rest is the compiler's own."""

    disable = allow_in_graph = assume_constant_result = staticmethod(_as_it_is)
    # told by each new process group
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def __init__(self, torch_folder: Path) -> None:
        super().__init__(_NAME, doc=_StandIn.__doc__)
        # its modules that do not need the rest of it are imported as they are
        self.__path__ = [str(torch_folder / "_dynamo")]
        self.__spec__ = ModuleSpec(_NAME, None, is_package=True)

    @staticmethod
    def graph_break(*args: Any, **options: Any) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of every module
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
