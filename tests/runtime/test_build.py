"""How engines are started for what will be asked of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.checkpoint.run_dir import RunDir
from milescli.models import parse_facts, scratch
from milescli.plan.engines_alone import plan_engines
from milescli.platform.machine import read_machine
from milescli.recipe.load import load
from milescli.recipe.model import ScratchModel
from milescli.runtime.build import check_engines
from milescli.runtime.spec import RunSpec


@pytest.mark.parametrize("asked_by", ["nobody", "run", "adapter", "set"])
def test_engines_have_a_tokenizer_if_anybody_sends_stop_strings(
    asked_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, SGLang refuses each request with stop strings."""
    plain, stops = (
        load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path).recipe
        for sets in ([], ['rollout.stop=["\\n"]'])
    )
    facts = parse_facts(scratch.config_of(ScratchModel()))
    folder = tmp_path / "model"
    spec = RunSpec(
        run=RunDir(tmp_path),
        recipe=stops if asked_by == "run" else plain,
        plan=plan_engines(plain, read_machine("cpu"), facts),
        nodes=None,  # type: ignore[arg-type]
        inputs=SimpleNamespace(  # type: ignore[arg-type]
            policy_dirs=[], draft_dir=None, model_dir_of=lambda *_, **__: folder
        ),
        evaluated=[plain, stops] if asked_by == "set" else [],
    )
    adapters = {"first": spec, "second": replace(spec, recipe=stops)}
    spec = replace(spec, adapters=adapters if asked_by == "adapter" else {})
    started: list[EngineSpec] = []
    monkeypatch.setattr("milescli.runtime.build.check_servable", started.append)
    check_engines(spec)
    assert started[0].tokenizer_dir == (None if asked_by == "nobody" else folder)
