"""An episode that is watched: shown turn by turn, ended by its environment or its bounds; and what
helps engines that ran out of memory."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Output
from milescli.core.errors import FitError, WorkerDied
from milescli.core.types import Prompt
from milescli.models import parse_facts, scratch
from milescli.models.scratch import make_model
from milescli.plan.engines_alone import plan_engines
from milescli.platform.machine import read_machine
from milescli.recipe.agents import EnvironmentSettings
from milescli.recipe.machine import Fault, MachineSettings
from milescli.recipe.model import ScratchModel
from milescli.recipe.schema import Recipe
from milescli.rollout.base import Outcome
from milescli.runtime.evaluation.evaluate import (
    EvaluatedModels,
    WatchedEpisode,
    serve_and_evaluate,
    sized_for,
    smaller_engines,
    within_positions,
)
from milescli.runtime.evaluation.sets import EvalOptions, sets_of_model
from milescli.runtime.prestart import Prestarted
from milescli.runtime.recovery.engines import Engines
from milescli.runtime.spec import RunSpec
from tests.agents.scripted import Engine, session_of

PROMPT = Prompt(index=4, token_ids=[], text="", label="4")


def _watch(texts: list[str], *, max_turns: int = 8) -> tuple[Outcome, list[str]]:
    shown = list[str]()
    watched = WatchedEpisode(
        settings=EnvironmentSettings(name="tests.agents.user_environments:Count"),
        prompt=PROMPT,
        max_turns=max_turns,
        on_start=shown.append,
        on_turn=lambda said, step: shown.append(f"{said} -> {step.observation} {step.reward:g}"),
    )
    return asyncio.run(watched(PROMPT, session_of(Engine(texts)))), shown


def test_every_turn_is_shown_as_it_is_done() -> None:
    outcome, shown = _watch(["a", "bb", "ccc"])
    assert shown[0] == "begin 4" and [line.split(" ")[0] for line in shown[1:]] == [
        "a",
        "bb",
        "ccc",
    ]
    assert outcome.reward == 6 and not outcome.is_cut and outcome.text == "a\nbb\nccc"


@pytest.mark.parametrize("max_turns", [1, 2])
def test_it_is_left_at_its_bound(max_turns: int) -> None:
    outcome, shown = _watch(["a", "bb", "ccc"], max_turns=max_turns)
    assert len(shown) == 1 + max_turns and outcome.is_cut


def test_engines_that_ran_out_of_memory_have_fixes_of_an_evaluation(tmp_path: Path) -> None:
    facts = parse_facts(scratch.config_of(ScratchModel()))
    recipe = Recipe(machine=MachineSettings(gpus=0))
    plan = plan_engines(recipe, read_machine("cpu"), facts)
    fewer = plan.engines.max_running_requests // 4
    spec = cast(RunSpec, SimpleNamespace(plan=plan, run=RunDir(tmp_path)))
    of_model = smaller_engines(spec, "org/name")
    assert of_model[0].startswith(f"--set engines.max_running_requests={fewer} ")
    spec.run.plan_file.write_text(plan.to_json())
    of_run = smaller_engines(spec, "runs/sums-1")
    wanted = f"miles export runs/sums-1 --to sums-1-hf && miles eval sums-1-hf {of_model[0]}"
    assert of_run == [wanted, *of_model[1:]]
    assert not any("launch" in fix or "lora" in fix for fix in of_run)


def _answers(tmp_path: Path, *sets: str) -> tuple[int, int]:
    """Tokens of a prompt and of an answer, for a model that no run made and that has 1,024
    positions."""
    settings = ScratchModel(max_position_embeddings=1024)
    make_model(settings, tmp_path / "model", seed=0)
    eval_options = EvalOptions(data=["task:sums-heldout"], sets=sets)
    loaded, (one,) = sets_of_model(str(tmp_path / "model"), eval_options, environ={})
    facts = parse_facts(scratch.config_of(settings))
    recipe = within_positions(one, loaded, facts).recipe
    plan = plan_engines(recipe, read_machine("cpu"), facts)
    sized_for(plan, [replace(one, recipe=recipe)], facts)
    return recipe.data.max_prompt_tokens, recipe.eval.max_response_tokens or 0


def test_a_model_with_few_positions_is_evaluated_without_settings(tmp_path: Path) -> None:
    assert _answers(tmp_path) == (512, 512)


def test_lengths_that_were_set_are_kept_or_refused_with_fixes_that_work(tmp_path: Path) -> None:
    sets = ["data.max_prompt_tokens=900", "eval.max_response_tokens=200"]
    with pytest.raises(FitError, match="exceed the model's positions") as refused:
        _answers(tmp_path, *sets)
    for fix in refused.value.fixes:
        _answers(tmp_path, *sets, *(text.strip() for text in fix.split("--set ")[1:]))


def test_engines_may_die_again_after_they_have_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server lives for weeks: three deaths end it only if nothing was answered in between."""
    refusals = list[str | None]()
    fleet = SimpleNamespace(num_answers=0)

    async def nothing(**_: object) -> None:
        pass

    async def start_engines(engines: Engines, *, retry_start: partial[object]) -> object:
        engines.fleet = fleet  # type: ignore[assignment]
        repairs = retry_start.keywords["repairs"]
        for answers in (0, 5, 6, 7, 7, 7):
            fleet.num_answers = answers
            died = WorkerDied("engine 0 died", why="planted", fix=[])
            refusals.append(repairs.begin("engine 0", died))
        return fleet

    async def use(*_: object, **__: object) -> list[object]:
        return []

    fleet.close = nothing
    session = SimpleNamespace(
        ray=SimpleNamespace(check=nothing),
        cluster=SimpleNamespace(check_nodes=nothing),
        resources=SimpleNamespace(take=nothing, release=nothing, token=""),
        builder=SimpleNamespace(start_engines=start_engines),
        cause_grace_s=0.0,
    )
    monkeypatch.setattr(
        "milescli.runtime.session.open_session", lambda *_, **__: nullcontext(session)
    )
    for name in ("keep_frozen", "keep_scorer"):
        monkeypatch.setattr(f"milescli.runtime.recovery.engine_keepers.{name}", lambda *_, **__: 0)
    recipe = Recipe(fault=Fault(max_restarts=100))
    spec = RunSpec(run=RunDir(tmp_path), recipe=recipe, plan=None, nodes=None, inputs=None)  # type: ignore[arg-type]
    subject = EvaluatedModels(name="runs/sums-1")
    prestarted = cast(Prestarted, None)
    serve_and_evaluate(spec, [], subject, prestarted, output=Output(), use_engines=use)
    assert refusals[:5] == [None] * 5
    assert refusals[5] == "it died 3 times at response 8"
