"""Reports take the place of reports, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, MilesError
from milescli.report import frame, markdown
from milescli.report.write import is_html, require_writable, write


@pytest.mark.parametrize("mark", [frame.MARK, markdown.MARK])
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
    with pytest.raises(MilesError, match="is a folder"):
        require_writable(tmp_path, force=True)
    with pytest.raises(MilesError, match="there is no folder") as refused:
        require_writable(tmp_path / "no" / "x.html", force=True)
    assert refused.value.exit_code is ExitCode.NOT_READY
    assert "mkdir -p" in refused.value.fixes[0]


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text(markdown.MARK)
    link.symlink_to(target)
    write(link, f"{markdown.MARK} new", force=False)
    assert link.is_symlink() and target.read_text() == f"{markdown.MARK} new"


def test_the_end_of_the_name_says_which_it_is() -> None:
    assert is_html(Path("a.HTML")) and is_html(Path("a.htm")) and not is_html(Path("a.md"))
