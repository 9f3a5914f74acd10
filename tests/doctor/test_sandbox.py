"""Tests of the check `sandbox`: demanded only where code of a model is run."""

from __future__ import annotations

import pytest

from milescli.core.errors import MachineError
from milescli.doctor import run as module
from milescli.doctor.finding import Status
from milescli.doctor.run import check_sandbox
from milescli.sandbox.choose import Choice
from milescli.sandbox.local import LocalSandbox
from tests.doctor.small_model import small_recipe

CODE = small_recipe(rollout={"reward": {"code": 1.0}})


def _refuse(**_: object) -> Choice:
    raise MachineError("it cannot be contained", why="no bwrap", fix="apt-get install bubblewrap")


def _landlock(**_: object) -> Choice:
    return Choice(
        sandbox=LocalSandbox("landlock"),
        reason="landlock works; bubblewrap: not installed",
        fixes=("apt-get install bubblewrap",),
    )


def test_a_machine_without_one_fails_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "choose", _refuse)
    (finding,) = check_sandbox(CODE)
    assert finding.status is Status.FAIL and finding.fix == ["apt-get install bubblewrap"]
    for recipe in (None, small_recipe()):
        assert check_sandbox(recipe)[0].status is Status.SKIP
    remote = {"reward": "code", "code": {"url": "http://h:8080"}}
    assert check_sandbox(small_recipe(rollout=remote))[0].status is Status.SKIP


def test_a_lesser_one_is_a_warning_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose", _landlock)
    (finding,) = check_sandbox(CODE)
    assert finding.status is Status.WARN and finding.what == "landlock works"
    assert check_sandbox(None)[0].status is Status.OK


def test_this_machine_is_tried() -> None:
    (finding,) = check_sandbox(None)
    assert finding.status in (Status.OK, Status.SKIP) and (finding.what or finding.why)
