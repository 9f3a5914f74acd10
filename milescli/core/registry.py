"""Plug points: the kinds of plug-ins that a user can supply, and the one resolver of their names. A
name is a built-in one, an entry point of the group `miles.plugins`, or an import path. The table of
the points is in `plug_points`."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from milescli.core import user_code
from milescli.core.errors import RecipeError, nearest
from milescli.core.imports import import_object
from milescli.core.user_code import as_recipe_errors, bounded, name_of

ENTRY_POINT_GROUP = "miles.plugins"


@dataclass(frozen=True, eq=False, kw_only=True)
class PlugPoint:
    """Describes one kind of plug-in, e.g. rewards. Built-in ones are given by import path: nothing
    is imported before a name is resolved."""

    kind: str
    """Its name for users, and the prefix of entry points: `reward`."""
    key: str
    """The recipe key that names plug-ins of this kind."""
    signature: str = ""
    """`(*, group, settings) -> bool`: parameters and result of a plug-in."""
    about: str = ""
    contract: str = ""
    """Import path of the test that a plug-in must pass."""
    builtin: Mapping[str, str] = field(default_factory=dict)
    """Short name -> import path."""
    others: tuple[tuple[str, ...], ...] = ()
    """Alternative parameters that a plug-in may take instead of those of `signature`."""
    runs_in: Literal["driver", "rank", "package"] = "driver"
    """Caller of the plug-in: the driver, which runs user code in a separate process; a trainer's
    rank, which calls it directly and bounds it; or this point's own package, in its own way."""
    off: str | None = None
    """The name that stands for no plug-in, if there is one."""
    lane: str = "pieces"
    """Process of the user's plug-ins that the driver calls: plug-ins of a lane share one."""
    in_list: bool = False
    """True if the recipe's key takes several."""
    is_async: bool = False
    prefix: str = ""
    """What precedes a name in the recipe: `task:`."""
    goes_with: str = ""
    """`key=value` that a run also needs for the plug-in that `key` names to be used."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that a plug-in must accept; empty if any will do."""
        named = self.arguments.removeprefix("*, ")
        return () if not named or set(named) & set("*:") else tuple(named.split(", "))

    @property
    def arguments(self) -> str:
        """Return the signature between its parentheses."""
        return self.signature.partition("(")[2].partition(") ->")[0]

    def names(self) -> list[str]:
        """List built-in names and those of installed plug-ins."""
        return sorted({*self.builtin, *self._plugins()})

    def _plugins(self) -> dict[str, str]:
        prefix = f"{self.kind}."
        points = entry_points(group=ENTRY_POINT_GROUP)
        return {
            point.name.removeprefix(prefix): point.value
            for point in points
            if point.name.startswith(prefix)
        }

    def setting(self, path: str) -> str:
        """Return `key=value` as `--set` takes it."""
        return f"{self.key}=[{path}]" if self.in_list else f"{self.key}={self.prefix}{path}"

    def command_part(self, path: str) -> str:
        """Return what follows `--set` in a command for a run with the plug-in at `path`."""
        return f"{self.goes_with} --set " * bool(self.goes_with) + self.setting(path)

    def resolve(self, name: str) -> Any:
        """Import and return the object called `name`. Raises RecipeError if nothing has that name,
        the import fails, or the signature does not match."""
        path = self.path_of(name)
        plugin = import_object(path, kind=self.kind, key=self.key, setting=self.setting)
        self._check_signature(plugin, path=path)
        return plugin

    def path_of(self, name: str) -> str:
        """Return the import path of `name`, without importing it. Raises RecipeError if nothing has
        that name."""
        path = (
            self.builtin.get(name) or self._plugins().get(name) or (name if ":" in name else None)
        )
        if path is None:
            known = self.names()
            module, dot, last = name.rpartition(".")
            guess = f"{module}:{last}" if dot and module and last else nearest(name, known)
            guess = guess or (known[0] if known else f"{name or 'mypkg'}:NAME")
            one_of = f"one of {', '.join(known)}, or " if known else ""
            raise RecipeError(
                f"there is no {self.kind} `{name}`",
                why=f"`{self.key}` must be {one_of}an import path like `mypkg.module:name`",
                fix=f"--set {shlex.quote(self.setting(guess))}",
            )
        return path

    def load(self, name: str | None) -> Any:
        """Return the plug-in `name`, to be called in this process, e.g. on a trainer's rank; None
        if the name stands for none. An exception in a user's function becomes a RecipeError that
        names the function, and its time is bounded. The result has the attributes of the plug-in
        (`needs`, ...). Raises as `resolve`."""
        if name is None or name == self.off:
            return None
        plugin = self.resolve(name)
        return (
            plugin if name in self.builtin else _GuardedPlugin(plugin, lambda: self.guarded(name))
        )

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Guard calls of the plug-in in this process: an exception in a user's plug-in becomes a
        RecipeError with its traceback, and its time is bounded. An exception in a built-in one is a
        bug of miles, and passes."""
        if name in self.builtin or user_code.in_user_process:
            yield
            return
        what = f"the {self.kind} `{name}`"
        with as_recipe_errors(what), bounded(what):
            yield

    def _check_signature(self, plugin: Any, *, path: str) -> None:
        if not self.parameters:
            return
        if not callable(plugin):
            raise RecipeError(
                f"`{path}` is not callable",
                why=f"`{self.key}` needs {_with_article(self.kind)}",
                fix=f"point {self.key} at a function or class",
            )
        target = plugin.__init__ if inspect.isclass(plugin) else plugin
        parameters = dict(inspect.signature(target).parameters)
        if inspect.isclass(plugin):
            parameters.pop("self", None)
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        fault = _signature_fault(self.parameters, parameters, takes_any=takes_any)
        if not fault or not all(_signature_fault(form, parameters) for form in self.others):
            return
        wanted = {_FOREIGN_PARAMETERS.get(name, name) for name in parameters}
        form = max((self.parameters, *self.others), key=lambda form: len(wanted & set(form)))
        taken = ", ".join(str(parameter) for parameter in parameters.values())
        raise RecipeError(
            f"`{path}` cannot be {_with_article(self.kind)}",
            why=f"{fault}; it takes ({taken})",
            fix=f"def {path.rpartition(':')[2]}({', '.join(form)}): ...",
        )


_FOREIGN_PARAMETERS = {"completions": "responses", "completion": "response", "answer": "label"}
"""Name of a parameter in other frameworks, such as TRL -> its name here."""


def _signature_fault(
    form: Sequence[str], parameters: Mapping[str, inspect.Parameter], *, takes_any: bool = False
) -> str:
    """Return why a function with these parameters cannot be called with the names in `form`; empty
    if it can. `takes_any`: its `**kwargs` accept names that it does not list."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unfilled = [
        name
        for name, one in parameters.items()
        if name not in form and one.default is one.empty and one.kind not in variadic
    ]
    missing = [] if takes_any else [name for name in form if name not in parameters]
    if missing:
        return f"it lacks the parameter{'s' * (len(missing) > 1)} {', '.join(missing)}"
    return f"miles does not pass {', '.join(f'`{name}`' for name in unfilled)}" if unfilled else ""


class _GuardedPlugin:
    """Wraps a user's function or callable object, and keeps all of its attributes."""

    def __init__(self, plugin: Any, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self._plugin, self._guarded = plugin, guarded

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._guarded():
            return self._plugin(*args, **options)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "__name__":
            return name_of(self._plugin)
        value = getattr(self._plugin, attribute)
        is_method = inspect.ismethod(value)
        return _GuardedPlugin(value, self._guarded) if is_method else value


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
