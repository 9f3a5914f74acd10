"""bench/gpu/unpack.sh with tiny parts: nothing is unpacked that is not whole."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "bench/gpu/unpack.sh"


def make_part(parts: Path, number: int, text: str) -> Path:
    """`partN.tar.xz` with one module and one program, and its line in SHA256."""
    stage = parts / f"stage{number}"
    (stage / "bin").mkdir(parents=True)
    (stage / f"module{number}.py").write_text(text)
    (stage / f"bin/program{number}").write_text("#!/bin/sh\necho from the kit\n")
    (stage / f"bin/program{number}").chmod(0o755)
    archive = parts / f"part{number}.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(stage, arcname=".")
    list_sums(parts)
    return archive


def list_sums(parts: Path) -> None:
    """SHA256, of the archives as they are."""
    (parts / "SHA256").write_text(
        "".join(
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in sorted(parts.glob("part*.tar.xz"))
        )
    )


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Both."""
    folder = tmp_path / "parts"
    for number in (1, 2):
        make_part(folder, number, f"number = {number}\n")
    return folder


def unpack(parts: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PARTS": str(parts),
        "SITE": str(parts.parent / "site"),
        **variables,
    }
    return subprocess.run(
        [str(SCRIPT), *names], env=environment, capture_output=True, text=True, timeout=200
    )


def content(site: Path) -> dict[str, str]:
    """All files, by their paths."""
    return {
        str(path.relative_to(site)): path.read_text() for path in site.rglob("*") if path.is_file()
    }


def test_sourced_it_sets_paths_and_nothing_else_of_the_shell(parts: Path) -> None:
    script = f"""
    source {SCRIPT} all || exit
    false  # the shell of the caller has no `set -e` now
    echo "$PYTHONPATH"; program2; python3 -c 'import module1; print(module1.number)'
    shopt -qo nounset && echo nounset
    true
    """
    environment = {**os.environ, "PARTS": str(parts), "SITE": str(parts.parent / "site")}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=200
    )
    site = parts.parent / "site"
    folders = [str(site / f"part{number}") for number in (1, 2)]
    expected = [":".join([*folders, str(ROOT)]), "from the kit", "1"]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def test_a_part_that_is_there_is_left_alone_also_without_its_archive(parts: Path) -> None:
    assert unpack(parts, "1").returncode == 0
    module = parts.parent / "site/part1/module1.py"
    module.write_text("number = 'mine'\n")
    assert unpack(parts, "1").returncode == 0
    (parts / "part1.tar.xz").unlink()
    assert unpack(parts, "1").returncode == 0
    assert module.read_text() == "number = 'mine'\n"


def test_a_wrong_checksum_is_refused_and_what_is_there_stays(parts: Path) -> None:
    unpack(parts, "1", "2")
    before = content(parts.parent / "site")
    archive = make_part(parts.parent / "other", 1, "number = 'other'\n")
    archive.rename(parts / "part1.tar.xz")
    text = (parts / "SHA256").read_text()
    (parts / "SHA256").write_text(text.replace(text[:8], "00000000"))
    done = unpack(parts, "1")
    assert done.returncode == 4 and "is damaged, or of another packing" in done.stderr
    assert "why:" in done.stderr and "fix:" in done.stderr and not done.stdout
    assert content(parts.parent / "site") == before


@pytest.mark.parametrize("xz", ["with xz", "without xz"])
def test_a_broken_archive_leaves_nothing(parts: Path, tmp_path: Path, xz: str) -> None:
    archive = parts / "part2.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-40])
    list_sums(parts)
    path = os.environ["PATH"] if xz == "with xz" else without_xz(tmp_path / "bin")
    done = unpack(parts, "2", PATH=path)
    assert done.returncode == 4 and "cannot be extracted" in done.stderr
    assert not list((parts.parent / "site").iterdir())


def test_python_extracts_where_there_is_no_xz(parts: Path, tmp_path: Path) -> None:
    done = unpack(parts, "2", PATH=without_xz(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr
    assert os.access(parts.parent / "site/part2/bin/program2", os.X_OK)


def without_xz(folder: Path) -> str:
    """A PATH with every program but xz."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name != "xz" and not link.exists() and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)
