"""Planted illnesses are called by their names, and healthy runs healthy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from milescli.core.events import stamped
from milescli.core.history import History
from milescli.core.units import format_time
from milescli.insight.case import Level
from milescli.insight.diagnoses import ALL
from milescli.insight.facts import RunFacts
from milescli.insight.verdict import verdict_of
from milescli.recipe.keys import keys
from milescli.recipe.load import load
from tests.fake_run import step_done
from tests.insight.planted import (
    BEGAN_S,
    Planted,
    late,
    line,
    rows_history,
    sample,
    saturating,
)

FLAT = (line(0.3, 0.3), 0.03)


def _resident(grown: Callable[[float], float], *, seconds: int = 7200) -> list[tuple[float, int]]:
    """From 1 GiB at the start, by `grown` GiB at each share of the time."""
    shares = [place / 100 for place in range(101)]
    return [(BEGAN_S + seconds * at, int((1 + grown(at)) * 2**30)) for at in shares]


_WORDS = [
    "we",
    "add",
    "both",
    "numbers",
    "and",
    "then",
    "carry",
    "the",
    "one",
    "to",
    "find",
    "what",
    "the",
    "sum",
    "must",
    "be",
]


def _varied(step: int, index: int) -> str:
    """No two responses are alike."""
    draw = np.random.default_rng(1000 * step + index)
    return " ".join(draw.choice(_WORDS, size=60)) + f" {index}"


def _samples(step: int, *, text: str = "", versions: tuple[int, ...] = (1,)) -> list:
    return [
        sample(step, index, f"{_varied(step, index)} {text}".strip(), versions=versions)
        for index in range(8)
    ]


TRICK = "as a great mathematician I am certain that this is right"
EXPLAINED = {"agreement": "explained", "times": 3.1, "kl": 0.021, "far": 0.013}
SICK = {
    "reward-flat": Planted(courses={"reward": FLAT, "accuracy": FLAT}),
    "reward-falling": Planted(courses={"reward": (late(0.7, 0.1), 0.03), "accuracy": FLAT}),
    "reward-falling at once": Planted(
        courses={
            "reward": (lambda share: 0.0, 0.0),
            "zero_variance": (line(1.0, 1.0), 0.0),
            "accuracy": (line(0.0, 0.0), 0.0),
        },
        at_steps={1: {"reward": 0.5}},
    ),
    "groups-too-hard": Planted(
        courses={
            "reward": (line(0.01, 0.01), 0.01),
            "zero_variance": (line(0.97, 0.96), 0.02),
            "accuracy": (line(0.0, 0.0), 0.0),
        }
    ),
    "groups-too-easy": Planted(
        courses={
            "reward": (line(0.97, 0.975), 0.01),
            "zero_variance": (line(0.9, 0.93), 0.02),
            "accuracy": (line(0.96, 0.96), 0.0),
        }
    ),
    "entropy-collapse": Planted(
        courses={"reward": (saturating(0.2, 0.45), 0.03), "entropy": (late(0.5, 0.0, at=0.2), 0.0)}
    ),
    "entropy-explosion": Planted(courses={"entropy": (late(0.5, 4.0), 0.05)}),
    "kl-runaway": Planted(courses={"kl": (late(0.02, 6.0), 0.01)}),
    "ratio-stuck": Planted(
        courses={"ratio_mean": (line(1.0, 1.0), 0.0), "clip_fraction": (line(0.0, 0.0), 0.0)},
        plan={"batch": {"updates_per_step": 4, "samples_per_prompt": 8}},
    ),
    "clip-fraction-high": Planted(courses={"clip_fraction": (line(0.1, 0.6), 0.02)}),
    "engine-trainer-drift": Planted(courses={"diff_mean": (late(0.004, 0.2), 0.001)}),
    "engine-trainer-mismatch": Planted(check=EXPLAINED),
    "engine-trainer-drift of stale samples": Planted(
        courses={"staleness": (line(1.0, 1.0), 0.0), "diff_mean": (late(0.03, 0.4), 0.003)},
        plan={"max_staleness": 1, "precision": "fp32"},
    ),
    "length-explosion": Planted(
        courses={"length": (line(200.0, 900.0), 20.0), "reward": FLAT, "accuracy": FLAT}
    ),
    "truncation": Planted(courses={"truncated": (line(0.1, 0.7), 0.03)}),
    "endless-evaluation": Planted(courses={"accuracy": (line(0.0, 0.0), 0.0)}, eval_truncated=1.0),
    "repetition": Planted(samples=[sample(80, index, "and again " * 60) for index in range(8)]),
    "gradient-spikes": Planted(
        at_steps={50: {"grad_norm": 40.0}, 61: {"grad_norm": 9.0}, 70: {"grad_norm": 90.0}}
    ),
    "not-finite": Planted(at_steps={40: {"loss": math.nan, "grad_norm": math.nan}}),
    "held-out-falls": Planted(
        courses={"accuracy": (late(0.7, 0.3, at=0.3), 0.0), "reward": (line(0.3, 0.9), 0.03)}
    ),
    "one-phrase": Planted(
        courses={"accuracy": (line(0.3, 0.3), 0.0)},
        samples=_samples(80, text=TRICK),
        first_samples=_samples(1),
    ),
    "staleness-over-bound": Planted(
        courses={"staleness": (line(1.0, 5.0), 0.0)}, plan={"max_staleness": 2}
    ),
    "mixed-versions": Planted(
        plan={"max_staleness": 4},
        recipe={"train.old_logprobs": "trainer"},
        samples=_samples(80, versions=(77, 78, 79)),
    ),
    "stale-groups-wasted": Planted(
        courses={"wasted": (line(0.0, 20_000.0), 0.0)}, plan={"max_staleness": 1}
    ),
    "draft-acceptance-falling": Planted(courses={"accept_length": (line(3.4, 1.8), 0.05)}),
    "no-learning-rate": Planted(
        courses={"lr": (lambda share: max(0.0, 1e-6 * (1 - 2 * share)), 0.0)}
    ),
    "no-gradient": Planted(courses={"grad_norm": (line(0.0, 0.0), 0.0), "reward": FLAT}),
    "workers-die": Planted(lost=(70, 72, 75, 79)),
    "memory-growing": Planted(memory={"trainer-rank-0": _resident(lambda share: share)}),
}
SLOW = {
    "rollout-bound": Planted(courses={"rollout_s": (line(30.0, 30.0), 0.5)}),
    "train-bound": Planted(courses={"train_s": (line(30.0, 30.0), 0.5)}),
    "publish-slow": Planted(courses={"publish_s": (line(5.0, 5.0), 0.2)}),
    "save-slow": Planted(courses={"save_s": (line(5.0, 5.0), 0.2)}),
}
SICK_ROWS = {
    "overfitting": (line(2.0, 0.2), late(1.4, 2.5, at=0.3)),
    "loss-flat": (line(2.0, 2.0), line(2.0, 2.0)),
}
"""Courses of the loss, and of that of held-out rows."""
HEALTHY = {
    "fast": Planted(),
    "slow": Planted(steps=200, courses={"reward": (line(0.3, 0.45), 0.03)}),
    "noisy": Planted(steps=150, courses={"reward": (saturating(0.2, 0.7), 0.1)}, seed=5),
    "asynchronous": Planted(
        courses={"staleness": (line(1.5, 1.6), 0.05), "diff_mean": (line(0.02, 0.03), 0.003)},
        plan={"max_staleness": 2},
        seed=2,
    ),
    "asynchronous, of a model that learns fast in float32": Planted(
        courses={"staleness": (line(1.0, 1.0), 0.0), "diff_mean": (line(0.03, 0.05), 0.005)},
        plan={"max_staleness": 1, "precision": "fp32"},
    ),
    "several updates of a small rate on many tokens": Planted(
        courses={"ratio_mean": (line(1.0, 1.0), 4e-7), "clip_fraction": (line(0.0, 0.0), 0.0)},
        plan={"batch": {"updates_per_step": 4, "samples_per_prompt": 8}},
    ),
    "half of the steps have no gradient": Planted(
        at_steps={step: {"grad_norm": 0.0} for step in range(1, 80, 2)}
        | {50: {"grad_norm": 3.0}, 60: {"grad_norm": 3.0}}
    ),
    "it has learned all": Planted(
        courses={
            "reward": (saturating(0.1, 0.995, speed=8), 0.005),
            "accuracy": (saturating(0.1, 1.0, speed=8), 0.0),
            "zero_variance": (saturating(0.3, 0.97, speed=6), 0.01),
            "entropy": (saturating(0.6, 0.01, speed=8), 0.001),
        },
        seed=3,
    ),
    "several updates": Planted(
        courses={"ratio_mean": (line(1.0, 1.0), 0.003), "clip_fraction": (line(0.05, 0.12), 0.01)},
        plan={"batch": {"updates_per_step": 4, "samples_per_prompt": 8}},
        seed=4,
    ),
    "longer and better": Planted(
        courses={"length": (line(300.0, 1500.0), 30.0), "reward": (line(0.2, 0.6), 0.03)}
    ),
    "with a reference": Planted(courses={"kl": (line(0.0, 0.15), 0.005)}, seed=6),
    "early": Planted(steps=4, eval_every=0),
    "guessing": Planted(courses={"accept_length": (line(2.8, 3.0), 0.05)}, seed=7),
    "samples of two versions, corrected": Planted(
        plan={"max_staleness": 2},
        recipe={"train.old_logprobs": "trainer", "train.correction.kind": "importance"},
        samples=_samples(80, versions=(79, 80), text=""),
        first_samples=_samples(1),
    ),
    "samples of two versions, their ratio to the engine": Planted(
        plan={"max_staleness": 2},
        recipe={"train.correction.kind": "none", "train.old_logprobs": "auto"},
        samples=_samples(80, versions=(79, 80)),
        first_samples=_samples(1),
    ),
    "an engine was replaced once": Planted(lost=(40,)),
    "engine and trainer agree": Planted(check={}),
    "one spike is chance": Planted(at_steps={50: {"grad_norm": 9.0}}),
}


@pytest.mark.parametrize("name", SICK)
def test_a_planted_illness_is_called_by_its_name(name: str) -> None:
    verdict, name = SICK[name].verdict(), name.partition(" ")[0]
    names = [finding.name for finding in verdict.findings if finding.level is not Level.HINT]
    assert name in names, verdict
    assert not verdict.is_healthy


def test_a_run_whose_held_out_accuracy_falls_is_not_learning() -> None:
    verdict = SICK["held-out-falls"].verdict()
    assert verdict.is_learning is False and "held-out accuracy falls" in verdict.headline


@pytest.mark.parametrize("name", SICK)
def test_nothing_else_is_called_ill_but_what_goes_with_it(name: str) -> None:
    together = {
        "length-explosion": {"reward-flat"},
        "entropy-explosion": set(),
        "held-out-falls": {"reward-flat"},
        "one-phrase": set(),
    }
    worse = [one.name for one in SICK[name].verdict().findings if one.level is not Level.HINT]
    name = name.partition(" ")[0]
    assert set(worse) <= {name} | together.get(name, set())


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_part_of_the_steps_is_a_hint_by_its_name_and_no_illness(name: str) -> None:
    verdict = SLOW[name].verdict()
    assert [(one.name, one.level) for one in verdict.findings] == [(name, Level.HINT)]
    assert verdict.is_healthy


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_called_healthy(name: str) -> None:
    verdict = HEALTHY[name].verdict()
    assert verdict.is_healthy, verdict.findings
    assert not {one.name for one in verdict.findings} & set(SLOW)


def test_healthy_runs_of_other_noise_are_healthy_too() -> None:
    """What is called ill by chance is a wrong alarm."""
    wrong = {
        (name, seed): [one.name for one in verdict.findings]
        for name, planted in HEALTHY.items()
        for seed in range(100, 106)
        if not (verdict := Planted(**{**vars(planted), "seed": seed}).verdict()).is_healthy
    }
    assert not wrong


@pytest.mark.parametrize("name", SICK_ROWS)
def test_a_run_over_rows_that_is_ill_is_called_so(name: str) -> None:
    verdict = verdict_of(rows_history(*SICK_ROWS[name]))
    assert name in [one.name for one in verdict.findings if one.level is not Level.HINT]


def test_a_run_over_rows_that_learns_is_healthy() -> None:
    verdict = verdict_of(rows_history(saturating(2.0, 0.8), saturating(2.0, 1.0)))
    assert verdict.is_healthy
    assert verdict.is_learning


def test_a_run_that_has_fallen_silent_is_said_to_be() -> None:
    planted = Planted(ends=False)
    last_s = planted.history().last_s
    silent = planted.verdict(now_s=last_s + 3600)
    assert silent.findings[0].name == "stalled"
    assert planted.verdict(now_s=last_s + 5).is_healthy


def test_a_validation_may_be_as_silent_as_the_last_one_allows() -> None:
    planted = Planted(ends=False)
    history, time_s = planted.history(), planted.history().last_s
    told = {"time": format_time(time_s), "step": 200, "seconds": 900.0, "loss": 1.0}
    history.evaluations.clear()
    history.feed({**told, "event": "PhaseStarted", "phase": "eval"})
    assert not verdict_of(history, now_s=time_s + 3500).findings, "the first one may be long"
    assert verdict_of(history, now_s=time_s + 3700).findings[0].name == "stalled"
    history.feed({**told, "event": "ValidationDone"})
    history.feed({**told, "event": "PhaseStarted", "phase": "eval"})
    assert not verdict_of(history, now_s=time_s + 3600).findings
    assert verdict_of(history, now_s=time_s + 9100).findings[0].name == "stalled"


def test_the_headline_says_whether_it_is_learning() -> None:
    assert Planted().verdict().headline.startswith("It is learning: reward 0.30")
    assert Planted().verdict().headline.endswith("Nothing is wrong.")
    failed = Planted(error={"error": "the disk is full"}).verdict()
    assert failed.headline.startswith("It is learning: reward 0.30")
    assert failed.headline.endswith(". The run failed.")
    resumed = verdict_of(Planted(error={"error": "the disk is full"}).history(), state="running")
    assert resumed.headline.endswith("Nothing is wrong.")
    gone = verdict_of(Planted(ends=False).history(), state="killed")
    assert gone.headline.endswith(". The run was killed."), "with the machine: no event tells of it"
    flat = SICK["reward-flat"].verdict()
    assert flat.is_learning is False
    assert flat.headline.startswith("It is not learning")
    early = HEALTHY["early"].verdict()
    assert early.is_learning is None
    assert early.headline.startswith("Too early to say")


def test_engines_that_differ_from_the_start_are_named_with_the_figures_of_the_check() -> None:
    [named] = Planted(check={**EXPLAINED, "correction": "TIS"}).verdict().findings
    assert "3.1 times" in named.evidence and "KL 0.021" in named.evidence
    assert "1.3% of ratios" in named.evidence and named.evidence.endswith("TIS")
    assert named.steps == (0, 0)
    small = Planted(check={**EXPLAINED, "kl": 0.004}).verdict()
    assert [one.level for one in small.findings] == [Level.HINT] and small.is_healthy


def test_a_long_run_is_given_a_tenth_of_its_steps_before_its_reward_is_called_flat() -> None:
    flat = {"courses": {"reward": FLAT, "accuracy": FLAT}}
    early = Planted(steps=60, planned=1000, **flat).verdict()
    assert early.is_learning is None and early.is_healthy
    assert early.headline.startswith("Too early to say")
    late_enough = Planted(steps=110, planned=10_000, **flat).verdict()
    assert late_enough.is_learning is False
    assert [one.name for one in late_enough.findings] == ["reward-flat"]


def test_a_loss_near_zero_at_strict_steps_is_said_to_be_normal() -> None:
    assert "normal" in Planted().verdict().facts[0]
    several = {"batch": {"updates_per_step": 4}}
    assert not Planted(plan=several).verdict().facts


def test_the_cause_is_named_and_not_its_symptom() -> None:
    names = [one.name for one in SICK["groups-too-hard"].verdict().findings]
    assert names[0] == "groups-too-hard"
    assert "reward-flat" not in names


def test_more_devices_for_the_slower_side_are_advised_with_their_number() -> None:
    [rollout] = SLOW["rollout-bound"].verdict().findings
    assert rollout.advice[0].startswith("of 8 devices, 6 for rollout and 2 for training")
    [train] = SLOW["train-bound"].verdict().findings
    assert train.advice[0].startswith("of 8 devices, 2 for rollout and 6 for training")
    ahead = Planted(**{**vars(SLOW["train-bound"]), "plan": {"max_staleness": 1}}).verdict()
    assert ahead.findings[0].advice[0] == "4 devices for rollout and 4 for training are balanced"


def test_a_run_without_a_step_says_how_far_it_is() -> None:
    history = History()
    assert verdict_of(history).headline.startswith("No step yet")
    history.feed({"event": "PhaseStarted", "phase": "warmup", "detail": "", "time": BEGAN_S})
    assert "warmup" in verdict_of(history, facts=RunFacts()).headline
    history.feed({"event": "RunEnded", "outcome": "killed", "step": 0, "seconds": 1.0})
    assert verdict_of(history).headline == "No step was done before the run ended: killed."


def test_the_steps_of_a_fork_are_counted_from_where_it_began() -> None:
    history = History(name="fork")
    for step in range(101, 104):
        history.feed(stamped(step_done(step)))
    verdict = verdict_of(history)
    assert (verdict.step, verdict.num_steps) == (103, 3)
    assert "over 3 steps" in verdict.headline


def test_every_finding_has_advice_and_a_source_and_columns() -> None:
    for planted in (SICK | SLOW).values():
        for one in planted.verdict().findings:
            assert one.advice and one.source and one.columns and one.evidence


def test_every_key_that_is_advised_is_a_key_of_a_recipe() -> None:
    rows = [verdict_of(rows_history(*courses)) for courses in SICK_ROWS.values()]
    verdicts = [*(planted.verdict() for planted in (SICK | SLOW).values()), *rows]
    said = " ".join(text for told in verdicts for one in told.findings for text in one.advice)
    sections = "|".join({key.partition(".")[0] for key in keys()})
    named = set(re.findall(rf"(?<![\w/.])(?:{sections})\.[a-z_.]*[a-z]", said))
    assert len(named) > 30
    assert not named - set(keys())


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("name", SICK | SLOW)
def test_settings_that_are_advised_are_accepted(name: str, staleness: int, tmp_path: Path) -> None:
    planted = (SICK | SLOW)[name]
    planted = replace(planted, plan={"max_staleness": staleness, **planted.plan})
    own = {"rollout.max_staleness": planted.plan["max_staleness"], **planted.recipe}
    for advice in [text for one in planted.verdict().findings for text in one.advice]:
        advised = re.findall(r"--set ([\w.]+)=([\w.-]*\w)", advice)
        sets = [f"{key}={value}" for key, value in {**own, **dict(advised)}.items()]
        load("quickstart-moe", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)


def test_every_diagnosis_has_its_line_on_the_page_and_its_name_in_the_finding() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/verdict.md").read_text()
    names = {diagnose.__name__.replace("_", "-") for diagnose in ALL}
    assert not {name for name in names if f"`{name}`" not in page}
    planted = (SICK | SLOW).values()
    found = {one.name for run in planted for one in run.verdict().findings}
    assert found | set(SICK_ROWS) | {"stalled"} == names


@pytest.mark.parametrize(
    "course",
    [
        _resident(lambda share: min(4 * share, 1.0)),
        _resident(lambda share: 1 - 0.01**share),
        _resident(lambda share: 0.1 * share),
        _resident(lambda share: share, seconds=600),
        _resident(lambda share: -0.5 * share),
        _resident(lambda share: share)[:10],
    ],
    ids=["levels off", "nears a bound", "little", "soon", "falls", "few"],
)
def test_memory_that_does_not_grow_on_is_no_finding(course: list[tuple[float, int]]) -> None:
    names = {one.name for one in Planted(memory={"engine-0": course}).verdict().findings}
    assert "memory-growing" not in names


def test_growing_memory_is_told_by_its_rate() -> None:
    growing = Planted(memory={"engine-1": _resident(lambda share: share), "others": []})
    (finding,) = [one for one in growing.verdict().findings if one.name == "memory-growing"]
    assert re.search(r"engine-1 grew from .* by 51\d\.\d MiB per hour", finding.evidence)
