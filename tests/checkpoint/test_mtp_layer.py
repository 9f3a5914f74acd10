"""A folder without the MTP layer that is to be trained is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from milescli.checkpoint.mtp_layer import require_mtp_layer
from milescli.core.errors import CheckpointError
from tests.backends.megatron.tiny_models import make_model

LAYER = "model.layers.3."


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        (LAYER, "not one tensor of such a layer is there"),
        (LAYER + "eh_proj", r"`model\.layers\.3\.eh_proj\.weight` is not there"),
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
