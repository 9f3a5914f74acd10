"""Tests of reading a tokenizer folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from milescli.core.errors import DataError
from milescli.data.tokenizer import PLAIN_CLASSES, PLAIN_FAMILIES, ChatTokenizer, load_tokenizer


def _without(tokenizer: ChatTokenizer, folder: Path, key: str) -> Path:
    shutil.copytree(tokenizer.folder, folder)
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text())
    del values[key]
    config.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("key", "lacks"), [("chat_template", "chat template"), ("eos_token", "end-of-sequence")]
)
def test_a_tokenizer_that_lacks_something_says_what_and_the_file_to_mend(
    tokenizer: ChatTokenizer, tmp_path: Path, key: str, lacks: str
) -> None:
    folder = _without(tokenizer, tmp_path / "t", key)
    with pytest.raises(DataError, match=lacks) as error:
        load_tokenizer(folder)
    assert any(str(folder) in fix for fix in error.value.fixes)


def test_a_folder_without_a_tokenizer_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes\.txt"):
        load_tokenizer(tmp_path)


def test_transformers_does_not_warn_of_a_cleaning_that_it_leaves_out(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    folder = shutil.copytree(tokenizer.folder, tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["clean_up_tokenization_spaces"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(folder)
    assert not loaded.inner.clean_up_tokenization_spaces
    assert loaded.decode(loaded.encode_response("1 . 2 , 3")) == "1 . 2 , 3"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")


def test_a_folder_of_a_known_model_type_keeps_its_own_tokenizer(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer.folder, folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )
    assert load_tokenizer(folder).encode_response("a 12  b\n345") == tokenizer.encode_response(
        "a 12  b\n345"
    )


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("name", PLAIN_CLASSES)
def test_what_is_not_asked_of_transformers_is_what_it_would_say(
    tokenizer: ChatTokenizer, tmp_path: Path, family: str, name: str
) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(tokenizer.folder, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
    asked, ours = AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder)
    text = "<|im_start|>user\na 12  b\n345<|im_end|>\u00e9"
    assert type(asked) is type(ours.inner)
    assert asked(text)["input_ids"] == ours.inner(text)["input_ids"]
    assert asked.special_tokens_map == ours.inner.special_tokens_map
    assert asked.chat_template == ours.inner.chat_template


def test_special_tokens_are_not_decoded(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_response("#### 5")) == "#### 5"


def test_of_a_chat_that_is_too_long_its_beginning_is_enough(tokenizer: ChatTokenizer) -> None:
    chats = [[{"role": "user", "content": "1 + 2 = " * number}] for number in (10_000, 1)]
    whole = tokenizer.encode_chats(chats)
    long, short = tokenizer.encode_chats(chats, most=40)
    assert short == whole[1]
    assert 40 < len(long) < len(whole[0]) / 4
    assert long[:40] == whole[0][:40]
