"""LoRA, speculation, routing replay and rollout beside training, all together: each combination is
accepted, or refused by name before anything starts. The runs are in
tests/end_to_end/test_combinations.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.spec import check_servable, check_speculates
from milescli.core.errors import ExitCode, MilesError
from milescli.models import parse_facts
from milescli.models.scratch import config_of
from milescli.platform.machine import Machine, parse_machine
from milescli.recipe.load import load
from milescli.recipe.model import ScratchModel
from milescli.runtime.planning import engine_spec, plan_without_plugins
from tests.end_to_end.combinations import ALLOWED, RUNS, Combination, everything
from tests.families.cases import ALL

CONFIGS = {
    "policy": config_of(
        ScratchModel(family="qwen3_moe", num_experts=4, vocab_size=272, tie_embeddings=False)
    ),
    "draft": config_of(ScratchModel(num_layers=1, vocab_size=272)),
    "mtp": {
        **ALL["deepseek-v3"].config,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "vocab_size": 272,
        "max_position_embeddings": 2048,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models that are config.json alone, by what they are for."""
    base = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(config))
    return base


def _refusal(
    wanted: Combination, folders: Path, machine: Machine, *others: str
) -> MilesError | None:
    """What a launch says before it takes a device; None: nothing."""
    name = "mtp" if wanted.speculation == "mtp" else "policy"
    model = [f"model.path={folders / name}", "model.scratch=null", "warmup.steps=0"]
    sets = [*model, *others, *wanted.sets(folders / "draft")]
    try:
        loaded = load("quickstart-moe", sets=sets, environ={}, cwd=folders, home=folders)
        facts = parse_facts(CONFIGS[name])
        plan = plan_without_plugins(loaded, machine, facts=facts)
        spec = engine_spec(
            loaded.recipe,
            plan,
            index=0,
            port=1,
            model_dir=folders / name,
            log_dir=folders,
            draft_dir=folders / "draft" if wanted.speculation == "draft" else None,
            adapter_dir=folders if wanted.lora else None,
        )
        check_servable(spec)
        check_speculates(spec)
    except MilesError as error:
        return error
    return None


def test_each_combination_is_in_the_table_or_refused_by_name(folders: Path) -> None:
    accepted, said = [], set[str]()
    for wanted in everything():
        error = _refusal(wanted, folders, parse_machine("cpu"))
        if error is None:
            accepted.append(wanted)
            continue
        assert error.exit_code in (ExitCode.INVALID, ExitCode.NOT_READY), error
        assert error.what and error.why and all(fix.startswith("--set ") for fix in error.fixes)
        assert error.fixes
        said.add(error.what)
    key = str
    assert sorted(accepted, key=key) == sorted(ALLOWED, key=key)
    assert said == {
        "`rollout.order=done` needs groups to choose from",
        "engines that serve an adapter cannot speculate with draft",
        "engines that serve an adapter cannot speculate with mtp",
    }


def test_gpus_of_their_own_refuse_more_by_name(folders: Path) -> None:
    flight = {"max_staleness": 2, "order": "done", "on_update": "drain"}
    for wanted in everything():
        if any(getattr(wanted, name) != value for name, value in flight.items()):
            continue
        error = _refusal(wanted, folders, parse_machine("8xH200"), "engines.placement=split")
        if wanted in ALLOWED and wanted.speculation == "mtp":
            assert error is not None and error.exit_code is ExitCode.DOES_NOT_FIT
            assert "would not reach the layer that guesses" in error.what
        elif wanted in ALLOWED and wanted.replay and wanted.speculation != "none":
            assert error is not None and error.exit_code is ExitCode.NOT_READY
            assert "replayed for tokens that were guessed on CUDA" in error.what
        else:
            assert (error is None) == (wanted in ALLOWED), (wanted, error)


def test_the_runs_cover_each_two_values_that_are_allowed_together() -> None:
    assert set(RUNS) <= set(ALLOWED)
    covered, possible = ({pair for each in of for pair in each.pairs} for of in (RUNS, ALLOWED))
    assert covered == possible
    for left_out in RUNS:
        others = {pair for each in RUNS if each is not left_out for pair in each.pairs}
        assert others != possible, f"{left_out} covers nothing that the others do not"
