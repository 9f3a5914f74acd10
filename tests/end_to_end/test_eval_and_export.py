"""A run that is done -> eval and export: its samples come again, from its checkpoints and from the
folder that anybody can load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.runs import Workplace, tokens


def test_eval_of_a_checkpoint_gives_the_samples_of_the_run(workplace: Workplace, whole) -> None:
    file = workplace.copy_run("whole", "evaluated") / "eval" / "step_6.jsonl"
    of_the_run = tokens(file)
    file.unlink()
    finished = workplace.miles("--json", "eval", "evaluated")
    assert finished.code == 0, finished
    assert json.loads(finished.out.splitlines()[-1])["num_prompts"] == 8
    assert tokens(file) == of_the_run


def test_eval_of_all_steps_on_two_sets_starts_engines_once(workplace: Workplace, whole) -> None:
    run = workplace.copy_run("whole", "measured")
    rows = [json.loads(line) for line in (run / "data" / "sums-heldout.jsonl").open()][:6]
    for place, row in enumerate(rows):
        row["domain"] = ("even", "odd")[place % 2]
    (workplace.folder / "few.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    asked = ["--samples", "2", "--temperature", "1.0", "--data", "few.jsonl", "--json"]
    done = workplace.miles(
        "eval", "measured", "--steps", "all", *asked, "--data", "more=few.jsonl[0:4]"
    )
    assert done.code == 0, done
    told = [one for one in map(json.loads, done.out.splitlines()) if one["kind"] != "progress"]
    steps = [0, 3, 6]
    assert [(one["step"], one["set"], one["num_prompts"]) for one in told] == [
        place for step in steps for place in ((step, "few", 6), (step, "more", 4))
    ]
    assert set(told[0]["estimates"]) == {"avg@2", "pass@1", "pass@2"}
    assert {name: one["num_prompts"] for name, one in told[0]["domains"].items()} == {
        "even": 3,
        "odd": 3,
    }
    sampled = {step: tokens(run / "eval" / "few" / f"step_{step}.jsonl") for step in steps}
    assert sampled[0] != sampled[3] != sampled[6]
    assert done.err.count("starting engines") == 1
    alone = workplace.miles("eval", "measured", "--step", "3", *asked)
    assert alone.code == 0, alone
    assert tokens(run / "eval" / "few" / "step_3.jsonl") == sampled[3], "not the weights of step 3"


def test_stop_strings_of_the_run_end_answers_beside_a_benchmark_that_has_none(
    workplace: Workplace, whole
) -> None:
    run = workplace.copy_run("whole", "stopping")
    recipe = (run / "recipe.yaml").read_text()
    assert "  stop: []" in recipe
    (run / "recipe.yaml").write_text(recipe.replace("  stop: []", '  stop: ["1"]'))
    question = {"question": "1 + 1?", "answer": "It is 2. #### 2"}
    (workplace.folder / "gsm8k.jsonl").write_text(json.dumps(question))
    rows = (run / "data" / "sums-heldout.jsonl").read_text().splitlines()[:6]
    (workplace.folder / "mine.jsonl").write_text("\n".join(rows))
    data = ["--data", "gsm8k=gsm8k.jsonl", "--data", "mine.jsonl"]
    done = workplace.miles("eval", "stopping", *data, "--set", "eval.max_response_tokens=16")
    assert done.code == 0, done
    samples = (run / "eval" / "mine" / "step_6.jsonl").read_text().splitlines()
    texts = [json.loads(line)["response"] for line in samples]
    assert not any("1" in text[:-1] for text in texts)


def test_an_exported_model_is_asked_without_its_run_and_compared_with_it(
    workplace: Workplace, exported: Path
) -> None:
    run = workplace.copy_run("whole", "compared")
    rows = (run / "data" / "sums-heldout.jsonl").read_text().splitlines()[:6]
    (workplace.folder / "six.jsonl").write_text("\n".join(rows))
    asked = ["--data", "six.jsonl", "--set", "eval.max_response_tokens=16"]
    asked += ["--set", "rollout.reward=tests.end_to_end.rewards:variety", "--json"]
    alone = workplace.miles("eval", str(exported), *asked, "--out", "alone")
    assert alone.code == 0, alone
    kept = "alone/eval/six/step_0.json"
    ours = workplace.miles("eval", "compared", *asked, "--against", kept)
    assert ours.code == 0, ours
    told = json.loads(ours.out.splitlines()[-1])
    assert told["difference"]["p_value"] == 1.0 and told["a_accuracy"] == told["b_accuracy"]
    files = (workplace.folder / kept, run / "eval" / "six" / "step_6.json")
    assert tokens(files[0].with_suffix(".jsonl")) == tokens(files[1].with_suffix(".jsonl"))


def test_an_exported_folder_loads_in_transformers_and_gives_the_greedy_samples_of_the_run(
    workplace: Workplace, exported: Path
) -> None:
    rows = [
        json.loads(line)
        for line in (workplace.run("whole") / "eval" / "step_6.jsonl").read_text().splitlines()
    ]
    from tests.end_to_end.hugging_face import greedy

    assert greedy(exported, [row["prompt_ids"] for row in rows], max_new_tokens=16) == [
        row["response_ids"] for row in rows
    ]


def test_what_the_model_card_says_works_as_it_stands(exported: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, "-c", code + "print(type(tokenizer), type(model))"],
        cwd=exported.parent,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "Qwen3ForCausalLM" in done.stdout, done.stderr
