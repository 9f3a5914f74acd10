"""Tools of Python: a function, or a class of which each episode has one of its own. Called by
`tool_kit`, and in an episode by `tool_box`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.recipe.schema import Rollout
from milescli.rollout.tool_schema import fits, parameters_of, schema_of


class FunctionTool:
    """Implements milescli.agents.tool_base.Tool."""

    def __init__(self, function: Any, *, name: str, settings: Rollout) -> None:
        """Raises RecipeError where the function does not say what it takes."""
        self.name, self.schema = name, schema_of(function, name=name)
        self._function, self._settings = function, settings
        self._parameters = {parameter.name: parameter for parameter in parameters_of(function)}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """See Tool."""
        known = self._parameters
        if unknown := arguments.keys() - known.keys():
            raise ValueError(f"{self.name} takes {', '.join(known)}, not {', '.join(unknown)}")
        lacking = [
            name
            for name, parameter in known.items()
            if parameter.default is inspect.Parameter.empty and name not in arguments
        ]
        if lacking:
            raise ValueError(f"{self.name} needs {', '.join(lacking)}")
        for name, value in arguments.items():
            if not fits(value, known[name]):
                raise ValueError(f"{name} of {self.name} must not be {json.dumps(value)}")

    async def open(self) -> OpenFunction:
        """See Tool."""
        if not inspect.isclass(self._function):
            return OpenFunction(self._function)
        made = self._function(self._settings)
        if (begin := getattr(made, "open", None)) is not None:
            await begin()
        return OpenFunction(made)


class OpenFunction:
    """Implements milescli.agents.tool_base.OpenTool."""

    def __init__(self, function: Any) -> None:
        """`function`: or an object that is called."""
        self._function = function

    async def call(self, arguments: Mapping[str, Any]) -> object:
        """See OpenTool."""
        function = self._function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object's own `async def`
        ):
            return await function(**arguments)
        return await in_thread(lambda: function(**arguments))

    async def close(self) -> None:
        """See OpenTool."""
        close = getattr(self._function, "close", None)
        ended = close() if close is not None else None
        if inspect.isawaitable(ended):
            await ended
