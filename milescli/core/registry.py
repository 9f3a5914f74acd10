"""Names to things, lazily: a built-in table, entry points of the group `miles.plugins`, or an
import path. One resolver for all rooms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from typing import Any, cast

from milescli.core import user_code
from milescli.core.errors import RecipeError, nearest
from milescli.core.imports import imported
from milescli.core.user_code import bounded, failures_named, name_of

ENTRY_POINT_GROUP = "miles.plugins"


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
        in_list: bool = False,
    ) -> None:
        """`kind` as the user knows it ("reward"); `signature`: names of the parameters that a
        plug-in must accept; `others`: such as it may accept instead; `in_list`: the recipe's key
        takes several."""
        self.kind = kind
        self.builtin = dict(builtin)
        self.signature = signature
        self.others = others
        self.in_list = in_list

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
        plugin = imported(path, kind=self.kind, key=key)
        self._check_signature(plugin, path=path, key=key)
        return plugin

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
                fix=f"--set '{key}=[{guess}]'" if self.in_list else f"--set {key}={guess}",
            )
        return path

    def resolve_function(self, name: str, *, key: str) -> Callable[..., Any]:
        """As `resolve`, to be called in this process, e.g. on a trainer's rank; what the function
        raises, where it is the user's, becomes a RecipeError that names it. What it has beside its
        call (`needs`, ...) is had of the result too."""
        function = cast(Callable[..., Any], self.resolve(name, key=key))
        return function if name in self.builtin else _Named(function, lambda: self.guarded(name))

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Around calls of the plug-in in this process: what one of the user's raises becomes a
        RecipeError with its traceback, and its time is bounded. What a built-in one raises is our
        fault, and flies."""
        if name in self.builtin or user_code.in_user_process:
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
