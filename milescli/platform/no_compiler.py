"""Runs torch without its compiler, in processes that compile nothing. Torch loads it at the first
function that is marked as not to be compiled, which takes a fifth of a trainer rank's start. Called
by engines and trainers on a CPU."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_NAME = "torch._dynamo"
_STANDALONE_MODULES = (f"{_NAME}._trace_wrapped_higher_order_op",)
"""Modules of the compiler that work without the others; transformers imports one."""


def disable_compiler() -> None:
    """Make torch.compile return functions unchanged, and load the compiler only for code that needs
    more of it than disabling. Idempotent; does nothing if the compiler is loaded."""
    import torch

    torch.compile = lambda function=None, **options: function or (lambda decorated: decorated)
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(Path(torch.__file__).parent)
        sys.meta_path.insert(0, _Parts())


def _unchanged(function: Any = None, *args: Any, **options: Any) -> Any:
    """Act as a decorator that changes nothing, with or without arguments."""
    return function if callable(function) else _unchanged


class _StandIn(ModuleType):
    """Stands in for the compiler's module; implements the calls that mean nothing without it, and
    loads the compiler for any other."""

    disable = allow_in_graph = assume_constant_result = staticmethod(_unchanged)
    # told by each new process group
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def __init__(self, torch_folder: Path) -> None:
        super().__init__(_NAME, doc=_StandIn.__doc__)
        self.__path__ = [str(torch_folder / "_dynamo")]
        self.__spec__ = ModuleSpec(_NAME, None, is_package=True)

    @staticmethod
    def graph_break(*args: Any, **options: Any) -> None:
        """Do nothing: there is no graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of every module
            raise AttributeError(name)
        return getattr(_load_compiler(), name)


def _load_compiler() -> ModuleType:
    """Load the compiler, which replaces the stand-in, and return it."""
    if isinstance(sys.modules.get(_NAME), _StandIn):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)


class _Parts(MetaPathFinder, Loader):
    """Loads the whole compiler when one of its modules is imported, and returns that module:
    imported separately, it would import the others in an order that fails."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None for other modules."""
        is_part = name.rpartition(".")[0] == _NAME and name not in _STANDALONE_MODULES
        if not is_part or not isinstance(sys.modules.get(_NAME), _StandIn):
            return None
        _load_compiler()
        return ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the loaded module."""
        module = sys.modules[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module was executed when the whole was imported."""
        module.__spec__ = module.__spec__.loader_state if module.__spec__ else None
