"""How engines are started for what will be asked of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import WorkerDied
from milescli.models import parse_facts, scratch
from milescli.plan.engines_alone import plan_engines
from milescli.platform.machine import read_machine
from milescli.recipe.load import load
from milescli.recipe.model import ScratchModel
from milescli.runtime.build import Builder, check_engines
from milescli.runtime.recovery.engines import Engines
from milescli.runtime.spec import RunSpec


@pytest.mark.parametrize("asked_by", ["nobody", "run", "adapter", "set", "agent", "package"])
def test_engines_have_a_tokenizer_if_anybody_sends_stop_strings(
    asked_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, SGLang refuses each request with stop strings. An agent that is not of miles
    may send some at any time."""
    sending = {
        "agent": ["rollout.agent=mine:play"],
        "package": ["rollout.agent=verifiers", "rollout.verifiers.environment=tasks"],
    }
    plain, stops = (
        load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path).recipe
        for sets in ([], sending.get(asked_by, ['rollout.stop=["\\n"]']))
    )
    facts = parse_facts(scratch.config_of(ScratchModel()))
    folder = tmp_path / "model"
    spec = RunSpec(
        run=RunDir(tmp_path),
        recipe=stops if asked_by in ("run", *sending) else plain,
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


def test_the_chat_template_of_each_adapter_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[int]] = []
    monkeypatch.setattr(
        "milescli.runtime.build.SglangFleet", lambda **settings: given.append(settings["stop_ids"])
    )
    monkeypatch.setattr(Builder, "engine_addresses", lambda *_: [])
    recipe = load("quickstart", environ={}, cwd=tmp_path, home=tmp_path).recipe
    facts = parse_facts(scratch.config_of(ScratchModel()))
    ends = {"first": [7], "second": [9]}
    of_each = {
        name: RunSpec(
            run=RunDir(tmp_path),
            recipe=recipe,
            plan=replace(plan_engines(recipe, read_machine("cpu"), facts), collectors=2),
            nodes=None,  # type: ignore[arg-type]
            inputs=SimpleNamespace(facts=facts, own_stop_ids=ids, tokenizer=name),  # type: ignore[arg-type]
        )
        for name, ids in ends.items()
    }
    spec = replace(
        of_each["first"],
        recipe=recipe.model_copy(update={"adapters": {name: {} for name in ends}}),
        adapters=of_each,
    )
    spawned: list[Any] = []

    async def spawn(*_: object, kwargs: dict[str, object], **__: object) -> None:
        spawned.append(kwargs["tokenizer"])
        raise WorkerDied("planted", why="it is enough", fix=[])

    nothing: Any = None
    cluster: Any = SimpleNamespace(spawn=spawn)
    served: Any = SimpleNamespace(version=0, is_paused=False)
    builder = Builder(spec=spec, cluster=cluster, resources=nothing, log_dir=tmp_path)
    builder.slot_fleets(Engines())
    assert given == [[7], [9]], "the tokens that end a response"
    with pytest.raises(WorkerDied):
        asyncio.run(
            builder.start_collector(
                0,
                [],
                recipe=recipe,
                adapter="second",
                fleet=served,
                policies={},
                journal=None,
                with_greedy=False,
            )
        )
    assert spawned == ["second"]
