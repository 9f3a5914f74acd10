"""The tables of docs/algorithms.md, from the same registries as the program; what people wrote
between them is kept. `python -m milescli.listings.algorithms_page --write`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milescli.core.registry import Registry
from milescli.listings.algorithms import AlgorithmRow, algorithm_rows
from milescli.recipe.algorithms import Setting
from milescli.train.advantages import ADVANTAGES
from milescli.train.aggregation import AGGREGATIONS
from milescli.train.corrections import CORRECTIONS
from milescli.train.credits import CREDITS
from milescli.train.surrogates import SURROGATES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
PIECES = (ADVANTAGES, CREDITS, SURROGATES, CORRECTIONS, AGGREGATIONS)
_BLOCK = "<!-- {name} -->\n{text}<!-- end of {name} -->\n"


def rendered(page: str) -> str:
    """The page with its marked blocks written anew."""
    for name, lines in {"rows": _rows(), "pieces": _pieces()}.items():
        block = _BLOCK.format(name=name, text="".join(f"{line}\n" for line in lines))
        marked = re.compile(_BLOCK.format(name=name, text=".*"), re.DOTALL)
        assert marked.search(page), f"no block `{name}`"
        page = marked.sub(lambda _, block=block: block, page)
    return page


def _rows() -> Iterator[str]:
    yield "| algorithm | what it is | differs from | by | paper | learned |"
    yield "|---|---|---|---|---|---|"
    for row in algorithm_rows():
        sets = ", ".join(f"{_short(key)} `{_text(value)}`" for key, value in row.sets.items())
        base = f"`{row.base}`" if row.base else ""
        told = sets if row.base else "every piece: `miles algorithms grpo`"
        yield f"| `{row.name}` | {row.about} | {base} | {told} | {row.paper} | {_learned(row)} |"


def _learned(row: AlgorithmRow) -> str:
    if row.learned is None:
        return "not measured"
    pairs = zip(row.learned.before, row.learned.after, strict=True)
    told = ", ".join(f"{100 * before:.0f} → {100 * after:.0f}" for before, after in pairs)
    return f"{told} % in {row.learned.steps} steps"


def _pieces() -> Iterator[str]:
    for registry in PIECES:
        key = "train.correction.kind" if registry is CORRECTIONS else f"train.{registry.kind}"
        yield f"### `{key}`"
        yield ""
        for name in registry.builtin:
            yield f"- `{name}`: {_definition(registry, name, key)}"
        yield ""


def _definition(registry: Registry, name: str, key: str) -> str:
    """Of the docstring, in one line."""
    piece: Any = registry.resolve(name, key=key)
    said = inspect.getdoc(piece if inspect.isroutine(piece) else type(piece)) or ""
    return " ".join(said.split())


def _short(key: str) -> str:
    return key.removeprefix("train.")


def _text(value: Setting) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m milescli.listings.algorithms_page --write")
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
