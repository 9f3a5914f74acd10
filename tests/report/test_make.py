"""A report is made, or it is said why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import ExitCode, MachineError
from milescli.report import make
from tests.report.run_folders import make_planted


def test_a_run_whose_events_are_somebody_elses_is_refused_with_what_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_planted(tmp_path / "theirs")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "events.jsonl")

    monkeypatch.setattr(make, "read_subject", denied)  # root may read everything
    with pytest.raises(MachineError, match="may not be read") as refused:
        make.report_run(folder, html=False)
    assert refused.value.exit_code is ExitCode.NOT_READY
    assert refused.value.fixes[0].startswith(f"chmod -R a+rX {folder}")
