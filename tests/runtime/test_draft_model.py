"""A draft model that is to learn: where it cannot is said before a device is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from milescli.core.errors import FitError, MachineError, MilesError
from milescli.models import parse_facts
from milescli.runtime.held_models import require_learning_draft
from tests.backends.megatron.harness import plan_of
from tests.backends.megatron.tiny_models import MODELS

SMALL = parse_facts(MODELS["llama"])


@pytest.mark.parametrize(
    ("layout", "changes", "error", "what"),
    [
        ({}, {"device_kind": "cuda"}, MachineError, "does not learn on cuda"),
        ({}, {"channel": "distributed"}, FitError, "would not reach the engines"),
        ({"pp": 4}, {}, FitError, "under the policy's layout"),
    ],
)
def test_what_cannot_be_is_refused(
    layout: dict, changes: dict, error: type[MilesError], what: str
) -> None:
    with pytest.raises(error, match=what):
        require_learning_draft(replace(plan_of(layout), **changes), SMALL)


def test_what_fits_passes() -> None:
    require_learning_draft(plan_of({"pp": 2}), SMALL)
