"""Weight files of a model's folder: another base model is refused, and so is a folder without the
MTP layer that is to be trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from milescli.checkpoint.matching import require_mtp_layer
from milescli.checkpoint.weight_files import digest_of, require_base
from milescli.core.errors import CheckpointError
from tests.backends.megatron.tiny_models import make_model

LAYER = "model.layers.3."


def _model(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("changed", [0, 999, 70_000, 150_000, 199_999])
def test_other_weights_have_another_mark(tmp_path: Path, changed: int) -> None:
    content = bytearray(range(256)) * 800
    one = _model(tmp_path / "one", bytes(content))
    copy = _model(tmp_path / "copy", bytes(content))
    content[changed] ^= 1
    other = _model(tmp_path / "other", bytes(content))
    assert digest_of(one) == digest_of(copy) != digest_of(other)
    require_base(digest_of(one), copy, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="another base model"):
        require_base(digest_of(one), other, checkpoint=tmp_path)


def test_a_model_of_other_files_has_another_mark(tmp_path: Path) -> None:
    one, other = _model(tmp_path / "one", b"a"), _model(tmp_path / "other", b"a")
    (other / "more.safetensors").write_bytes(b"")
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        (LAYER, "such a layer, but all of its tensors are missing"),
        (LAYER + "eh_proj", r"`model\.layers\.3\.eh_proj\.weight` is missing"),
    ],
)
def test_a_folder_that_lacks_its_layer_is_refused(tmp_path: Path, left_out: str, why: str) -> None:
    folder = make_model(tmp_path, "mtp")
    require_mtp_layer(folder)
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if not name.startswith(left_out)}
    save_file(kept, file)
    with pytest.raises(CheckpointError, match=why):
        require_mtp_layer(folder)


def test_copies_of_embedding_and_output_layer_may_be_absent(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mtp")
    file = folder / "model.safetensors"
    copies = (LAYER + "embed_tokens.weight", LAYER + "shared_head.head.weight")
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if name not in copies}, file)
    require_mtp_layer(folder)
