"""A report is made, or it is said why not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, MachineError, MilesError
from milescli.report import make, markdown
from milescli.report.make import HTML_MARK, is_html, require_writable, write
from milescli.report.markdown import run_markdown
from tests.report.run_folders import make_planted


def test_a_run_whose_events_are_somebody_elses_is_refused_with_what_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_planted(tmp_path / "theirs")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "events.jsonl")

    monkeypatch.setattr(make, "read_subject", denied)  # root may read everything
    with pytest.raises(MachineError, match="cannot be read") as refused:
        make.report_run(folder, form=run_markdown)
    assert refused.value.exit_code is ExitCode.NOT_READY
    assert refused.value.fixes[0].startswith(f"chmod -R a+rX {folder}")


@pytest.mark.parametrize("mark", [HTML_MARK, markdown.MARK])
def test_a_report_is_written_over_and_something_else_only_by_force(
    tmp_path: Path, mark: str
) -> None:
    file = tmp_path / "report.html"
    write(file, f"{mark} one", force=False)
    write(file, f"{mark} two", force=False)
    assert file.read_text() == f"{mark} two"
    file.write_text("a novel")
    with pytest.raises(MilesError) as refused:
        write(file, mark, force=False)
    assert file.read_text() == "a novel" and "--force" in refused.value.fixes[0]
    write(file, mark, force=True)
    assert file.read_text() == mark and list(tmp_path.iterdir()) == [file]


def test_folders_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MilesError, match="is not a file"):
        require_writable(tmp_path, force=True)
    with pytest.raises(MilesError, match="the folder") as refused:
        require_writable(tmp_path / "no" / "x.html", force=True)
    assert refused.value.exit_code is ExitCode.NOT_READY
    assert "mkdir -p" in refused.value.fixes[0]
    with pytest.raises(MachineError, match="cannot be written"):
        require_writable(tmp_path / f"{'x' * 300}.html", force=True)


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "report.md"
    os.mkfifo(pipe)
    with pytest.raises(MilesError, match="is not a file"):
        require_writable(pipe, force=True)


@pytest.mark.parametrize(
    ("ending", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "full"), MachineError)],
)
def test_what_ends_in_the_middle_leaves_the_old_report_and_nothing_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: BaseException,
    raised: type[BaseException],
) -> None:
    file = tmp_path / "report.md"
    file.write_text(f"{markdown.MARK} old")

    def end(*_: object) -> None:
        raise ending

    monkeypatch.setattr(os, "replace", end)
    with pytest.raises(raised):
        write(file, f"{markdown.MARK} new", force=False)
    assert file.read_text() == f"{markdown.MARK} old" and list(tmp_path.iterdir()) == [file]


def test_a_report_that_its_owner_alone_can_read_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    file.write_text(markdown.MARK)
    file.chmod(0o600)
    write(file, f"{markdown.MARK} new", force=False)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text(markdown.MARK)
    link.symlink_to(target)
    write(link, f"{markdown.MARK} new", force=False)
    assert link.is_symlink() and target.read_text() == f"{markdown.MARK} new"


def test_the_end_of_the_name_says_which_it_is() -> None:
    assert is_html(Path("a.HTML")) and is_html(Path("a.htm")) and not is_html(Path("a.md"))
