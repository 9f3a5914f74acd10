"""Learning from teachers, in runs that are stopped, resumed and laid out otherwise: on the policy's
own samples, and on rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.platform.ports import free_ports
from tests.backends.sglang.warm_engines import engine_of
from tests.end_to_end.runs import Workplace

ON_POLICY = [
    "train.distill.teachers=[{path: runs/teacher}]",
    "rollout.reward=none",
    "checkpoint.every=1",
    "eval.num_prompts=4",
]
ROWS = [
    "train.batch_size=8",
    "warmup.steps=0",
    "data.prompts=null",
    "data.eval=null",
    "data.train=task:sums-worked",
    "data.max_row_tokens=128",
]
DEMONSTRATED = ["train.objective=supervised", "train.optimizer.lr=2e-3", *ROWS]
"""Needs no engine."""
OF_ROWS = [
    "train.distill.teachers=[{path: runs/teacher}]",
    "train.distill.kl=forward",
    "train.distill.top_k=8",
    "train.objective=distillation",
    *ROWS,
    "data.validation=task:sums-worked-heldout",
    "checkpoint.every=1",
]


def _launch(workplace: Workplace, name: str, sets: list[str], *, steps: int) -> None:
    words = [word for setting in sets for word in ("--set", setting)]
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", name, "--steps", str(steps), *words
    )
    assert finished.code == 0, finished


def _reports(workplace: Workplace, name: str, event: str) -> list[dict]:
    kept = ("loss", "grad_norm", "figures", "num_tokens")
    return [
        {key: entry["report"][key] for key in kept}
        for entry in workplace.events(name)
        if entry["event"] == event
    ]


@pytest.fixture(scope="module")
def teacher(workplace: Workplace) -> Workplace:
    """Where the run `teacher` is: a model with one more layer than the policy."""
    _launch(workplace, "teacher", ["model.scratch.num_layers=3", *DEMONSTRATED], steps=40)
    return workplace


def _taught(teacher: Workplace, kl: str) -> list[dict]:
    """Reports of three steps on the policy's own samples; made once."""
    if not teacher.run(f"taught-{kl}").exists():
        sets = [*ON_POLICY, f"train.distill.kl={kl}"]
        _launch(teacher, f"taught-{kl}", sets, steps=3)
    return _reports(teacher, f"taught-{kl}", "StepDone")


@pytest.fixture(scope="module")
def rows(teacher: Workplace) -> list[dict]:
    """Reports of three steps on rows."""
    _launch(teacher, "rows", OF_ROWS, steps=3)
    return _reports(teacher, "rows", "RowStepDone")


def _asked(workplace: Workplace, name: str) -> list[str]:
    """How many rows were put before the teacher, each time."""
    return [
        event["detail"].split()[0]
        for event in workplace.events(name)
        if event["event"] == "PhaseStarted" and event["phase"] == "teacher"
    ]


@pytest.mark.parametrize("kl", ["sampled", "reverse"])
def test_a_run_that_learns_from_a_teacher_is_resumed_bit_for_bit(
    teacher: Workplace, kl: str
) -> None:
    whole = _taught(teacher, kl)
    assert len(whole) == 3
    assert all(report["figures"]["teacher_kl"] > 0.01 for report in whole)
    assert all(report["grad_norm"] > 0 for report in whole), "no reward, and yet it learns"
    again = teacher.resume_without(f"taught-{kl}", step=3)
    assert _reports(teacher, again, "StepDone") == whole


@pytest.fixture(scope="module")
def served(teacher: Workplace) -> Iterator[str]:
    """URL of an engine that has the same teacher."""
    finished = teacher.miles("export", "teacher", "--to", "served")
    assert finished.code == 0, finished
    folder = teacher.folder / "served"
    engine = engine_of(
        EngineSpec(
            model_dir=folder,
            tokenizer_dir=folder,
            device_kind="cpu",
            precision="fp32",
            port=free_ports(1)[0],
            log_path=teacher.folder / "served.log",
            max_total_tokens=16_384,
            context_length=512,
        )
    )
    try:
        engine.start()
        engine.wait_ready(400)
        yield engine.url
    finally:
        engine.stop()


def _of_server(sets: list[str], url: str) -> list[str]:
    return [setting.replace("path: runs/teacher", f"url: '{url}'") for setting in sets]


@pytest.mark.parametrize("collectors", [0, 2])
def test_a_served_teacher_teaches_what_one_on_the_ranks_does(
    teacher: Workplace, served: str, collectors: int
) -> None:
    sets = [*ON_POLICY, "train.distill.kl=reverse", f"machine.collectors={collectors}"]
    name = f"served-{collectors}"
    _launch(teacher, name, _of_server(sets, served), steps=2)
    reports = _reports(teacher, name, "StepDone")
    for asked, held in zip(reports, _taught(teacher, "reverse"), strict=False):
        for name in ("loss", "grad_norm"):
            assert asked[name] == pytest.approx(held[name], rel=1e-3, abs=1e-6)
        assert asked["figures"] == pytest.approx(held["figures"], rel=1e-3, abs=1e-5)


def test_rows_are_put_before_a_served_teacher_once(
    teacher: Workplace, rows: list[dict], served: str
) -> None:
    _launch(teacher, "rows-served", _of_server(OF_ROWS, served), steps=2)
    finished = teacher.miles("resume", "rows-served", "--steps", "3")
    assert finished.code == 0, finished
    reports = _reports(teacher, "rows-served", "RowStepDone")
    assert [report["loss"] for report in reports] == pytest.approx(
        [report["loss"] for report in rows], rel=1e-4
    )
    assert _asked(teacher, "rows-served") == ["24", "8"]


def test_rows_are_put_before_the_teacher_once(teacher: Workplace, rows: list[dict]) -> None:
    assert rows[2]["figures"]["teacher_kl"] < rows[0]["figures"]["teacher_kl"]
    _launch(teacher, "rows-live", [*OF_ROWS, "train.distill.cache=false"], steps=3)
    assert _reports(teacher, "rows-live", "RowStepDone") == rows

    _launch(teacher, "rows-stopped", OF_ROWS, steps=2)
    finished = teacher.miles("resume", "rows-stopped", "--steps", "3")
    assert finished.code == 0, finished
    assert _reports(teacher, "rows-stopped", "RowStepDone") == rows
    assert _asked(teacher, "rows-stopped") == ["24", "8"], "what was kept is not asked again"


def test_a_teacher_with_another_tokenizer_is_refused_and_nothing_is_left(
    teacher: Workplace,
) -> None:
    finished = teacher.miles(
        *("launch", "--recipe", "tiny.yaml", "--name", "other-tokens"),
        *("--set", "train.distill.teachers=[{path: runs/teacher}]"),
        *("--set", "data.demonstrations=task:sums-worked"),
    )
    assert finished.code == 3, finished
    assert f"the teacher {teacher.run('teacher')} has another tokenizer" in finished.err
    assert not teacher.run("other-tokens").exists()
