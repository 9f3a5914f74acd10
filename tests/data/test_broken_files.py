"""Every broken data file is refused by name, with the line where there is one, in seconds and
bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.core.errors import DataError
from milescli.data.prompt_source import load_source
from milescli.data.tables import check_file
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data
from tests.data.broken_files import CONTENTS, GOOD, SPECIAL

MEMORY_BYTES = 64 * 2**20
"""What reading a line of 100 MB may take, beside the interpreter."""


def _load(path: Path, tokenizer: ChatTokenizer) -> None:
    data = Data(prompts=str(path))
    load_source(data, "prompts", tokenizer=tokenizer, seed=0, base_dir=path.parent)


def test_there_are_many_of_them() -> None:
    assert len(CONTENTS) + len(SPECIAL) >= 60


@pytest.mark.parametrize("name", CONTENTS)
def test_a_broken_file_is_refused_by_name_and_line(
    tmp_path: Path, tokenizer: ChatTokenizer, name: str
) -> None:
    file, content, says = CONTENTS[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){says}") as error:
        _load(path, tokenizer)
    assert str(path) in str(error.value)
    assert error.value.fixes


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_plain_file_is_refused_without_waiting_for_it(
    tmp_path: Path, tokenizer: ChatTokenizer, name: str
) -> None:
    make, says = SPECIAL[name]
    path = tmp_path / "a.jsonl"
    make(path)
    with pytest.raises(DataError, match=says) as error:
        _load(path, tokenizer)
    assert str(path) in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD)
    path.chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        _load(path, tokenizer)


def test_the_reason_that_the_system_gives_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("milescli.data.tables.open_regular", refuse)
    with pytest.raises(DataError, match=r"cannot open .*a\.jsonl .*Permission denied") as error:
        check_file(path, field="prompts")
    assert error.value.fixes == [f"ls -l {path}"]


def test_a_line_without_end_is_never_in_memory_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    SPECIAL["a hole of 100 MB"][0](path)
    probe = (
        "import sys\n"
        "from pathlib import Path\n"
        "from milescli.data.tables import Table\n"
        "from tests.memory import peak_bytes\n"
        "table = Table(Path(sys.argv[1]))\n"
        "before = peak_bytes()\n"
        "((line, reason),) = table.records()\n"
        "print(line, reason, peak_bytes() - before, sep='|')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, str(path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    line, reason, grown = done.stdout.split("|")
    assert (line, reason) == ("1", "longer than 16 MiB"), done.stderr
    assert int(grown) < MEMORY_BYTES
