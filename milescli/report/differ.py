"""In what two runs differ before anything is learned: recipe, plan, versions, machine, data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milescli.report.formats import NOTHING
from milescli.report.records import data_words
from milescli.report.subject import Subject

_NEVER = ("run.name", "run.dir", "name", "description")
"""Keys that change nothing of what is learned."""
OF_REWARD = ("rollout.reward", "rollout.reward_model", "rollout.generative", "rollout.rewards")
"""Where they differ, rewards of the two are of different kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """One thing."""

    what: str
    """recipe, plan, versions, machine or data."""
    name: str
    a: str
    b: str


def differences(a: Subject, b: Subject) -> list[Differing]:
    """The recipe first; nothing where the two are alike."""
    found = [
        *_of("recipe", _keys(a), _keys(b)),
        *_of("data", data_words(a), data_words(b)),
        *_of("versions", a.versions(), b.versions()),
        *_of("machine", {"machine": a.machine or NOTHING}, {"machine": b.machine or NOTHING}),
        *_of("plan", _decided(a), _decided(b)),
    ]
    return [one for one in found if one.name not in _NEVER]


def rewards_differ(found: list[Differing]) -> list[str]:
    """Keys by which the rewards of the two mean something else."""
    return [
        one.name
        for one in found
        if one.what == "recipe"
        and any(one.name == key or one.name.startswith(f"{key}.") for key in OF_REWARD)
    ]


def _of(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[Differing]:
    names = list(dict.fromkeys([*a, *b]))
    return [
        Differing(what=what, name=name, a=a.get(name, NOTHING), b=b.get(name, NOTHING))
        for name in names
        if a.get(name) != b.get(name)
    ]


def _keys(subject: Subject) -> dict[str, str]:
    return {key.name: key.value for key in subject.keys}


def _decided(subject: Subject) -> dict[str, str]:
    return {one["key"]: one["value"] for one in subject.decisions()}
