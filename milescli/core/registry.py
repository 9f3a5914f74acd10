"""Names to things, lazily: a built-in table, entry points of the group `miles.plugins`, or an
import path. One resolver for all rooms."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from milescli.core import user_code
from milescli.core.apart import Apart
from milescli.core.errors import RecipeError
from milescli.core.user_code import IMPORT_BOUND_S, bounded, failures_named, name_of

ENTRY_POINT_GROUP = "miles.plugins"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


class Registry:
    """A table of one kind of plug point, e.g. rewards. Values are import paths, so that nothing is
    loaded before it is asked for."""

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, str],
        *,
        signature: tuple[str, ...] = (),
        others: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        """`kind` as the user knows it ("reward"); `signature`: names of the parameters that a
        plug-in must accept; `others`: such as it may accept instead."""
        self.kind = kind
        self.builtin = dict(builtin)
        self.signature = signature
        self.others = others

    def names(self) -> list[str]:
        """Built-in names and those of installed plug-ins."""
        return sorted({*self.builtin, *self._plugins()})

    def _plugins(self) -> dict[str, str]:
        prefix = f"{self.kind}."
        points = entry_points(group=ENTRY_POINT_GROUP)
        return {
            point.name.removeprefix(prefix): point.value
            for point in points
            if point.name.startswith(prefix)
        }

    def resolve(self, name: str, *, key: str) -> object:
        """The object called `name`. `key` is the recipe key that named it, for the error.

        Raises RecipeError where nothing has that name, the import fails, or the signature does not
        match.
        """
        path = self.path_of(name, key=key)
        plugin = _import(path, kind=self.kind, key=key)
        self._check_signature(plugin, path=path, key=key)
        return plugin

    @staticmethod
    def resolve_any(path: str) -> object:
        """What an import path names, of whatever kind. Raises RecipeError where it cannot be
        had."""
        if ":" not in path:
            raise RecipeError(
                f"`{path}` is no import path",
                why="a plug-in is named by its module and its own name",
                fix=f"{path or 'mypkg.module'}:NAME",
            )
        return _import(path, kind="plug-in", key="plug-in")

    def path_of(self, name: str, *, key: str) -> str:
        """The import path of what is called `name`; nothing is imported. Raises RecipeError where
        nothing has that name."""
        path = (
            self.builtin.get(name) or self._plugins().get(name) or (name if ":" in name else None)
        )
        if path is None:
            known = self.names()
            guess = nearest(name, known) or (known[0] if known else f"{name or 'mypkg'}:NAME")
            one_of = f"one of {', '.join(known)}, or " if known else ""
            raise RecipeError(
                f"no {self.kind} is called `{name}`",
                why=f"`{key}` must be {one_of}an import path like `mypkg.module:name`",
                fix=f"--set {key}={guess}",
            )
        return path

    def resolve_function(self, name: str, *, key: str) -> Callable[..., Any]:
        """As `resolve`, to be called in this process, e.g. on a trainer's rank; what the function
        raises, where it is the user's, becomes a RecipeError that names it. What it has beside its
        call (`needs`, ...) is had of the result too."""
        function = cast(Callable[..., Any], self.resolve(name, key=key))
        return function if name in self.builtin else _Named(function, lambda: self.guarded(name))

    def resolve_apart(self, name: str, *, key: str, **options: Any) -> Callable[..., Any]:
        """As `resolve_function`, for the driver: the user's is called in a process of its own, see
        `Apart`, whose `options` these are."""
        function = cast(Callable[..., Any], self.resolve(name, key=key))
        if name in self.builtin or user_code.is_apart:
            return function
        path = self.path_of(name, key=key)
        return Apart(path, what=f"the {self.kind} `{name}`", plugin=function, **options)

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Around calls of the plug-in in this process: what one of the user's raises becomes a
        RecipeError with its traceback, and its time is bounded. What a built-in one raises is our
        fault, and flies."""
        if name in self.builtin or user_code.is_apart:
            yield
            return
        what = f"the {self.kind} `{name}`"
        with failures_named(what), bounded(what):
            yield

    def _check_signature(self, plugin: object, *, path: str, key: str) -> None:
        if not self.signature:
            return
        if not callable(plugin):
            raise RecipeError(
                f"`{path}` is not callable",
                why=f"`{key}` needs {_with_article(self.kind)}",
                fix=f"point {key} at a function or class",
            )
        target = plugin.__init__ if inspect.isclass(plugin) else plugin  # type: ignore[misc]
        parameters = inspect.signature(target).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        missing = [name for name in self.signature if name not in parameters]
        fits_another = any(set(other) <= set(parameters) for other in self.others)
        if missing and not takes_any and not fits_another:
            raise RecipeError(
                f"`{path}` cannot be {_with_article(self.kind)}",
                why=f"it lacks the parameter{'s' if len(missing) > 1 else ''} "
                f"{', '.join(missing)}; it takes ({', '.join(parameters)})",
                fix=f"def {path.rpartition(':')[2]}({', '.join(self.signature)}): ...",
            )


class _Named:
    """A function of the user's, or an object that can be called, and all that it has."""

    def __init__(self, plugin: Any, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self._plugin, self._guarded = plugin, guarded

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._guarded():
            return self._plugin(*args, **options)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__name__":
            return name_of(self._plugin)
        found = getattr(self._plugin, attribute)
        is_method = inspect.ismethod(found)
        return _Named(found, self._guarded) if is_method else found


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _import(path: str, *, kind: str, key: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        is_new = module_name not in sys.modules
        with bounded(f"importing `{path}`", IMPORT_BOUND_S) if is_new else nullcontext():
            module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything at import: say what
        raise RecipeError(
            f"cannot import the {kind} `{path}`",
            why=f"importing {module_name} raised {type(error).__name__}: {error}{_place_of(error)}",
            fix=[
                *_ways_to_find(error, module_name),
                f"{sys.executable} -c 'import {module_name}'   # mend it, then try again; `{key}` "
                "is `package.module:name`",
            ],
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        guess = nearest(attribute, public)
        raise RecipeError(
            f"`{module_name}` has no `{attribute}`",
            why=f"`{key}` names `{path}`" + (f"; nearest is `{guess}`" if guess else ""),
            fix=f"--set {key}={module_name}:{guess or 'NAME'}",
        ) from None


def _place_of(error: Exception) -> str:
    """` (rewards.py:3)`: the last line of the user's that ran; empty where none did."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    own = [frame for frame in frames[1:] if frame.filename != importlib.__file__]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _ways_to_find(error: Exception, module_name: str) -> list[str]:
    """Commands after which a module that was not found is found: one beside the user, or a package
    that his own module asks for."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return []
    missing, wanted = error.name.partition(".")[0], module_name.partition(".")[0]
    if missing != wanted:
        return [f"{sys.executable} -m pip install {missing}   # or what its package is called"]
    if Path(wanted).is_dir() or Path(f"{wanted}.py").is_file():
        return ['export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"   # it lies in this folder']
    return []
