"""Keeps torch out of processes that do not compute, such as a run's driver: its import takes a
second of a core and 200 MiB.

`from milescli.platform.lazy import torch` imports it when one of its names is first used: in
modules that a driver asks what a plug-in needs, and with which only ranks compute. `without_torch`
hides it from transformers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyModule(ModuleType):
    """Imports the module of its name at the first use, and caches the attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python, which looks at modules without using them
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _LazyModule("torch")


@contextmanager
def without_torch() -> Iterator[None]:
    """Hide torch from transformers, which spends two seconds importing it for a tokenizer that does
    not need it. Code that needs both must import torch first; nothing is hidden if either is
    already imported."""
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # it says on the screen that it found no torch
    before = os.environ.get(advice)
    os.environ[advice] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[advice]
        else:
            os.environ[advice] = before
