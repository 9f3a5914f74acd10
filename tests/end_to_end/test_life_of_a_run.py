"""launch -> kill -> resume, with real Ray, SGLang and Megatron-Core on a CPU."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from milescli import __version__
from milescli.checkpoint.base import checksum_of
from milescli.core.metric_names import by_name
from milescli.core.scalars import scalars_in
from milescli.trackers.prometheus import Exposition
from tests.end_to_end.runs import (
    Finished,
    Workplace,
    learned,
    processes_of_run,
    saved,
    tokens,
    wait_until_gone,
)
from tests.shared_memory import forgotten

WARMUP_FIGURES = (
    (6.243769169, 3.299609167),
    (5.880229950, 2.719950444),
    (5.596333027, 2.328331036),
)
"""(loss, gradient norm) of each warm-up step of this recipe, as a version had them that held the
figures of an early one over all rows of the task."""
RL_FIGURES = ((0.676469680, 0.593398392), (0.679619927, 0.572467625))
"""(mean reward, gradient norm) of the first RL steps of the same run."""


@pytest.fixture(scope="module")
def broken(workplace: Workplace, shared_memory: set[str]):
    """The same six steps; the driver is killed after step 3 was saved, then resumed, and profiled
    meanwhile: what `miles profile` said. It is tracked, and Prometheus is served meanwhile."""
    watched = ("--set", "run.trackers=[tensorboard]", "--set", "run.metrics_address=127.0.0.1:0")
    process = workplace.start("launch", "--recipe", "tiny.yaml", "--name", "broken", *watched)
    workplace.wait_for("broken", saved(3), process)
    [said] = [e["text"] for e in workplace.events("broken") if "/metrics" in e.get("text", "")]
    with urllib.request.urlopen(said.rpartition(" ")[2], timeout=120) as reply:
        (workplace.folder / "broken-metrics.txt").write_bytes(reply.read())
    ours = processes_of_run(process.pid)
    process.send_signal(signal.SIGKILL)
    workplace.finish(process)
    left = wait_until_gone(ours)
    assert not left, f"left behind after SIGKILL of the driver: {left}"
    assert not forgotten(shared_memory)
    resumed, profiled = workplace.resume_and_profile("broken", "--memory", "--json")
    assert resumed.code == 0, resumed
    return profiled


def test_every_number_of_a_run_has_its_row_in_the_table(workplace: Workplace, whole) -> None:
    told = [found[1] for event in workplace.events("whole") if (found := scalars_in(event))]
    names = {name for scalars in told for name in scalars}
    assert {"warmup/loss", "train/entropy", "rollout/reward_mean", "eval/accuracy"} <= names
    assert not names - set(by_name())


def test_prometheus_is_served_a_run_while_it_goes_on(workplace: Workplace, broken) -> None:
    shown = Exposition(run="broken", version=__version__)
    for event in workplace.events("broken"):
        shown.feed(event)
    page = (workplace.folder / "broken-metrics.txt").read_text()
    families = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    of_its_processes = {"miles_process_resident_bytes", "miles_oom_kills"}
    from_disk = {line.split()[2] for line in shown.text().splitlines() if "# TYPE" in line}
    assert {"miles_reward_mean", "miles_phase_seconds_total"} <= families
    assert families - of_its_processes <= from_disk
    assert 'miles_run_state{state="train"} 1.0' in page and "miles_checkpoint_step 3.0" in page


def test_a_tracked_run_that_was_killed_goes_on_where_it_was(workplace: Workplace, broken) -> None:
    seen = EventAccumulator(str(workplace.run("broken") / "tensorboard"))
    seen.Reload()
    rewards = [(one.step, one.value) for one in seen.Scalars("rollout/reward_mean")]
    steps = {event["step"]: event["rollout"] for event in workplace.steps("broken")}
    assert [step for step, _ in rewards] == [1, 2, 3, 4, 5, 6]
    assert dict(rewards) == {
        step: pytest.approx(rollout["reward_mean"]) for step, rollout in steps.items()
    }


def test_a_run_says_what_was_reached_and_what_comes_next(workplace: Workplace, whole) -> None:
    for command in ("miles eval", "miles resume", "miles export"):
        assert command in whole.out + whole.err
    run = workplace.run("whole")
    for name in ("recipe.yaml", "plan.json", "manifest.json", "events.jsonl", "metrics.jsonl"):
        assert (run / name).exists(), name
    assert {path.name for path in (run / "logs" / "latest").iterdir()} >= {
        "trainer-rank-0.log",
        "engine-0.log",
        "engine-0-server.log",
    }
    assert [
        event["step"] for event in workplace.events("whole") if event["event"] == "StepDone"
    ] == [1, 2, 3, 4, 5, 6]


def test_a_run_is_on_one_screen_with_its_verdict(workplace: Workplace, whole) -> None:
    told = json.loads(workplace.miles("status", "whole", "--json").out)
    assert (told["state"], told["step"], told["checkpoint_step"]) == ("done", 6, 6)
    assert told["reward"]["first"] == pytest.approx(RL_FIGURES[0][0], abs=1e-6)
    assert {phase["name"] for phase in told["phases"]} >= {"rollout", "train"}
    assert told["verdict"]["headline"].startswith("Too early to say: reward 0.67")


def test_a_run_is_one_file_that_tells_no_place_of_the_machine(workplace: Workplace, whole) -> None:
    said = workplace.miles("report", "whole", "--to", "whole.html", "--json")
    assert said.code == 0, said
    told = json.loads(said.out)
    assert told["curve"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert told["curve"]["values"][0] == pytest.approx(RL_FIGURES[0][0], abs=1e-6)
    assert [one["step"] for one in told["samples"]] == [1, 4, 6]
    assert told["evaluations"][-1]["interval"] is not None
    page = (workplace.folder / "whole.html").read_text()
    assert str(workplace.folder) not in page and "Paths, logins and secrets are left out" in page
    saved = json.loads(page.partition('id="saved">')[2].partition("</script>")[0])
    assert saved["answers"]["whole"]["manifest"]["packages"]["torch"]
    same = workplace.miles("report", "whole", "whole")
    assert same.code == 0, same
    assert "no difference that the data can show" in same.out and "are the same" in same.out


def test_evaluations_on_an_engine_of_their_own_say_the_same(workplace: Workplace, whole) -> None:
    sets = ("eval.engines=own", "eval.every=1", "weights.verify=true")
    words = [word for setting in sets for word in ("--set", setting)]
    apart = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", "apart", *words)
    assert apart.code == 0, apart
    for step in (0, 6):
        file = Path("eval", f"step_{step}.jsonl")
        assert (workplace.run("apart") / file).read_text() == (
            workplace.run("whole") / file
        ).read_text()
    evaluated = [
        event["step"] for event in workplace.events("apart") if event["event"] == "EvalDone"
    ]
    assert evaluated == list(range(7))


def test_a_model_that_guesses_ahead_changes_no_sample(workplace: Workplace, whole) -> None:
    """The run's own last checkpoint guesses, and learns; the policy knows little, and draws what it
    likes."""
    sets = ("kind=draft", "model=runs/whole")
    words = [word for setting in sets for word in ("--set", f"rollout.speculative.{setting}")]
    guessed = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", "guessed", "--set", "weights.verify=true",
        "--set", "eval.every=0", "--set", "train.draft.lr=1e-2", *words,
    )  # fmt: skip
    assert guessed.code == 0, guessed
    for step in range(1, 7):
        assert workplace.samples("guessed", step) == workplace.samples("whole", step)
    lengths = [
        event["rollout"]["accept_length"]
        for event in workplace.events("guessed")
        if event["event"] == "StepDone"
    ]
    assert min(lengths) >= 1.0 and max(lengths) > 1.0
    done = [event for event in workplace.events("guessed") if event["event"] == "StepDone"]
    assert all(event["report"]["figures"]["draft_grad_norm"] > 0 for event in done)
    assert not [
        event for event in workplace.events("guessed") if event["event"] == "WorkerReplaced"
    ]
    assert (workplace.run("guessed") / "checkpoints" / "step_6" / "draft").is_dir()


def test_engine_and_trainer_agree_over_the_whole_run(workplace: Workplace, whole) -> None:
    reports = [
        event["report"] for event in workplace.events("whole") if event["event"] == "StepDone"
    ]
    assert max(report["logprob_diff_max"] for report in reports) <= 1e-4
    assert max(report["logprob_diff_mean"] for report in reports) <= 1e-5
    ratios = [report["figures"]["ratio_mean"] for report in reports]
    assert all(ratio == pytest.approx(1.0, abs=1e-6) for ratio in ratios)


def test_losses_gradients_and_rewards_are_those_that_were_recorded(
    workplace: Workplace, whole
) -> None:
    events = workplace.events("whole")
    warmup = [event["report"] for event in events if event["event"] == "WarmupStepDone"]
    for report, (loss, grad_norm) in zip(warmup, WARMUP_FIGURES, strict=True):
        assert report["loss"] == pytest.approx(loss, rel=1e-4)
        assert report["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    steps = [event for event in events if event["event"] == "StepDone"][: len(RL_FIGURES)]
    for step, (reward_mean, grad_norm) in zip(steps, RL_FIGURES, strict=True):
        # another kind of processor may sample one token of 256 otherwise
        assert step["rollout"]["reward_mean"] == pytest.approx(reward_mean, abs=0.01)
        assert step["report"]["grad_norm"] == pytest.approx(grad_norm, rel=0.02)


def test_a_run_that_was_killed_and_resumed_is_bit_for_bit_the_run_that_was_not(
    workplace: Workplace, whole, broken, exported: Path
) -> None:
    ours = _weights(exported)
    theirs = _weights(workplace.export("broken", step=6))
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    start = _weights(workplace.export("whole", step=3))
    assert any(not torch.equal(start[name], ours[name]) for name in ours), (
        "three steps changed nothing: the comparison is blind"
    )


@pytest.mark.thorough
def test_a_fork_is_bit_for_bit_its_trunk(workplace: Workplace, whole, exported: Path) -> None:
    samples_again = ("--set", "fault.journal_gib=0")
    made = workplace.miles("fork", "whole", "--step", "3", "--name", "branch", *samples_again)
    assert made.code == 0, made
    resumed = workplace.miles("resume", "branch")
    assert resumed.code == 0, resumed
    theirs = [learned(step) for step in workplace.steps("whole")]
    assert [learned(step) for step in workplace.steps("branch")] == theirs[3:]
    ours, weights = _weights(exported), _weights(workplace.export("branch", step=6))
    assert not [name for name in ours if not torch.equal(ours[name], weights[name])]


def test_equal_seeds_give_equal_tokens_in_every_step(workplace: Workplace, whole, broken) -> None:
    for step in range(1, 7):
        ours, theirs = (
            workplace.run(name) / "rollouts" / f"step_{step}.jsonl" for name in ("whole", "broken")
        )
        assert tokens(ours) == tokens(theirs), f"step {step}"


def test_a_profile_says_where_the_time_went_and_changes_no_step(
    workplace: Workplace, whole, broken: Finished
) -> None:
    assert broken.code == 0, broken
    profile = json.loads(broken.out.splitlines()[-1])
    rank, engine = profile["parts"]
    assert (rank["name"], engine["name"]) == ("rank 0", "engine 0")
    for part in (rank, engine):
        assert part["error"] is None, part
        assert sum(part["shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert {"matmul", "attention", "optimizer", "waiting"} <= set(rank["shares"])
    assert {"weights", "gradients", "optimizer"} <= {kind["what"] for kind in rank["tensors"]}
    assert {"driver", "trainer-rank-0"} <= set(profile["resident_bytes"])
    folder = Path(profile["folder"])
    assert folder.stat().st_mode & 0o077 == 0 and folder.parent.stat().st_mode & 0o077 == 0
    assert {"rank_0.json.gz", "engine_0.stacks.txt", "summary.json"} <= {
        file.name for file in folder.iterdir()
    }
    # figures of engines aside, whose last bits depend on which requests they compute together
    figures = ("loss", "grad_norm", "num_tokens", "figures")
    ours, theirs = (
        {step["step"]: [step["report"][name] for name in figures] for step in workplace.steps(run)}
        for run in ("whole", "broken")
    )
    assert theirs == ours
    told = [one for one in workplace.events("broken") if one["event"] == "MemorySeen"]
    peaks = {own["worker"]: own["peak_bytes"] for one in told for own in one["workers"]}
    assert set(peaks) >= {"trainer rank 0", "engine 0"} and min(peaks.values()) > 0


def test_a_profile_of_a_run_that_has_ended_is_refused(workplace: Workplace, whole) -> None:
    refused = workplace.miles("profile", "whole")
    assert refused.code == 1, refused
    for word in ("is not running", "its state is done", "--steps 26"):
        assert word in refused.err


def test_resume_refuses_a_run_that_is_done_and_says_how_to_go_further(
    workplace: Workplace, whole
) -> None:
    refused = workplace.miles("resume", "whole")
    assert refused.code == 3
    assert "--steps" in refused.err and "Traceback" not in refused.err


def test_resume_refuses_changed_prompts(workplace: Workplace, whole) -> None:
    run = workplace.copy_run("whole", "changed")
    manifest = sorted((run / "checkpoints").glob("step_*/manifest.json"))[-1]
    record = {**json.loads(manifest.read_text()), "data_sha256": "0" * 64}
    manifest.write_text(json.dumps({**record, "checksum": checksum_of(record)}))
    refused = workplace.miles("resume", "changed", "--steps", "9")
    assert refused.code == 6, refused
    assert "prompts" in refused.err and "Traceback" not in refused.err
    assert (run / "model" / "config.json").exists()


def test_a_flipped_byte_is_named_and_the_step_before_is_what_can_be_had(
    workplace: Workplace, whole
) -> None:
    file = workplace.copy_run("whole", "flipped") / "checkpoints" / "step_6" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused = workplace.miles("export", "flipped", "--to", "flipped-hf")
    assert refused.code == 6, refused
    assert file.name in refused.err and "--step 3" in refused.err
    assert not (workplace.folder / "flipped-hf").exists()
    back = workplace.miles("resume", "flipped", "--steps", "3")
    assert back.code == 3 and "has completed all 3 steps" in back.err, back
    assert file.name in back.err and "continues from the previous checkpoint, step 3" in back.err


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
