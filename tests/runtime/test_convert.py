"""Conversions both ways: what comes out, what is refused and how, what an interruption leaves, what
stock Megatron-Core makes of it."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milescli.checkpoint.files import StreamFile
from milescli.checkpoint.journal import part_of
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError, MismatchError, Stopped
from milescli.models import parse_facts, table
from milescli.runtime import convert_verify
from milescli.runtime.convert import IntakeOptions, convert_to_megatron, preview_to_megatron
from milescli.runtime.convert_back import OutletOptions, convert_to_hf, preview_to_hf
from milescli.runtime.convert_verify import Verify
from tests.families.cases import ALL

ROOT = Path(__file__).resolve().parents[2]
ROWS = [[5, 9, 100, 3, 77, 42, 8], [1, 2], [17, 4, 4, 90, 12, 60, 61, 62]]
SMALL = 20_000
"""Bytes of a file of the checkpoint: even a tiny model has several."""


def quiet() -> Output:
    return Output(Mode.QUIET, stdout=io.StringIO(), stderr=io.StringIO())


def make(
    folder: Path, case: str = "qwen3", *, dtype: torch.dtype = torch.float32, **changes: object
) -> Path:
    """A tiny model from the table, without transformers."""
    config = {**ALL[case].config, **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    generator = torch.Generator().manual_seed(0)
    shapes = table(parse_facts(config)).hf_shapes()
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def to_megatron(source: Path, target: Path, **wish: object):
    options = IntakeOptions(**{"verify": Verify.TENSORS, "file_bytes": SMALL, **wish})
    return convert_to_megatron(str(source), target, options=options, output=quiet())


def to_hf(source: Path, target: Path, **wish: object):
    return convert_to_hf(
        source, target, options=OutletOptions(**{"verify": Verify.TENSORS, **wish}), output=quiet()
    )


def nothing_but(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


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


def test_shards_are_as_large_as_asked_and_are_listed(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=60_000)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 70_000 for path in files)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    expected, found = load_file(source / "model.safetensors"), {}
    for path in files:
        tensors = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in tensors)
        found |= tensors
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def test_another_dtype_is_written_and_said_in_the_config(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    done = to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bf16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert any("rounded from F32 to BF16" in note for note in done.notes)
    expected, found = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in expected)


def test_an_output_layer_that_repeats_the_tied_embedding_is_used_once_and_comes_back(
    tmp_path: Path,
) -> None:
    source = make(tmp_path / "hf", "qwen3-tied")
    change(
        source,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    done = to_megatron(source, tmp_path / "megatron")
    assert any("lm_head.weight" in note and "once" in note for note in done.notes)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


def test_a_folder_of_megatrons_own_needs_the_model_and_takes_it(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    shutil.copytree(tmp_path / "megatron" / "release", tmp_path / "plain" / "iter_0000100")
    (tmp_path / "plain" / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match="which model") as caught:
        to_hf(tmp_path / "plain", tmp_path / "back")
    assert "--model" in caught.value.fixes[0]
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(source / "config.json", config)
    to_hf(tmp_path / "plain", tmp_path / "back", model=str(config))
    expected, found = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )
    with pytest.raises(CheckpointError, match="another model"):
        to_hf(
            tmp_path / "plain" / "iter_0000100",
            tmp_path / "wrong",
            model=str(make(tmp_path / "other", num_hidden_layers=2)),
        )
    with pytest.raises(CheckpointError, match="no checkpoint `7`"):
        to_hf(tmp_path / "plain", tmp_path / "wrong", model=str(config), step=7)


def _missing(source: Path) -> None:
    change(source, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def _extra(source: Path) -> None:
    change(source, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(3)}))


def _misshapen(source: Path) -> None:
    change(source, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))


def _nan(source: Path) -> None:
    change(
        source,
        lambda tensors: tensors["model.layers.2.self_attn.o_proj.weight"].__setitem__(
            (3, 5), float("nan")
        ),
    )


def _infinity(source: Path) -> None:
    change(
        source,
        lambda tensors: tensors["model.embed_tokens.weight"].__setitem__((130, 0), float("-inf")),
    )


def _truncated(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _absent_shard(source: Path) -> None:
    index = {
        "metadata": {},
        "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"},
    }
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickle(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def _untied(source: Path) -> None:
    change(source, lambda tensors: tensors.pop("lm_head.weight"))


def _config(**fields: object) -> Callable[[Path], None]:
    def edit(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **fields}))

    return edit


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_missing, ["lacks 1 tensor", "model.layers.1.mlp.up_proj.weight"]),
        (_extra, ["does not explain", "model.layers.0.extra.weight"]),
        (_misshapen, ["model.norm.weight", "[7]", "[48]"]),
        (_nan, ["model.layers.2.self_attn.o_proj.weight", "NaN", "[3, 5]"]),
        (_infinity, ["model.embed_tokens.weight", "infinite", "[130, 0]"]),
        (_truncated, ["model.safetensors", "truncated"]),
        (_absent_shard, ["model-00002-of-00002.safetensors", "not there"]),
        (_pickle, ["pytorch_model.bin", "pickle"]),
        (_untied, ["tie_word_embeddings: false", "lm_head.weight"]),
        (_config(tie_word_embeddings=True), ["tie_word_embeddings: true", "lm_head.weight"]),
        (_config(model_type="qwen33"), ["qwen33", "nearest is `qwen3`"]),
        (_config(rope_theta=500_000.0), ["contradicts itself", "rope_theta"]),
        (_config(hidden_size="many"), ["hidden_size"]),
        (lambda source: (source / "config.json").unlink(), ["not a model folder"]),
        (lambda source: (source / "config.json").write_text("{"), ["cannot read"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bad_sources_are_refused_by_name_and_nothing_is_left(
    tmp_path: Path, spoil: Callable, words: list[str]
) -> None:
    source = make(tmp_path / "hf")
    spoil(source)
    with pytest.raises(CheckpointError) as caught:
        to_megatron(source, tmp_path / "megatron")
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert caught.value.exit_code == 6 and caught.value.why and caught.value.fixes
    nothing_but(tmp_path, "hf")


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    target.mkdir()
    to_megatron(source, target)  # an empty folder is nothing
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="there already"):
        to_megatron(source, target)
    with pytest.raises(CheckpointError, match="there already"):
        to_hf(target, source)
    assert (target / "manifest.json").read_bytes() == before
    nothing_but(tmp_path, "hf", "megatron")


@pytest.mark.parametrize("name", ["nowhere/at/all", "./nowhere", "notes.txt"])
def test_sources_that_are_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="not a model folder"):
        convert_to_megatron(name, tmp_path / "out", options=IntakeOptions(), output=quiet())
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        to_hf(Path(name), tmp_path / "out")


def test_a_torn_checkpoint_and_one_with_nan_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    torn = tmp_path / "torn"
    shutil.copytree(tmp_path / "megatron", torn)
    data = torn / "release" / "__0_1.distcp"
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="corrupt"):
        to_hf(torn, tmp_path / "back")
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tmp_path / "megatron", spoilt)
    data = spoilt / "release" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    first = load_file(source / "model.safetensors")["model.embed_tokens.weight"].numpy().tobytes()
    at = bytes(content).index(first[:64])
    content[at : at + 4] = b"\x00\x00\xc0\x7f"
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        to_hf(spoilt, tmp_path / "back")
    nothing_but(tmp_path, "hf", "megatron", "torn", "spoilt")


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
    with pytest.raises(CheckpointError, match="gave back other bytes") as caught:
        to_megatron(source, tmp_path / "megatron")
    assert "embedding.word_embeddings.weight" in caught.value.why
    nothing_but(tmp_path, "hf")


_KILLED = """
import os, sys
from milescli.checkpoint import journal
plain = journal.PartFolder.finish_file
def finish(self, file):
    plain(self, file)
    if len(self.finished) == 3:
        os.kill(os.getpid(), int(sys.argv[3]))
        import time; time.sleep(60)
journal.PartFolder.finish_file = finish
from tests.runtime.test_convert import to_megatron
from pathlib import Path
to_megatron(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_conversion_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    command = [sys.executable, "-c", _KILLED, str(source), str(target), str(int(signal.SIGKILL))]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    nothing_but(tmp_path, "hf", ".megatron.part")
    part = part_of(target)
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


def test_another_source_or_other_options_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    _interrupt(source, target, monkeypatch)
    said = io.StringIO()
    output = Output(Mode.HUMAN, stdout=io.StringIO(), stderr=said)
    options = IntakeOptions(verify=Verify.TENSORS, file_bytes=SMALL, dtype="bf16")
    done = convert_to_megatron(str(source), target, options=options, output=output)
    assert done.resumed_bytes == 0 and "starting anew" in said.getvalue()
    assert done.proof.dtypes.keys() == {"BF16"}
    nothing_but(tmp_path, "hf", "megatron")


def _interrupt(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Stopped:
    """Ctrl-C while the third file is made."""
    from milescli.checkpoint.pipeline import Pipeline

    plain, made = Pipeline._make, []

    def stop(self: Pipeline, file) -> None:
        if len(made) == 3:
            deadline = time.monotonic() + 30
            while len(self._part.finished) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            raise KeyboardInterrupt
        made.append(file)
        plain(self, file)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_make", stop)
        with pytest.raises(Stopped) as caught:
            to_megatron(source, target)
    return caught.value


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make(tmp_path / "hf"), tmp_path / "megatron"
    error = _interrupt(source, target, monkeypatch)
    assert error.exit_code == 75 and "miles convert hf-to-megatron" in error.fixes[0]
    assert not target.exists()
    assert to_megatron(source, target).resumed_bytes > 0


_FULL = """
import resource, sys
from pathlib import Path
from tests.runtime.test_convert import to_megatron
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
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(source), str(target)],
        cwd=ROOT,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert "the disk is full" in done.stdout and "kept in" in done.stdout, done.stdout + done.stderr
    assert "goes on" in done.stdout and not target.exists()
    assert to_megatron(source, target, file_bytes=28_000).resumed_bytes > 0


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "hf")
    monkeypatch.setattr("milescli.checkpoint.files.free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match="not room enough") as caught:
        to_megatron(source, tmp_path / "megatron")
    assert "are missing" in caught.value.why
    nothing_but(tmp_path, "hf")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_that_runs_full_says_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, disk = make(tmp_path / "hf"), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        monkeypatch.setattr("milescli.runtime.convert._require_room", lambda *args, **kwargs: None)
        with pytest.raises(CheckpointError, match="disk is full") as caught:
            to_megatron(source, disk / "megatron")
        assert caught.value.__cause__ is not None and caught.value.__cause__.errno == errno.ENOSPC
        assert "more must be had" in caught.value.why
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
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


def test_a_preview_shows_mapping_room_and_time_and_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "qwen3-moe")
    options = IntakeOptions()
    preview = preview_to_megatron(
        str(source), tmp_path / "megatron", options=options, output=quiet()
    )
    lines = {(left, right): count for left, right, _, count in preview.mapping}
    experts = (
        "model.layers.*.mlp.experts.*.gate_proj.weight",
        "decoder.layers.*.mlp.experts.experts.linear_fc1.weight",
    )
    assert lines[experts] == 2 * 6  # layers x experts
    assert sum(lines.values()) == len(load_file(source / "model.safetensors"))
    nothing_but(tmp_path, "hf")
    to_megatron(source, tmp_path / "megatron", file_bytes=options.file_bytes)
    written = sum(
        path.stat().st_size for path in (tmp_path / "megatron" / "release").glob("__0_0.distcp")
    )
    assert preview.size_bytes == written and preview.seconds > 0 and preview.disk_bytes_per_s > 0
    back = preview_to_hf(
        tmp_path / "megatron", tmp_path / "back", options=OutletOptions(), output=quiet()
    )
    assert back.size_bytes == (source / "model.safetensors").stat().st_size
    nothing_but(tmp_path, "hf", "megatron")


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
    for name, told in manifest["files"].items():
        assert f"{crc32_of_file(tmp_path / 'megatron' / name):08x}" == told["crc32"]
    assert manifest["family"] == "qwen3" and manifest["proof"]["num_source_tensors"] == 36


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
        "import resource, sys; from pathlib import Path; import tests.runtime.test_convert as t;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "t.to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), file_bytes=2**26); "
        "t.to_hf(Path(sys.argv[2]), Path(sys.argv[3]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
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
        command, cwd=ROOT, timeout=200, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 400 * 2**20, f"{int(done.stdout) / 1024:.0f} MiB"
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()


def test_logits_that_differ_leave_no_target_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(module: str, job: dict, scratch: Path) -> Path:
        out = scratch.with_suffix(".safetensors")
        wrong = 0.01 if "megatron" in module else 0.0
        save_file({"0": torch.ones(3, 5) + wrong}, out)
        return out

    monkeypatch.setattr(convert_verify, "_run", answer)
    with pytest.raises(MismatchError, match="computes something else"):
        to_megatron(make(tmp_path / "hf"), tmp_path / "megatron", verify=Verify.LOGITS)
    nothing_but(tmp_path, "hf")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Name -> (logits that stock Megatron-Core computed, model folder with those of transformers);
    all jobs of two ranks in one world."""
    root = tmp_path_factory.mktemp("stock")
    names = ("qwen3", "qwen3-tied", "qwen3-moe")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    subprocess.run(
        [sys.executable, "-m", "tests.families.making", str(root / "hf"), *names],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=200,
        capture_output=True,
    )
    for name in names:
        to_megatron(root / "hf" / name, root / name)
    jobs = [
        {
            "name": name,
            "model": str(root / "hf" / model),
            "checkpoint": str(root / model / "release"),
            "rows": ROWS,
            "out": str(root / f"{name}.safetensors"),
            **rest,
        }
        for name, (model, rest) in STOCK.items()
    ]
    (root / "request.json").write_text(json.dumps({"store": str(root / "store"), "jobs": jobs}))
    command = [
        sys.executable,
        str(ROOT / "tests" / "runtime" / "stock.py"),
        str(root / "request.json"),
    ]
    logs = [(root / f"rank{rank}.log").open("wb") for rank in range(2)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], env=environment, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    codes = []
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    assert codes == [0, 0], (root / "rank0.log").read_text()[-3000:] + (
        root / "rank1.log"
    ).read_text()[-3000:]
    return {
        name: (root / f"{name}.safetensors", root / "hf" / model)
        for name, (model, _) in STOCK.items()
    }


STOCK: dict[str, tuple[str, dict]] = {
    "tp 2, vocabulary padded to 256": ("qwen3", {"layout": {"tp": 2}}),
    "tp 2, tied": ("qwen3-tied", {"layout": {"tp": 2}}),
    "pp 2, uneven": ("qwen3", {"layout": {"pp": 2}, "stages": "Et|ttL"}),
    "pp 2, layers under names of their own": (
        "qwen3",
        {"layout": {"pp": 2}, "stages": "Ett|tL", "metadata": {"non_homogeneous_layers": True}},
    ),
    "pp 2, vpp 2": ("qwen3", {"layout": {"pp": 2, "vpp": 2}, "stages": "E|t|t|tL"}),
    "ep 2, one layer dense": ("qwen3-moe", {"layout": {"ep": 2}}),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_megatron_loads_the_checkpoint_and_computes_what_transformers_does(
    stock: dict[str, tuple[Path, Path]], name: str
) -> None:
    path, model = stock[name]
    found, expected = load_file(path), load_file(model / "logits.witness")
    for key, row in found.items():
        theirs = expected[key][: row.shape[0]]
        assert float((row - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


def test_a_run_gives_its_newest_checkpoint_or_the_step_that_is_asked_for(tmp_path: Path) -> None:
    from milescli.checkpoint.store import CheckpointStore
    from milescli.recipe.load import load
    from milescli.recipe.resolved import resolved_yaml
    from tests.checkpoint.test_store import _manifest

    source, run = make(tmp_path / "hf"), tmp_path / "run"
    run.mkdir()
    sets = [f"model.path={source}", "model.scratch=null"]
    loaded = load("quickstart", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    (run / "recipe.yaml").write_text(resolved_yaml(loaded))
    store = CheckpointStore(run / "checkpoints")
    for step, factor in ((3, 1.0), (5, 2.0)):
        other = tmp_path / f"weights{step}"
        shutil.copytree(source, other)
        change(
            other,
            lambda tensors, factor=factor: [tensor.mul_(factor) for tensor in tensors.values()],
        )
        to_megatron(other, tmp_path / f"megatron{step}")
        shutil.copytree(
            tmp_path / f"megatron{step}" / "release", store.begin(step), dirs_exist_ok=True
        )
        store.complete(step, _manifest(step))
    for name, wish, folder in (
        ("run", {}, 5),
        ("run", {"step": 3}, 3),
        ("run/checkpoints/step_3", {}, 3),
    ):
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        to_hf(tmp_path / name, out, **wish)
        assert (out / "model.safetensors").read_bytes() == (
            tmp_path / f"weights{folder}" / "model.safetensors"
        ).read_bytes()
        assert (out / "tokenizer.json").exists()


def test_a_recipe_may_begin_from_a_converted_model(tmp_path: Path) -> None:
    from milescli.checkpoint.run_dir import RunDir
    from milescli.models import load_facts
    from milescli.recipe.schema import Model
    from milescli.runtime.inputs import facts_of_recipe, model_dir_of

    source = make(tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron")
    model, run = Model(path=str(tmp_path / "megatron")), RunDir(tmp_path / "run")
    assert facts_of_recipe(model) == load_facts(source)
    run.path.mkdir()
    folder = model_dir_of(model, run)
    assert run.path in folder.parents and folder == model_dir_of(model, run)
    assert (folder / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert (folder / "tokenizer.json").exists()


def test_a_quantised_source_becomes_bfloat16_and_its_config_says_so_no_longer(
    tmp_path: Path,
) -> None:
    from milescli.checkpoint.formats import fp8_block
    from milescli.checkpoint.source import open_source

    source = make(tmp_path / "hf", dtype=torch.bfloat16)
    codec = fp8_block.codec()

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "proj.weight" in name]:
            parts = codec.quantise(tensors.pop(name).float(), None)
            tensors |= {
                name: parts["values"],
                name.replace(".weight", ".weight_scale_inv"): parts["scale"],
            }

    change(source, quantise)
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    _config(quantization_config=method, dtype="bfloat16")(source)
    with open_source(source) as opened:
        plain = {name: opened.read(name) for name in opened.names()}
    done = to_megatron(source, tmp_path / "megatron")
    assert any("dequantised to bfloat16" in note for note in done.notes)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(
        found[name].dtype is torch.bfloat16 and torch.equal(found[name], plain[name])
        for name in plain
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_mtp_layers_that_a_checkpoint_lacks_come_from_the_model_and_are_told_of(
    tmp_path: Path,
) -> None:
    source = make(tmp_path / "hf", "glm4-moe-mtp")
    trained = make(tmp_path / "trained", "glm4-moe-mtp", num_nextn_predict_layers=0)
    change(trained, lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
    to_megatron(trained, tmp_path / "megatron")
    done = to_hf(tmp_path / "megatron" / "release", tmp_path / "back", model=str(source))
    assert any("taken from the model" in note for note in done.notes)
    expected = load_file(source / "model.safetensors")
    expected |= load_file(trained / "model.safetensors")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    done = to_hf(tmp_path / "megatron" / "release", tmp_path / "without", model=str(bare))
    assert any("written without" in note for note in done.notes)
    assert (
        load_file(tmp_path / "without" / "model.safetensors").keys()
        == load_file(trained / "model.safetensors").keys()
    )


def test_mtp_layers_that_only_the_config_names_are_told_of(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", "glm4-moe-mtp", num_nextn_predict_layers=0)
    _config(num_nextn_predict_layers=1)(source)
    done = to_megatron(source, tmp_path / "megatron")
    assert any("names 1 MTP layer" in note for note in done.notes)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert (source / "model.safetensors").read_bytes() == (
        tmp_path / "back" / "model.safetensors"
    ).read_bytes()
