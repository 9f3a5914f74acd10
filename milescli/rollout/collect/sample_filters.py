"""Decides which samples of a group are trained on. `rollout.sample_filter` names a filter:
built in here, an entry point, or an import path. A rejected sample still counts in its group's
statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, cast

from milescli.core.registry import Registry
from milescli.core.types import Group, Sample, StopReason
from milescli.recipe.schema import Rollout
from milescli.rollout.collect.filters import yes_or_no
from milescli.workers.isolated import resolve_isolated


class SampleFilter(Protocol):
    """A plug-in of `rollout.sample_filter`."""

    def __call__(self, *, sample: Sample, settings: Rollout) -> bool:
        """True: learn from the sample's tokens. Called once a sample, when its group is kept."""
        ...


SAMPLE_FILTERS = Registry(
    "sample_filter",
    {
        "none": "milescli.rollout.collect.sample_filters:keep_all",
        "truncated": "milescli.rollout.collect.sample_filters:truncated",
    },
    signature=("sample", "settings"),
)


def load_sample_filter(name: str) -> SampleFilter:
    """Raises RecipeError where `rollout.sample_filter` names nothing that fits."""
    return cast(SampleFilter, resolve_isolated(SAMPLE_FILTERS, name, key="rollout.sample_filter"))


def sifted(keep: SampleFilter, group: Group, *, settings: Rollout) -> Group:
    """The group, its samples marked as the filter says. Raises RecipeError where that is neither
    yes nor no."""
    name, of = settings.sample_filter, f"prompt {group.prompt.index}"
    samples = [
        sample
        if yes_or_no(keep(sample=sample, settings=settings), "sample filter", name, of=of)
        else replace(sample, is_learned=False)
        for sample in group.samples
    ]
    return replace(group, samples=samples)


def keep_all(*, sample: Sample, settings: Rollout) -> bool:
    """Leaves none out."""
    return True


def truncated(*, sample: Sample, settings: Rollout) -> bool:
    """Leaves out responses that were cut off (overlong filtering of DAPO, arXiv 2503.14476)."""
    return sample.stop_reason is not StopReason.LENGTH
