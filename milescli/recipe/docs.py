"""What the schema says of its keys: the text below each. Read off the source when it is asked for,
since to read it takes as long as all else that the schema needs at every start."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from milescli.recipe.section import Section


def doc_of(section: type[Section], name: str) -> str:
    """Of a key or section within this one; empty where nothing is said."""
    for origin in section.__mro__:
        if text := _docs(origin.__module__).get((origin.__qualname__, name)):
            return text
    return ""


@cache
def _docs(module: str) -> dict[tuple[str, str], str]:
    """(class, name) -> text, of all classes of a module of this package."""
    if not module.startswith(f"{__package__}."):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (one.name, said.target.id): inspect.cleandoc(text.value.value)
        for one in tree.body
        if isinstance(one, ast.ClassDef)
        for said, text in pairwise(one.body)
        if isinstance(said, ast.AnnAssign)
        and isinstance(said.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
