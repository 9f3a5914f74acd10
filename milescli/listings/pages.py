"""Generates the tables of docs/algorithms.md, docs/extending.md, docs/metrics.md, docs/rewards.md
and CONTRIBUTING.md from the same registries as the program; keeps the text between them.

`python -m milescli.listings.pages --write`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from milescli.core.metric_names import METRICS, Metric
from milescli.core.plug_points import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    CREDITS,
    POINTS,
    REWARDS,
    SURROGATES,
)
from milescli.core.registry import PlugPoint
from milescli.listings.algorithms import AlgorithmRow, algorithm_rows
from milescli.recipe.algorithms import Setting
from milescli.trackers.prometheus import PHASES, families, family_of

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PIECES = (ADVANTAGES, CREDITS, SURROGATES, CORRECTIONS, AGGREGATIONS)
Blocks = Mapping[str, Callable[[], Iterator[str]]]
"""Name of a block -> its lines."""
_BLOCK = "<!-- {name} -->\n{text}<!-- end of {name} -->\n"


def render_page(page: str, blocks: Blocks) -> str:
    """Return the page with its marked blocks generated anew."""
    for name, made in blocks.items():
        lines = made()
        block = _BLOCK.format(name=name, text="".join(f"{line}\n" for line in lines))
        marked = re.compile(_BLOCK.format(name=name, text=".*"), re.DOTALL)
        assert marked.search(page), f"no block `{name}`"
        page = marked.sub(lambda _, block=block: block, page)
    return page


def _rows() -> Iterator[str]:
    yield "| algorithm | definition | based on | changes | paper | learned |"
    yield "|---|---|---|---|---|---|"
    for row in algorithm_rows():
        sets = ", ".join(f"{_short(key)} `{_text(value)}`" for key, value in row.sets.items())
        base = f"`{row.base}`" if row.base else ""
        text = sets if row.base else "every piece: `miles algorithms grpo`"
        yield f"| `{row.name}` | {row.about} | {base} | {text} | {row.paper} | {_learned(row)} |"


def _learned(row: AlgorithmRow) -> str:
    if row.learned is None:
        return "not measured"
    pairs = zip(row.learned.before, row.learned.after, strict=True)
    text = ", ".join(f"{100 * before:.0f} → {100 * after:.0f}" for before, after in pairs)
    return f"{text} % in {row.learned.steps} steps"


def _pieces() -> Iterator[str]:
    for point in PIECES:
        yield f"### `{point.key}`"
        yield ""
        for name in point.builtin:
            yield f"- `{name}`: {_definition(point, name)}"
        yield ""


def _definition(point: PlugPoint, name: str) -> str:
    """Return the docstring of a built-in plug-in, in one line."""
    return " ".join(_doc(point, name).split())


def _doc(point: PlugPoint, name: str) -> str:
    piece: Any = point.resolve(name)
    return inspect.getdoc(piece if inspect.isroutine(piece) else type(piece)) or ""


def _rewards() -> Iterator[str]:
    """Yield the docstring of each reward, and its examples unchanged."""
    for name in REWARDS.builtin:
        prose, sign, examples = _doc(REWARDS, name).partition(">>> ")
        yield f"### `{name}`"
        yield ""
        for paragraph in prose.strip().split("\n\n"):
            yield " ".join(paragraph.split())
            yield ""
        if sign:
            yield "```pycon"
            yield from f"{sign}{examples}".splitlines()
            yield "```"
            yield ""


def _plug_points() -> Iterator[str]:
    yield "| kind | recipe key | what it does | signature | built in |"
    yield "|---|---|---|---|---|"
    for point in POINTS:
        names = ", ".join(f"`{name}`" for name in point.builtin)
        key = point.setting("mypkg.tasks:rows") if point.kind == "task" else point.key
        yield f"| {point.kind} | `{key}` | {point.about} | `{point.signature}` | {names} |"


def _places() -> Iterator[str]:
    """Yield where the built-in plug-ins of each kind are, and the contract that a plug-in must
    satisfy."""
    yield "| kind | built-in plug-ins are in | contract test |"
    yield "|---|---|---|"
    for point in POINTS:
        contract = point.contract.replace(":", ".")
        yield f"| {point.kind} | {_home(point)} | `{contract}` |"


def _home(point: PlugPoint) -> str:
    modules = {path.partition(":")[0] for path in point.builtin.values()}
    if not modules:
        return "none: always your own"
    if len(modules) == 1:
        path = modules.pop().replace(".", "/")
        is_package = (Path(__file__).parents[2] / path).is_dir()
        return f"`{path}{'/__init__' * is_package}.py`"
    folders = {module.rpartition(".")[0].replace(".", "/") + "/" for module in modules}
    outermost = [
        folder
        for folder in sorted(folders)
        if not any(folder != other and folder.startswith(other) for other in folders)
    ]
    return " and ".join(f"`{folder}`" for folder in outermost)


def _metrics() -> Iterator[str]:
    yield "| name | unit | meaning | recorded | in Prometheus |"
    yield "|---|---|---|---|---|"
    for metric in METRICS:
        cells = (f"`{metric.name}`", metric.unit, metric.about, metric.when, _series(metric))
        yield f"| {' | '.join(cells)} |"


def _series(metric: Metric) -> str:
    family = family_of(metric)
    if family.name == PHASES:
        phase = metric.name.partition("/")[2].removesuffix("_s")
        return f'`{family.name}{{phase="{phase}"}}`'
    return f"`{family.name}{{name=...}}`" if family.labels else f"`{family.name}`"


def _families() -> Iterator[str]:
    """Yield the metrics that are not scalars of a step."""
    yield "| metric | kind | meaning |"
    yield "|---|---|---|"
    of_scalars = {family_of(metric).name for metric in METRICS} - {PHASES}
    for name, family in families().items():
        if name not in of_scalars:
            labels = f"{{{', '.join(f'{label}=...' for label in family.labels)}}}"
            shown = name + labels if family.labels else name
            yield f"| `{shown}` | {family.kind} | {family.about} |"


def _short(key: str) -> str:
    return key.removeprefix("train.")


def _text(value: Setting) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


PAGES: dict[Path, Blocks] = {
    _DOCS / "algorithms.md": {"rows": _rows, "pieces": _pieces},
    _DOCS / "rewards.md": {"rewards": _rewards},
    _DOCS / "extending.md": {"plug points": _plug_points},
    _DOCS / "metrics.md": {"metrics": _metrics, "families": _families},
    _DOCS.parent / "CONTRIBUTING.md": {"places": _places},
}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m milescli.listings.pages --write")
    for page, blocks in PAGES.items():
        page.write_text(render_page(page.read_text(encoding="utf-8"), blocks), encoding="utf-8")
