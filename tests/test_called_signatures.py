"""Calls of functions and classes of this repository give the arguments that these take. A benchmark
or a check of a GPU visit that nobody ran since would fail only where a user runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.python_sources import (
    FOLDERS,
    ROOT,
    Imported,
    Signature,
    Source,
    files,
    read,
    source_of,
)


def signature_of(name: str, source: Source) -> Signature | None:
    """The signature of what `name` stands for in a file; None where reading it is not enough."""
    meaning = source.bound.get(name)
    if not isinstance(meaning, Imported):
        return meaning
    if meaning.module.split(".")[0] not in FOLDERS:
        return None
    path = ROOT.joinpath(*meaning.module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return signature_of(meaning.name, read(file)) if file.exists() else None


def wrong_calls(source: Source) -> Iterator[str]:
    """`line: name what is wrong` of each call in a file."""
    for call in source.calls:
        signature = signature_of(call.function, source)
        if signature is not None and (fault := signature.fault(call)) is not None:
            yield f"{call.line}: {call.function} {fault}"


def test_calls_give_what_is_taken() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{fault}" for file in files() for fault in wrong_calls(read(file))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("f(1, b=2)", None),
        ("f(1)", "needs b"),
        ("f(1, 2, b=3)", "takes 1 positional"),
        ("f(1, b=2, c=3)", "has no parameter c"),
        ("f(*anything)", None),
        ("f(**anything)", None),
        ("C(1)", None),
        ("C()", "needs x"),
        ("D(x=1)", None),
        ("D(1)", "takes 0 positional"),
        ("D(y=[])", "needs x"),
    ],
)
def test_the_walk_finds_what_it_is_for(call: str, fault: str | None) -> None:
    text = (
        "def f(a, *, b): ...\n"
        "class C:\n    def __init__(self, x, y=1): ...\n"
        "@dataclass(kw_only=True)\n"
        "class D:\n    x: int\n    y: list = field(default_factory=list)\n"
    )
    found = list(wrong_calls(source_of(text + call)))
    assert (fault in found[0]) if fault is not None else found == []
