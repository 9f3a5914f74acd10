"""Images of Gemma 3: what its chat template writes for one, and which processors are refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image as Pillow

from milescli.core.errors import CheckpointError
from milescli.data.image_processor import load_processor
from milescli.data.tokenizer import load_tokenizer
from tests.backends.megatron.vision_cases import SQUARE_PROCESSOR
from tests.families.cases import ALL

GEMMA = ALL["gemma3-vl"].config
SOFT_ID = GEMMA["image_token_index"]
BOI, SOFT, EOI, EOS = "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<eos>"
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + BOI + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokenizer knows the marks of an image."""
    import transformers
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, EOS: 1, SOFT: 120, BOI: 122, EOI: 123}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token=EOS,
        unk_token="<unk>",
        additional_special_tokens=[SOFT, BOI, EOI],
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SQUARE_PROCESSOR))
    return tmp_path


def _png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", (width, height), "red").save(buffer, format="PNG")
    return buffer.getvalue()


def test_the_mark_of_a_template_becomes_the_tokens_of_an_image_on_lines_of_its_own(folder):
    tokenizer = load_tokenizer(folder)
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    text = tokenizer.render([{"role": "user", "content": parts}], opens_answer=False)
    assert text == f"\n\n{BOI}{SOFT}{EOI}\n\nwhat?{EOS}"
    assert tokenizer.images is not None
    image = tokenizer.images.processor.read(_png(30, 70))
    ids, (span,), _ = tokenizer.images.expanded(tokenizer.encode_text(text), [image])
    assert ids[span.start - 1 : span.start + 5] == [122, *[SOFT_ID] * 4, 123]


@pytest.mark.parametrize(
    "fields", [{"do_pan_and_scan": True}, {"size": {"height": 16, "width": 20}}]
)
def test_a_processor_that_shows_other_pictures_is_refused(folder, fields):
    settings = SQUARE_PROCESSOR | fields
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError) as raised:
        load_processor(folder)
    assert next(iter(fields)) in raised.value.what


def test_newer_folders_have_the_settings_in_the_file_of_the_whole_processor(folder):
    (folder / "preprocessor_config.json").unlink()
    whole = {"image_processor": SQUARE_PROCESSOR}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert load_processor(folder).read(_png(9, 5)).num_tokens == 4
