"""What `miles convert` prints after Ctrl-C or on a full disk is the user's own command: pasted, it
goes on with what is finished."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from milescli.checkpoint.journal import part_folder_of
from tests.commands.conftest import Miles, Said
from tests.conversion.making import interrupted_after, make, same_bytes, to_megatron


def _fixes(said: Said) -> list[str]:
    """Of the error that a command ended with under --json."""
    return json.loads(said.err.splitlines()[-1])["fix"]


def _pasted(fix: str) -> list[str]:
    """Words that the shell would give to `miles`."""
    words = shlex.split(fix, comments=True)
    assert words[0] == "miles", fix
    return words[1:]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """In a folder whose name must be quoted."""
    return make(tmp_path / "my models" / "tiny")


@pytest.fixture
def megatron(source: Path, tmp_path: Path) -> Path:
    """The same model, converted."""
    to_megatron(source, tmp_path / "megatron")
    return tmp_path / "megatron"


def test_to_megatron_goes_on_with_dtype_and_revision(miles: Miles, source: Path) -> None:
    options = ["--revision", "v 1", "--dtype", "bf16", "--verify", "tensors", "--json"]
    with interrupted_after(1):
        said = miles("convert", "hf-to-megatron", str(source), "out $1", *options)
    assert said.code == 75
    words = _pasted(_fixes(said)[0])
    assert words == ["convert", "hf-to-megatron", str(source), "out $1", *options]
    done = miles(*words)
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["resumed_bytes"] > 0
    assert Path("out $1").is_dir() and not part_folder_of(Path("out $1")).exists()


def test_to_hf_goes_on_with_model_step_dtype_and_shards(
    miles: Miles, source: Path, megatron: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(megatron / "release", plain / "iter_0000100")
    (plain / "latest_checkpointed_iteration.txt").write_text("200")
    options = ["--model", str(source), "--step", "100", "--dtype", "fp16"]
    options += ["--max-shard-size", "20kB", "--verify", "none", "--json"]
    with interrupted_after(2):
        said = miles("convert", "megatron-to-hf", str(plain), "out", *options)
    words = _pasted(_fixes(said)[0])
    assert words == ["convert", "megatron-to-hf", str(plain), "out", *options]
    done = miles(*words)
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["resumed_bytes"] > 0
    assert len(list(Path("out").glob("*.safetensors"))) > 2


def test_a_step_that_was_the_newest_is_named(
    miles: Miles, source: Path, megatron: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "training"
    for step in (100, 200):
        shutil.copytree(megatron / "release", folder / f"iter_{step:07d}")
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("100")
    options = ["--model", str(source), "--verify", "none", "--json"]
    with interrupted_after(1):
        said = miles("convert", "megatron-to-hf", str(folder), "out", *options)
    tracker.write_text("200")  # the training went on
    words = _pasted(_fixes(said)[0])
    assert words == ["convert", "megatron-to-hf", str(folder), "out", *options, "--step", "100"]
    done = miles(*words)
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["resumed_bytes"] > 0


def test_what_another_command_finished_is_kept_and_both_ways_out_are_named(
    miles: Miles, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = ["convert", "hf-to-megatron", str(source), "out", "--dtype", "bf16", "--json"]
    begun += ["--verify", "tensors"]
    with interrupted_after(1):
        miles(*begun)
    part = part_folder_of(Path("out").absolute())
    kept = {path: path.stat().st_mtime_ns for path in part.rglob("*")}
    other = miles("convert", "hf-to-megatron", str(source), "out", "--json")
    assert other.code == 6
    assert {path: path.stat().st_mtime_ns for path in part.rglob("*")} == kept
    resume, remove = _fixes(other)
    assert _pasted(resume) == begun and remove.startswith(f"rm -r {part}")
    (tmp_path / "elsewhere").mkdir()
    target = Path("out").absolute()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other = miles("convert", "hf-to-megatron", str(source), str(target), "--json")
    assert _fixes(other)[0].startswith(f"cd {target.parent} && miles convert ")
    monkeypatch.chdir(target.parent)
    done = miles(*begun)
    assert done.code == 0 and json.loads(done.out.splitlines()[-1])["resumed_bytes"] > 0


def test_a_source_that_has_changed_since_is_told_from_another_command(
    miles: Miles, source: Path
) -> None:
    command = ["convert", "hf-to-megatron", str(source), "out", "--verify", "tensors", "--json"]
    with interrupted_after(1):
        miles(*command)
    config = source / "config.json"
    config.write_text(config.read_text() + "\n")
    said = miles(*command)
    assert said.code == 6 and "changed since" in json.loads(said.err.splitlines()[-1])["error"]
    (remove,) = _fixes(said)
    assert remove.startswith(f"rm -r {part_folder_of(Path('out').absolute())}")


def test_a_dry_run_says_that_an_earlier_attempt_is_of_something_else(
    miles: Miles, source: Path
) -> None:
    command = ["convert", "hf-to-megatron", str(source), "out", "--dtype", "bf16"]
    with interrupted_after(1):
        miles(*command, "--verify", "tensors")
    same = miles(*command, "--dry-run", "--json")
    assert json.loads(same.out.splitlines()[-1])["finished_bytes"] > 0
    other = miles("convert", "hf-to-megatron", str(source), "out", "--dry-run")
    assert other.code == 0 and "--dtype bf16" in other.err, other.err


def test_the_disk_that_is_full_is_told_with_the_same_command(
    miles: Miles, source: Path, megatron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--dtype", "bf16", "--max-shard-size", "20kB", "--verify", "tensors", "--json"]
    command = ["convert", "megatron-to-hf", str(megatron), "out", *options]
    with interrupted_after(1):
        miles(*command)
    with monkeypatch.context() as patch:
        patch.setattr("milescli.checkpoint.integrity.free_bytes", lambda folder: 1000)
        said = miles(*command)
    assert said.code == 6 and "space" in json.loads(said.err.splitlines()[-1])["error"]
    assert _pasted(_fixes(said)[0]) == command
    assert miles(*command).code == 0
    assert not same_bytes(source, Path("out"), "config.json"), "dtype is bfloat16 now"
