"""`miles eval` finds out what it was given, hands its options on and shows what comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.commands.find_run import EvalTarget, find_eval_target
from milescli.core.errors import CheckpointError, ExitCode, MemoryTaken
from milescli.plan.engines_alone import REMOTE_SERVER_FIX
from milescli.runtime.evaluation import chat
from milescli.runtime.evaluation.results import SetResult, write_result
from milescli.runtime.evaluation.sets import EvalOptions
from tests.commands.conftest import Miles, Replace
from tests.runtime.evaluation.results import make_result


@pytest.fixture
def run_dir(miles: Miles) -> Path:
    """A folder that looks like a run; where tests are, there are its runs."""
    run = Path("runs") / "quickstart-1"
    (run / "checkpoints" / "step_20").mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: x")
    return run


def test_eval_hands_on_its_options(miles: Miles, replace: Replace, run_dir: Path) -> None:
    seen: dict[str, object] = {}

    def evaluate_run(run: Path, **options: object) -> list[SetResult]:
        seen.update(run=run, **options)
        return [make_result(step=step, accuracy=0.25 * step) for step in (1, 2)]

    replace("milescli.runtime.evaluation.evaluate", evaluate_run=evaluate_run)
    options = [
        "--steps",
        "1,2",
        "--num-prompts",
        "50",
        "--samples",
        "8",
        "--temperature",
        "0.7",
        "-k",
        "1",
        "-k",
        "8",
    ]
    more = [
        "--data",
        "x.jsonl",
        "--data",
        "y=z.jsonl",
        "--domain",
        "kind",
        "--set",
        "eval.seed=1",
        "--address",
        "h:1",
    ]
    said = miles("eval", str(run_dir), *options, *more, "--json")
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert said.code == 0 and [line["accuracy"] for line in lines] == [0.25, 0.5]
    eval_options = EvalOptions(
        data=["x.jsonl", "y=z.jsonl"],
        ks=[1, 8],
        domain="kind",
        sets=["eval.seed=1"],
        flags={
            "eval.num_prompts": "--num-prompts 50",
            "eval.samples_per_prompt": "--samples 8",
            "eval.temperature": "--temperature 0.7",
            "machine.address": "--address h:1",
        },
    )
    del seen["output"], seen["environ"]
    assert seen == {
        "run": run_dir,
        "steps": "1,2",
        "eval_options": eval_options,
        "use_engines": None,
    }


def test_eval_shows_each_figure_with_its_interval(
    miles: Miles, replace: Replace, run_dir: Path
) -> None:
    result = make_result(step=20, accuracy=0.61)
    replace("milescli.runtime.evaluation.evaluate", evaluate_run=lambda run, **options: [result])
    said = miles("eval", str(run_dir))
    assert "61.0% (51.0 to 71.0)" in said.out and "odd" in said.out and "evaluation of" in said.out


def test_eval_refuses_one_step_and_several(miles: Miles, run_dir: Path) -> None:
    said = miles("eval", str(run_dir), "--step", "3", "--steps", "all")
    assert said.code == 2 and "use only one" in said.err


def test_what_is_measured_is_known_by_what_lies_there(miles: Miles, run_dir: Path) -> None:
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert find_eval_target("quickstart-1").run == Path.cwd() / run_dir
    checkpoint = find_eval_target(str(run_dir / "checkpoints" / "step_20"))
    assert checkpoint == EvalTarget(run=Path.cwd() / run_dir, step=20)
    assert find_eval_target("quickstart-1@20").step == 20
    assert find_eval_target("model") == EvalTarget(model="model")
    assert find_eval_target("Qwen/Qwen3-0.6B") == EvalTarget(model="Qwen/Qwen3-0.6B")


def test_a_model_is_measured_below_the_runs_or_where_the_user_says(
    miles: Miles, replace: Replace, run_dir: Path
) -> None:
    folders: list[Path] = []

    def evaluate_model(model: str, **options: object) -> list[SetResult]:
        folders.append(Path(str(options["folder"])))
        return [make_result()]

    replace("milescli.runtime.evaluation.evaluate", evaluate_model=evaluate_model)
    assert miles("eval", "org/name", "--data", "x.jsonl").code == 0
    assert miles("eval", "org/name", "--data", "x.jsonl", "--out", "there").code == 0
    assert folders == [Path.cwd() / "runs" / "evaluations" / "org--name", Path("there")]


def test_folders_of_one_name_are_not_taken_for_one_model(miles: Miles, replace: Replace) -> None:
    evaluated: list[str] = []

    def evaluate_model(model: str, *, folder: Path, **options: object) -> list[SetResult]:
        evaluated.append(model)
        result = make_result(model=model, rewards=[float(model.startswith("one"))] * 40)
        write_result(result, [], folder=folder)
        return [result]

    for name in ("one", "two"):
        (Path(name) / "hf").mkdir(parents=True)
        (Path(name) / "hf" / "config.json").write_text("{}")
    replace("milescli.runtime.evaluation.evaluate", evaluate_model=evaluate_model)
    for model in ("two/hf", "one/hf"):
        assert miles("eval", model, "--data", "few=x.jsonl").code == 0
    against = ("eval", "one/hf", "--data", "few=x.jsonl", "--against", f"{Path.cwd()}/two/hf/")
    said = miles(*against)
    assert "one/hf scores higher than two/hf" in said.out
    assert evaluated == ["two/hf", "one/hf", "one/hf"], "a stored result is found by its folder"
    (Path("two") / "hf" / "config.json").write_text('{"again": 1}')
    assert miles(*against).code == 0
    assert len(evaluated) == 5, "weights that were exported again are evaluated again"


@pytest.mark.parametrize(
    "arguments",
    [
        ["org/name", "--steps", "all"],
        ["quickstart-1", "--out", "there"],
        ["quickstart-1@20", "--steps", "all"],
        ["quickstart-1@20", "--step", "40"],
    ],
)
def test_options_of_something_else_are_refused(
    miles: Miles, run_dir: Path, arguments: list[str]
) -> None:
    said = miles("eval", *arguments)
    assert said.code == 2 and "run" in said.err


def test_a_comparison_is_told_in_a_sentence(miles: Miles, replace: Replace, run_dir: Path) -> None:
    other = make_result(step=3, rewards=[0.0] * 8, path="eval/few/step_3.jsonl")
    write_result(other, [], folder=run_dir)
    given: list[EvalOptions] = []

    def evaluate_run(run: Path, *, eval_options: EvalOptions, **options: object) -> list[SetResult]:
        given.append(eval_options)
        return [make_result(step=20, rewards=[1.0] * 8)]

    replace("milescli.runtime.evaluation.evaluate", evaluate_run=evaluate_run)
    said = miles("eval", "quickstart-1", "--data", "few=x.jsonl", "--against", "quickstart-1")
    assert given[0].against == [other]
    assert "mine at step 20 scores higher than mine at step 3" in said.out
    assert "p = 0.0078 by McNemar's exact test" in said.out
    file = str(run_dir / "eval" / "few" / "step_3.json")
    told = miles("eval", "quickstart-1", "--data", "few=x.jsonl", "--against", file, "--json")
    assert given[1].against == [other]
    assert json.loads(told.out.splitlines()[-1])["difference"]["num_a_better"] == 8


def test_what_was_not_measured_before_is_measured_first(
    miles: Miles, replace: Replace, run_dir: Path
) -> None:
    asked: list[str] = []

    def evaluate_model(
        model: str, *, eval_options: EvalOptions, **options: object
    ) -> list[SetResult]:
        asked.append(f"{model} {len(eval_options.against)}")
        return [make_result(rewards=[0.25 * len(asked)] * 8)]

    replace("milescli.runtime.evaluation.evaluate", evaluate_model=evaluate_model)
    said = miles("eval", "org/one", "--data", "few=x.jsonl", "--against", "org/other")
    assert asked == ["org/other 0", "org/one 1"]
    assert "org/other has no results for these prompts yet" in said.err and said.code == 0
    assert said.out.count("evaluation of") == 2 and "+25.0 points" in said.out


def test_an_endpoint_is_measured_and_its_only_model_is_found_again(
    miles: Miles, replace: Replace
) -> None:
    seen: list[dict[str, object]] = []

    def evaluate_endpoint(url: str, **options: object) -> tuple[Path, list[SetResult]]:
        seen.append({"url": url, **options})
        folder = Path("runs") / "evaluations" / "h-1" / "tiny"
        write_result(make_result(), [], folder=folder)
        return folder, [make_result()]

    replace("milescli.runtime.evaluation.endpoint", evaluate_endpoint=evaluate_endpoint)
    url = "http://h:1/v1"
    for words in ([], ["--against", url]):
        said = miles("eval", url, "--data", "few=x.jsonl", *words)
        assert said.code == 0, said
    assert [one["url"] for one in seen] == [url, url], "what was kept is not measured again"
    (Path("runs") / "evaluations" / "h-1" / "other").mkdir()
    said = miles("eval", url, "--data", "few=x.jsonl", "--against", url)
    assert said.code == 3 and "which model at http://h:1/v1" in said.err


def test_a_model_that_does_not_fit_has_the_fixes_of_the_verb_that_was_typed(
    miles: Miles, replace: Replace
) -> None:
    fixes = [
        "--set rollout.max_response_tokens=256   # shorter responses",
        "--set train.precision=bf16   # half the weights",
        REMOTE_SERVER_FIX,
    ]

    def evaluate_model(*_: object, **__: object) -> None:
        raise MemoryTaken("it does not fit", why="20 > 12", fix=fixes)

    assert chat, "it is imported before what it imports is replaced"
    replace("milescli.runtime.evaluation.evaluate", evaluate_model=evaluate_model)
    measured = miles("eval", "org/name", "--data", "task:sums")
    assert measured.code == ExitCode.DOES_NOT_FIT
    assert all(fix in measured.err for fix in fixes)
    talked = miles("chat", "org/name")
    assert talked.code == ExitCode.DOES_NOT_FIT
    assert "fix: --tokens 256   # shorter responses" in talked.err
    assert "train.precision=bf16" in talked.err and "miles eval" not in talked.err


def test_a_step_without_a_checkpoint_has_the_fixes_of_the_verb_that_was_typed(
    miles: Miles, replace: Replace, run_dir: Path
) -> None:
    """`chat`, `serve` and RUN@STEP take no `--step`."""

    def evaluate_run(*_: object, **__: object) -> None:
        raise CheckpointError("no such step", why="30", fix="--step 30   # the newest")

    assert chat, "it is imported before what it imports is replaced"
    replace("milescli.runtime.evaluation.evaluate", evaluate_run=evaluate_run)
    run = f"{run_dir.parent.name}/{run_dir.name}"
    assert "fix: --step 30   # the newest" in miles("eval", run, "--step", "99").err
    assert f"fix: miles eval {run}@30   # the newest" in miles("eval", f"{run}@99").err
    for subject in (run, f"{run}@99"):
        assert f"fix: miles chat {run}@30   # the newest" in miles("chat", subject).err
