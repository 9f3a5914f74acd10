"""Conversions both ways: what comes out is what went in, what the manifest says, and how much
memory it takes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milescli.checkpoint import integrity
from milescli.checkpoint.files import StreamFile
from milescli.checkpoint.journal import part_folder_of, read_journal
from milescli.core.errors import CheckpointError, Stopped
from tests.conversion.making import (
    ROOT,
    change,
    interrupted_after,
    make,
    nothing_but,
    to_hf,
    to_megatron,
)


def test_a_model_comes_back_byte_for_byte_with_what_lay_beside_it(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "qwen3-moe", dtype=torch.bfloat16)
    done = to_megatron(source, tmp_path / "megatron")
    assert done.proof.num_source_tensors == len(load_file(source / "model.safetensors"))
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    nothing_but(tmp_path, "hf", "megatron", "back")


def test_every_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", dtype=torch.bfloat16)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
            tensors[name] = tensors[name].float() + 1e-6
        tensors["model.layers.1.input_layernorm.weight"] = tensors[
            "model.layers.1.input_layernorm.weight"
        ].half()

    change(source, widen)
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


def test_the_manifest_says_what_was_shown_and_lists_every_file(tmp_path: Path) -> None:
    from milescli.checkpoint.files import crc32_of_file

    to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    manifest = json.loads((tmp_path / "megatron" / "manifest.json").read_text())
    files = {
        str(path.relative_to(tmp_path / "megatron"))
        for path in (tmp_path / "megatron").rglob("*")
        if path.is_file()
    }
    assert files == {*manifest["files"], "manifest.json"}
    for name, recorded in manifest["files"].items():
        assert f"{crc32_of_file(tmp_path / 'megatron' / name):08x}" == recorded["crc32"]
    assert manifest["family"] == "qwen3" and manifest["proof"]["num_source_tensors"] == 36


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    target.mkdir()
    to_megatron(source, target)  # an empty folder is nothing
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        to_megatron(source, target)
    with pytest.raises(CheckpointError, match="already exists"):
        to_hf(target, source)
    assert (target / "manifest.json").read_bytes() == before
    nothing_but(tmp_path, "hf", "megatron")


def test_a_disk_that_gives_other_bytes_back_is_found_and_the_tensor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "hf")
    plain = StreamFile.close

    def spoil(self: StreamFile) -> None:
        plain(self)
        with self.path.open("r+b") as file:
            file.seek(4000)
            byte = file.read(1)
            file.seek(4000)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(StreamFile, "close", spoil)
    with pytest.raises(CheckpointError, match="returned different bytes") as caught:
        to_megatron(source, tmp_path / "megatron")
    assert "embedding.word_embeddings.weight" in caught.value.why
    nothing_but(tmp_path, "hf")


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A model of 500 MiB in small tensors: what its process takes beyond its imports stays far
    below."""
    source = make(
        tmp_path / "hf",
        num_hidden_layers=48,
        hidden_size=512,
        intermediate_size=1800,
        dtype=torch.float32,
    )
    assert (source / "model.safetensors").stat().st_size > 500 * 2**20
    script = (
        "import sys; from pathlib import Path; import tests.conversion.making as t;"
        "from tests.memory import peak_bytes;"
        "before = peak_bytes();"
        "t.to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), file_bytes=2**26); "
        "t.to_hf(Path(sys.argv[2]), Path(sys.argv[3]));"
        "print(peak_bytes() - before)"
    )
    command = [
        sys.executable,
        "-c",
        script,
        str(source),
        str(tmp_path / "megatron"),
        str(tmp_path / "back"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, timeout=600, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 400 * 2**20, f"{int(done.stdout) / 2**20:.0f} MiB"
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


_KILLED = """
import os, sys
from milescli.checkpoint import journal
plain = journal.PartFolder.record_finished
def finish(self, file):
    plain(self, file)
    if len(self.finished) == 3:
        os.kill(os.getpid(), int(sys.argv[3]))
        import time; time.sleep(60)
journal.PartFolder.record_finished = finish
from tests.conversion.making import to_megatron
from pathlib import Path
to_megatron(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_conversion_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    command = [sys.executable, "-c", _KILLED, str(source), str(target), str(int(signal.SIGKILL))]
    done = subprocess.run(command, cwd=ROOT, timeout=400, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    nothing_but(tmp_path, "hf", ".megatron.part")
    part = part_folder_of(target)
    kept = {path.name: path.stat().st_mtime_ns for path in (part / "release").glob("*.distcp")}
    lines = (part / "journal.jsonl").read_text().splitlines()
    finished = {json.loads(line)["name"] for line in lines[1:]}
    assert len(finished) == 3
    (part / "journal.jsonl").write_text(
        "\n".join(lines) + '\n{"name": "release/__0_9'
    )  # torn by the kill
    resumed = to_megatron(source, target)
    assert resumed.resumed_bytes == sum((target / name).stat().st_size for name in finished)
    assert all((target / name).stat().st_mtime_ns == kept[Path(name).name] for name in finished)
    to_megatron(source, tmp_path / "at-once")
    for path in (tmp_path / "at-once" / "release").iterdir():
        assert path.read_bytes() == (target / "release" / path.name).read_bytes(), path.name
    nothing_but(tmp_path, "hf", "megatron", "at-once")


def test_nothing_finished_is_thrown_away_for_another_dtype(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    with interrupted_after(3), pytest.raises(Stopped):
        to_megatron(source, target)
    with pytest.raises(CheckpointError, match="with other options") as caught:
        to_megatron(source, target, dtype="bf16")
    assert caught.value.exit_code == 6 and "3 files are finished" in caught.value.why
    assert to_megatron(source, target).resumed_bytes > 0
    nothing_but(tmp_path, "hf", "megatron")


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    with interrupted_after(3), pytest.raises(Stopped) as caught:
        to_megatron(source, target)
    assert caught.value.exit_code == 75
    assert "miles convert hf-to-megatron" in caught.value.fixes[0]
    assert not target.exists()
    assert to_megatron(source, target).resumed_bytes > 0


_FULL = """
import resource, sys
from pathlib import Path
from tests.conversion.making import to_megatron
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
from milescli.core.errors import CheckpointError
try:
    to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), file_bytes=28_000)
except CheckpointError as error:
    print(error.what, "|", error.why, "|", error.fixes[0])
"""


def test_a_full_disk_half_way_keeps_what_is_finished(tmp_path: Path) -> None:
    # one tensor (131 x 300 floats) is larger than the largest file that this process may write;
    # those before it are not
    source, target = make(tmp_path / "hf", intermediate_size=300), tmp_path / "megatron"
    with interrupted_after(1), pytest.raises(Stopped):
        to_megatron(source, target, file_bytes=28_000)
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(source), str(target)],
        cwd=ROOT,
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert "the disk is full" in done.stdout and "stored in" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "goes on" in done.stdout and not target.exists()
    assert to_megatron(source, target, file_bytes=28_000).resumed_bytes > 0


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "hf")
    monkeypatch.setattr("milescli.checkpoint.integrity.free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match="not have enough") as caught:
        to_megatron(source, tmp_path / "megatron")
    assert "are missing" in caught.value.why
    nothing_but(tmp_path, "hf")


def _drop_unfinished(part: Path) -> None:
    """What was written and not yet read back."""
    finished = read_journal(part).finished
    for path in part.rglob("*.distcp"):
        if str(path.relative_to(part)) not in finished:
            path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_that_runs_full_says_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, disk = make(tmp_path / "hf"), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("the file system can be mounted here")
    try:
        with interrupted_after(1), pytest.raises(Stopped):
            to_megatron(source, disk / "megatron")
        _drop_unfinished(
            part_folder_of(disk / "megatron")
        )  # how far the writer was ahead is chance
        subprocess.run(["mount", "-o", "remount,size=256k", str(disk)], check=True)
        # there seemed to be room; then somebody else took it
        plain, before = integrity.free_bytes, iter([2**30])
        monkeypatch.setattr(
            integrity, "free_bytes", lambda folder: next(before, None) or plain(folder)
        )
        with pytest.raises(CheckpointError, match="disk is full") as caught:
            to_megatron(source, disk / "megatron")
        assert caught.value.__cause__ is not None and caught.value.__cause__.errno == errno.ENOSPC
        assert "free another" in caught.value.why
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        assert to_megatron(source, disk / "megatron").resumed_bytes > 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_two_at_once_do_not_write_one_target(tmp_path: Path) -> None:
    from milescli.checkpoint.journal import PartFolder

    source = make(tmp_path / "hf")
    with (
        PartFolder(tmp_path / "megatron", fingerprint="other"),
        pytest.raises(CheckpointError, match="another process"),
    ):
        to_megatron(source, tmp_path / "megatron")
