"""Which samples are shown, and what of them."""

from __future__ import annotations

from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.report.chosen_samples import MAX_CHARACTERS, choose_steps, shown_text
from tests.report.run_folders import make_run, write_samples


def test_first_middle_and_last_steps_show_best_and_worst(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    for step in (1, 5, 9, 20, 40):
        write_samples(run, step, [0.25, 1.0, 0.0, 0.5], "said")
    shown = choose_steps(RunDir(run))
    assert [one.step for one in shown] == [1, 9, 40]
    assert [(sample.word, sample.reward) for sample in shown[0].samples] == [
        ("best", 1.0),
        ("worst", 0.0),
    ]
    assert shown[0].rewards == [0.25, 1.0, 0.0, 0.5]


def test_a_group_of_equal_rewards_shows_one_and_a_torn_file_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_samples(run, 1, [1.0, 1.0], "said")
    (run / "rollouts" / "step_2.jsonl").write_text('{"prompt": "half')
    shown = choose_steps(RunDir(run))
    assert [(one.step, [sample.word for sample in one.samples]) for one in shown] == [
        (1, ["sample"])
    ]


def test_long_texts_lose_their_middle_and_control_characters_are_shown() -> None:
    said = shown_text("a" * 5000 + "z" * 5000)
    assert len(said) < MAX_CHARACTERS + 60 and said[0] == "a" and said[-1] == "z"
    assert "8,000 characters omitted" in said
    assert shown_text("a\x00b\u202ec\td\n") == "a\ufffdb\ufffdc\td\n"
