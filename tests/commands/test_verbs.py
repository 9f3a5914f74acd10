"""Each verb hands its options to one function, and shows what comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from milescli.plan.types import BatchPlan, Decision, EngineLayout, Plan, Slot, TrainerLayout
from tests.commands.conftest import Miles, Replace

PLAN = Plan(
    device_kind="cpu",
    collective="gloo",
    precision="fp32",
    trainer=TrainerLayout(tp=2),
    engines=EngineLayout(num=1),
    colocated=True,
    channel="tensor",
    slots=[
        Slot(node=0, device=0, trainer_rank=0, engine=0, engine_rank=0),
        Slot(node=0, device=1, trainer_rank=1),
    ],
    batch=BatchPlan(
        prompts_per_step=32,
        samples_per_prompt=8,
        num_samples=256,
        updates_per_step=1,
        max_tokens_per_microbatch=8192,
        max_sequence_tokens=112,
    ),
    cpu_threads=1,
    max_staleness=0,
    steps=40,
    warmup_steps=60,
    decisions=[Decision(key="trainer.tp", value="2", reason="pinned by parallel.tp")],
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A result as the runtime gives it."""

    path: str = "runs/quickstart-1"
    steps: int = 40
    accuracy_before: float | None = 0.405
    accuracy_after: float | None = 0.948
    logprob_diff_max: float = 5.8e-06
    size_bytes: int = 3 * 1024**2
    seconds: float = 186.0
    wandb: str | None = None


@pytest.fixture
def run_dir(miles: Miles) -> Path:
    folder = Path("runs/quickstart-1")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("")
    return folder


def test_a_dry_run_shows_layout_placement_batch_and_reasons(miles: Miles, replace: Replace) -> None:
    replace("milescli.runtime.dry_run", dry_run=lambda loaded, machine, output: PLAN)
    said = miles("launch", "--recipe", "quickstart", "--dry-run", "-v")
    assert said.code == 0
    for words in (
        "2 ranks: tp 2 x pp 1",
        "32 prompts x 8 samples = 256",
        "256 x 112 = 28,672",
        "pinned by parallel.tp",
        "placement",
    ):
        assert words in said.out, words
    assert "nothing was started" in said.err


SCREEN = 45
"""Lines."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart"], ["a CPU gains nothing from bf16", "demonstrations task:sums"]),
        (["smollm2-135m", "--on", "1xH200"], ["path HuggingFaceTB/SmolLM2-135M-Instruct"]),
        (
            ["qwen3.6", "--on", "8xH200", "--price-per-gpu-hour", "2"],
            ["trainer.ep", "training memory", "KV cache", "not measured", "GPU-hour"],
        ),
    ],
)
def test_a_dry_run_is_one_screen_of_what_was_set_and_decided(
    miles: Miles, arguments: list[str], words: list[str]
) -> None:
    said = miles("launch", *arguments, "--dry-run", "--seed", "7")
    assert said.code == 0
    assert len((said.out + said.err).splitlines()) <= SCREEN
    assert "--seed 7" in said.out and "-v shows the rest" in said.err
    for word in words:
        assert word in said.out, word
    for word in ("1 unless pinned", "placement\n", "next best trainer", "old_logprobs"):
        assert word not in said.out, word
    rest = miles("launch", *arguments, "--dry-run", "-v").out
    for word in ("placement\n", "old_logprobs", "environment of actors", "weights.verify"):
        assert word in rest, word


def test_what_only_a_dry_run_takes_and_seeds_that_libraries_refuse_start_nothing(
    miles: Miles,
) -> None:
    assert "--dry-run" in (refused := miles("launch", "quickstart", "-v")).err
    assert refused.code == 2
    seed = miles("launch", "quickstart", "--dry-run", "--seed", "20261201130000")
    assert seed.code == 3 and "run.seed" in seed.err


def test_a_dry_run_says_that_epochs_have_no_steps_before_rows_are_read(miles: Miles) -> None:
    words = ("launch", "quickstart-sft", "--dry-run", "--on", "1xH200")
    assert "`train.epochs` is 3" in miles(*words, "--set", "train.epochs=3").err
    assert "epochs" not in miles(*words).err


def test_a_verbose_dry_run_names_the_origin_of_every_value(
    miles: Miles, replace: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace("milescli.runtime.dry_run", dry_run=lambda loaded, machine, output: PLAN)
    monkeypatch.setenv("MILES_RUN__SEED", "7")
    said = miles(
        "launch",
        "--recipe",
        "quickstart",
        "--dry-run",
        "-v",
        "--gpus",
        "0",
        "--set",
        "train.steps=9",
    )
    lines = {line.split()[0]: line for line in said.out.splitlines() if line}
    assert lines["train.steps"].split()[1:] == ["9", "--set", "train.steps=9"]
    assert lines["machine.gpus"].split()[1:] == ["0", "--gpus", "0"]
    assert lines["run.seed"].endswith("env MILES_RUN__SEED")
    assert lines["rollout.reward"].split()[-2] == "recipe"
    assert lines["weights.verify"].split()[1:] == ["false", "default"]
    assert "MILES_RUN__SEED" in lines


def test_a_dry_run_as_json_is_the_plan(miles: Miles, replace: Replace) -> None:
    replace("milescli.runtime.dry_run", dry_run=lambda loaded, machine, output: PLAN)
    payload = miles("launch", "--recipe", "quickstart", "--dry-run", "--json", "-v").result
    assert Plan.from_json(json.dumps(payload["plan"])) == PLAN
    assert payload["fingerprint"] == PLAN.fingerprint
    assert payload["recipe"]["train.steps"]["origin"].startswith("recipe quickstart.yaml:")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--set", "data.prompts=nothing.jsonl"], "there is no file"),
        (["--name", "taken"], "is in use"),
    ],
)
def test_a_dry_run_refuses_what_a_launch_here_would(
    miles: Miles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "recipe.yaml").write_text("")
    command = ["launch", "-r", "quickstart", *arguments, "--dry-run"]
    said = miles(*command)
    assert said.code == 3 and said.err.startswith("error: ") and what in said.err
    elsewhere = miles(*command, "--on", "8xH200")
    assert (
        elsewhere.code == 0
        and f"warning: on this computer it would fail: {said.err[7:].splitlines()[0]}"
        in (" ".join(elsewhere.err.split()))
    )


def test_a_dry_run_plans_for_a_machine_that_is_not_there_and_shows_its_price(miles: Miles) -> None:
    command = [
        "launch",
        "-r",
        "quickstart",
        "--dry-run",
        "--on",
        "2x8xH200",
        "--price-per-gpu-hour",
        "2",
        "--json",
    ]
    payload = miles(*command).result
    plan = Plan.from_json(json.dumps(payload["plan"]))
    assert (plan.trainer.world_size, plan.device_kind, len(plan.slots)) == (16, "cuda", 16)
    assert plan.forecast is not None
    assert payload["cost"] == round(2 * plan.forecast.gpu_hours, 2)


def test_a_dry_run_on_devices_shows_memory_times_and_alternatives(miles: Miles) -> None:
    said = miles("launch", "-r", "quickstart", "--dry-run", "-v", "--on", "2x8xMI355X")
    for words in (
        "KV cache",
        "optimizer",
        "margin",
        "counted",
        "estimate",
        "GPU-hours",
        "next best trainer",
        "█",
        "pipeline stages",
    ):
        assert words in said.out, words


def test_a_machine_and_a_price_are_for_plans_alone(miles: Miles) -> None:
    for options in (["--on", "8xH200"], ["--price-per-gpu-hour", "2"]):
        said = miles("launch", "-r", "quickstart", *options)
        assert said.code == 2
        assert "--dry-run" in said.err


def test_gpus_without_a_number_are_all(miles: Miles, replace: Replace) -> None:
    seen = []
    replace(
        "milescli.runtime.launch",
        launch=lambda loaded, *, output: seen.append(loaded.recipe) or Summary(),
    )
    for options in (["--gpus"], ["--gpus", "--steps", "3"], ["--gpus", "all"]):
        miles("launch", "-r", "quickstart", *options)
    assert [recipe.machine.gpus for recipe in seen] == [None, None, None]


def test_flags_are_short_for_recipe_keys(miles: Miles, replace: Replace) -> None:
    seen = []
    replace(
        "milescli.runtime.launch",
        launch=lambda loaded, *, output: seen.append(loaded.recipe) or Summary(),
    )
    said = miles(
        "launch",
        "-r",
        "quickstart",
        "--name",
        "x",
        "--gpus",
        "2",
        "--nodes",
        "3",
        "--address",
        "h:1",
        "--steps",
        "5",
        "--seed",
        "6",
    )
    assert said.code == 0, said.err
    (recipe,) = seen
    assert (recipe.run.name, recipe.run.seed, recipe.train.steps) == ("x", 6, 5)
    assert (recipe.machine.gpus, recipe.machine.nodes, recipe.machine.address) == (2, 3, "h:1")


def test_a_flag_and_a_set_that_differ_are_refused(miles: Miles) -> None:
    said = miles("launch", "--recipe", "quickstart", "--steps", "5", "--set", "train.steps=6")
    assert said.code == 3 and "`--steps 5` and `--set train.steps=6` disagree" in said.err


def test_the_end_of_a_run_says_what_was_reached_and_what_can_be_done(
    miles: Miles, replace: Replace
) -> None:
    replace("milescli.runtime.launch", launch=lambda loaded, *, output: Summary())
    said = miles("launch", "--recipe", "quickstart")
    for words in ("accuracy before", "40.5%", "94.8%", "3.0 MiB", "3 m 06 s", "5.8e-06"):
        assert words in said.out, words
    assert "wandb" not in said.out
    assert (
        "miles resume runs/quickstart-1 --steps 80" in said.err
        and "miles export runs/quickstart-1 --to" in said.err
    )


def test_resume_hands_on_its_options(miles: Miles, replace: Replace, run_dir: Path) -> None:
    seen: dict[str, object] = {}

    def resume(
        run: Path,
        *,
        steps: int | None,
        sets: list[str],
        address: str | None,
        environ: object,
        output: object,
    ) -> Summary:
        seen.update(run=run, steps=steps, sets=sets, address=address)
        return Summary()

    replace("milescli.runtime.resume", resume=resume)
    assert (
        miles(
            "resume", "quickstart-1", "--steps", "80", "--set", "parallel.tp=2", "--address", "h:1"
        ).code
        == 0
    )
    assert seen == {
        "run": Path.cwd() / run_dir,
        "steps": 80,
        "sets": ["parallel.tp=2"],
        "address": "h:1",
    }


def test_export_hands_on_its_options(miles: Miles, replace: Replace, run_dir: Path) -> None:
    seen: dict[str, object] = {}
    replace(
        "milescli.runtime.export",
        export_weights=lambda source, **options: seen.update(options, source=source) or Summary(),
    )
    said = miles(
        "export", "quickstart-1", "--to", "out", "--format", "fp8", "--push", "me/mine", "--public"
    )
    assert said.code == 0 and "--model-path out" in said.err
    del seen["output"]
    assert seen == {
        "source": run_dir.absolute(),
        "to": Path("out"),
        "step": None,
        "role": "policy",
        "deliver": None,
        "format": "fp8",
        "base": None,
        "merge": False,
        "push": "me/mine",
        "private": False,
    }


def test_export_takes_folders_that_are_no_runs(
    miles: Miles, replace: Replace, tmp_path: Path
) -> None:
    seen: list[Path] = []
    replace(
        "milescli.runtime.export",
        export_weights=lambda source, **options: seen.append(source) or Summary(),
    )
    for mark in (
        "config.json",
        "adapter_config.json",
        ".metadata",
        "latest_checkpointed_iteration.txt",
    ):
        folder = tmp_path / f"with {mark}"
        folder.mkdir()
        (folder / mark).write_text("{}")
        assert miles("export", str(folder), "--to", "out").code == 0
    assert len(seen) == 4
    (tmp_path / "empty").mkdir()
    assert miles("export", str(tmp_path / "empty"), "--to", "out").code == 6


def test_exports_old_option_is_understood_with_a_warning(
    miles: Miles, replace: Replace, run_dir: Path
) -> None:
    seen: dict[str, object] = {}
    replace(
        "milescli.runtime.export",
        export_weights=lambda source, **options: seen.update(options) or Summary(),
    )
    said = miles("export", "quickstart-1", "--to", "out", "--dtype", "bf16")
    assert said.code == 0 and seen["format"] == "bf16" and "--format bf16" in said.err
    assert "--dtype" not in miles("export", "--help").out


def test_doctor_ends_with_the_code_of_its_findings(miles: Miles, replace: Replace) -> None:
    replace("milescli.doctor.run", run_doctor=lambda options, *, output: 4 if options.recipe else 0)
    assert miles("doctor").code == 0
    assert miles("doctor", "--recipe", "quickstart").code == 4
    assert miles("doctor", "--set", "run.dir=/x").code == 2


def test_recipes_are_listed_and_shown(miles: Miles) -> None:
    assert "quickstart-moe" in miles("recipes").out
    shown = miles("recipes", "show", "quickstart")
    Path("copy.yaml").write_text(shown.out)
    assert "task:sums" in shown.out
    assert (
        "did you" in (said := miles("recipes", "show", "quikstart")).err or "quickstart" in said.err
    )


def test_help_pages_list_every_exit_code_and_every_key(miles: Miles) -> None:
    from milescli.core.errors import ExitCode
    from milescli.recipe.keys import keys

    codes = miles("help", "exit-codes").out
    assert all(f"{int(code)}" in codes for code in ExitCode)
    page = miles("help", "recipe").out
    assert all(f"\n{key} " in page for key in keys())
    listed = json.loads(miles("help", "recipe", "--json").out)["keys"]
    assert [key["key"] for key in listed] == list(keys())
    assert "checkpoints/step_N/" in miles("help", "run-directory").out
