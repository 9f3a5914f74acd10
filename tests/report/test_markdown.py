"""The Markdown report: short, verdict first, and nothing of a model's is markup."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from milescli.checkpoint.run_dir import open_run
from milescli.report.markdown import MARK, code, fenced, run_markdown, table, text
from milescli.report.subject import read_subject
from tests.insight.planted import line
from tests.report.run_folders import (
    make_planted,
    make_run,
    make_several,
    make_sick,
    row_events,
    write_evaluation,
    write_samples,
)


def markdown_of(folder: Path) -> str:
    """Of a run's directory."""
    return run_markdown(read_subject(open_run(folder)))


def test_the_verdict_comes_first_and_what_a_model_wrote_is_fenced(tmp_path: Path) -> None:
    folder = make_planted(tmp_path / "one")
    write_samples(folder, 80, [0.0, 1.0], "```\n@everybody <img src=x>\n```")
    write_evaluation(folder, 80, 0.7, seed=1)
    said = markdown_of(folder)
    lines = [line for line in said.splitlines() if line]
    assert lines[0] == MARK and lines[1] == "## one"
    headline = read_subject(open_run(folder)).verdict.headline
    assert lines[2] == f"**{text(headline)}**"
    assert "\n````text\n```\n@everybody <img src=x>\n``` (1)\n````\n" in said
    assert "`train.optimizer.lr` | `1e-06` | --set" in said
    assert re.search(r"\| reward \| 0\.\d+ \| `[▁▂▃▄▅▆▇█]+` \|", said)
    assert len(said) < 8000


def test_findings_sets_and_adapters_have_their_lines(tmp_path: Path) -> None:
    sick = markdown_of(make_sick(tmp_path / "sick"))
    assert re.search(
        r"\n- \*\*bad: Entropy .+\.\*\* entropy .+ token \(steps 65 to 80\)\. Try: .+", sick
    )
    assert r"| hard \<sums\> | 10 | 50.0% | 4 |" in sick
    several = markdown_of(make_several(tmp_path / "several", names=("sums", "words")))
    assert re.search(r"\| sums \| 12 of 12 \| `[▁▂▃▄▅▆▇█]+` \| 0\.\d+ \|", several)


def test_nothing_private_is_in_it(tmp_path: Path) -> None:
    folder = make_planted(tmp_path / "one")
    write_samples(folder, 80, [0.0, 1.0], f"hf_{'a' * 20}")
    said = markdown_of(folder)
    for word in ("s3cret", "hf_a", "/data/alice", str(tmp_path)):
        assert word not in said, word


def test_runs_that_have_little_have_a_short_one(tmp_path: Path) -> None:
    empty = markdown_of(make_run(tmp_path / "empty", manifest={}))
    assert "not started" in empty and "\n\nMade by miles" in empty
    rows = markdown_of(make_run(tmp_path / "rows", row_events(line(2.0, 0.5), line(2.0, 0.6))))
    assert "| loss |" in rows and "| reward |" not in rows


def test_text_is_neither_markup_nor_an_entity() -> None:
    assert text("@all, see #12") == "@&#8203;all, see #&#8203;12", "nobody is called"
    assert text("a*b* & <i>&copy;") == r"a\*b\* \& \<i\>\&copy;"


@given(said=st.text(max_size=60))
def test_any_text_stays_one_cell_and_any_block_stays_closed(said: str) -> None:
    for cell in (text(said), code(said)):
        row = table(["a", "b"], [(cell, "end")]).split("\n")
        assert len(row) == 3 and len(re.findall(r"(?<!\\)\|", row[2])) == 3, row
    block = fenced(said)
    ticks = block[: len(block) - len(block.lstrip("`"))]
    assert ticks not in said and block.endswith(f"\n{ticks}")
