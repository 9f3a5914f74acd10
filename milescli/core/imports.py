"""Loads what import paths name, and explains why a path names nothing."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from milescli.core.errors import RecipeError, nearest
from milescli.core.user_code import IMPORT_BOUND_S, bounded


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn the garbage collector off during imports, and exclude the imported objects from it
    afterwards: modules are never garbage, and searching them takes a quarter of the time of an
    import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _freeze()
        if was_on:
            gc.enable()


def _freeze() -> None:
    gc.freeze()
    atexit.unregister(_skip_gc_at_exit)
    atexit.register(_skip_gc_at_exit)


def _skip_gc_at_exit() -> None:
    """Keep Python from searching all objects of torch and Ray when it ends, which takes a second.
    If Triton was imported, Python must search: otherwise Triton prints 30 lines about objects that
    it believes to be leaked."""
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


GC_THRESHOLD = 20_000
"""Number of new objects after which Python collects garbage; its own default is 700."""


def run_gc_rarely() -> None:
    """Exclude all existing objects, such as modules, from garbage collection, and run it rarely
    from now on: samples have no cycles, and it took a third of the time of a process that handles
    many."""
    _freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Hide optional packages during imports of code that would import them but works without.
    Packages that are imported already stay visible."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Holds where the driver imports the user's code from, and its working directory."""

    import_from: Sequence[str]
    folder: str

    @classmethod
    def here(cls) -> Origin:
        """Return the origin of this process."""
        return cls(import_from=list(sys.path), folder=os.getcwd())

    def adopt(self) -> None:
        """Use the origin in this process, too. The folder may not exist on this computer."""
        sys.path += [entry for entry in self.import_from if entry not in sys.path]
        with suppress(OSError):
            os.chdir(self.folder)


def import_object(
    path: str,
    *,
    kind: str = "plug-in",
    key: str = "",
    setting: Callable[[str], str] | None = None,
) -> object:
    """Return the object that an import path `module:name` names. `kind` and `key`: its purpose, for
    errors; `setting`: returns what `--set` takes for a path (default: key=path). Raises RecipeError
    if it cannot be imported."""
    if ":" not in path:
        raise RecipeError(
            f"`{path}` is not an import path",
            why="a plug-in is named by its module and its own name",
            fix=f"{path or 'mypkg.module'}:NAME",
        )
    module_name, _, attribute = path.partition(":")
    try:
        is_new = module_name not in sys.modules
        with bounded(f"importing `{path}`", IMPORT_BOUND_S) if is_new else nullcontext():
            module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything at import: say what
        raise RecipeError(
            f"cannot import the {kind} `{path}`",
            why=f"importing {module_name} raised {type(error).__name__}: {error}"
            f"{_location_of(error)}",
            fix=[
                *_install_commands(error, module_name),
                f"{sys.executable} -c 'import {module_name}'   # fix it, then try again; {kind}s "
                "are named `package.module:name`",
            ],
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        guess = nearest(attribute, public)
        why = f"`{key or 'the plug-in'}` is `{path}`"
        if own := _hidden_file(module_name):
            raise RecipeError(
                f"`{module_name}` is a module of Python itself, and has no `{attribute}`",
                why=f"{why}; {own} has the same name and cannot be imported beside it",
                fix=f"mv {own} my_{own}   # then name it my_{path}",
            ) from None
        right = f"{module_name}:{guess or 'NAME'}"
        raise RecipeError(
            f"`{module_name}` has no `{attribute}`",
            why=why + (f"; the nearest name is `{guess}`" if guess else ""),
            fix=f"--set {shlex.quote(setting(right) if setting else f'{key}={right}')}"
            if key
            else f"miles plugins check {right}",
        ) from None


def _location_of(error: Exception) -> str:
    """Return ` (rewards.py:3)`: the last line of the user's code that ran; empty if none did."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    own = [frame for frame in frames[1:] if frame.filename != importlib.__file__]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _hidden_file(module_name: str) -> str | None:
    """Return the user's file in this folder that a module of the standard library hides, if any."""
    file = Path(f"{module_name}.py")
    return file.name if module_name in sys.stdlib_module_names and file.is_file() else None


def _install_commands(error: Exception, module_name: str) -> list[str]:
    """Return commands that make a missing module importable: a module in another folder, or a
    package that the user's module needs."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return []
    missing, wanted = error.name.partition(".")[0], module_name.partition(".")[0]
    if missing != wanted:
        return [f"{sys.executable} -m pip install {missing}   # or the name of its package"]
    if Path(wanted).is_dir() or Path(f"{wanted}.py").is_file():
        return ['export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"   # if it is in this folder']
    return []
