"""Tests of reading a tokenizer folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from milescli.core.errors import DataError
from milescli.data.chat_masks import mark_text, tokenize_marked
from milescli.data.tokenizer import (
    PLAIN_CLASSES,
    PLAIN_FAMILIES,
    ChatTokenizer,
    engine_stop_ids,
    load_tokenizer,
)
from milescli.rollout.rewards.extraction import after_thinking
from tests.data.chat_templates import GPT_OSS, tokenizer_of


def _without(tokenizer: ChatTokenizer, folder: Path, key: str) -> Path:
    shutil.copytree(tokenizer.folder, folder)
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text())
    del values[key]
    config.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ 'a' # 'b' }}", "unexpected char '#'"), ("{% for x in y %}", "endfor"), (5, "no text")],
)
def test_a_template_that_is_no_jinja_is_refused_with_the_folder(
    tokenizer: ChatTokenizer, tmp_path: Path, template: object, why: str
) -> None:
    folder = _edited(tokenizer, tmp_path / "t", chat_template=template)
    with pytest.raises(DataError, match="template") as refused:
        load_tokenizer(folder)
    assert why in refused.value.why
    assert load_tokenizer(folder, chat_template="chatml").template


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


@pytest.mark.parametrize(
    ("special", "response", "text", "answer"),
    [
        (
            [*GPT_OSS.special, "<|pad|>"],
            "<|channel|>analysis<|message|>3+4 is 7<|end|><|start|>assistant"
            "<|channel|>final<|message|>7é<|pad|><|return|>",
            "<|channel|>analysis<|message|>3+4 is 7<|end|><|start|>assistant"
            "<|channel|>final<|message|>7é",
            "7é",
        ),
        (
            GPT_OSS.special,
            "<|channel|>analysis<|message|>perhaps 7, but",
            "<|channel|>analysis<|message|>perhaps 7, but",
            "",
        ),
        (["[THINK]", "[/THINK]"], "[THINK]a[/THINK]7<|return|>", "[THINK]a[/THINK]7", "7"),
        (
            ["<|channel>", "<channel|>", "<turn|>"],
            "<|channel>thought\na<channel|>7<turn|>",
            "<|channel>thought\na<channel|>7",
            "7",
        ),
        (["<|end|>", "<|start|>"], "7<|end|><|start|>", "7", "7"),
        (["<|im_end|>"], "<think>a</think>7<|im_end|>", "<think>a</think>7", "7"),
    ],
)
def test_a_response_keeps_the_special_tokens_that_separate_thinking_from_answer(
    special: list[str], response: str, text: str, answer: str
) -> None:
    thinker = tokenizer_of(GPT_OSS.template, special=[*special, "<|return|>"], eos="<|return|>")
    token_ids = thinker.inner(response, add_special_tokens=False)["input_ids"]
    assert thinker.decode_response(token_ids) == text
    assert after_thinking(text) == answer


def test_halves_of_characters_are_replaced_and_pairs_joined(tokenizer: ChatTokenizer) -> None:
    for encode in (tokenizer.encode_text, tokenizer.encode_continuation):
        assert encode("caf\udce9 \ud83d\ude00") == encode("caf\ufffd \U0001f600")


def test_special_tokens_are_not_decoded(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_response("#### 5")) == "#### 5"


_DROPS = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (_DROPS, "[system]Be brief.[user]hi"),
        (
            _DROPS.replace("{% endif %}", "{% else %}{{ raise_exception('no') }}{% endif %}"),
            "[system]Be brief.[user]hi",
        ),
        (_DROPS.replace("('system',", "('developer',"), "[developer]Be brief.[user]hi"),
        (None, "Be brief.\n\nhi"),
    ],
)
def test_a_template_without_developer_messages_shows_them_as_those_of_the_system(
    tokenizer: ChatTokenizer, template: str | None, shown: str
) -> None:
    made = ChatTokenizer(tokenizer.inner, folder=tokenizer.folder, template=template)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert made.render(messages) == shown
    if template == _DROPS:  # some take a system message in the first place alone
        both = [{"role": "system", "content": "You are X."}, *messages]
        assert made.render(both) == "[system]You are X.\n\nBe brief.[user]hi"


def test_of_a_chat_that_is_too_long_its_beginning_is_enough(tokenizer: ChatTokenizer) -> None:
    chats = [[{"role": "user", "content": "1 + 2 = " * number}] for number in (10_000, 1)]
    whole = tokenizer.encode_chats(chats)
    long, short = tokenizer.encode_chats(chats, most=40)
    assert short == whole[1]
    assert 40 < len(long) < len(whole[0]) / 4
    assert long[:40] == whole[0][:40]


def _edited(tokenizer: ChatTokenizer, folder: Path, **changes: object) -> Path:
    """A copy of its folder with other settings."""
    shutil.copytree(tokenizer.folder, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def _with_bos(tokenizer: ChatTokenizer, folder: Path, template: str) -> ChatTokenizer:
    """One whose post-processor puts a token before every text, as Llama's does."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    _edited(tokenizer, folder, chat_template=template, bos_token="<|endoftext|>")
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder, chat_template="none" if template == "none" else "auto")


@pytest.mark.parametrize("is_sequence", [False, True])
def test_spaces_are_learned_where_the_tokenizer_trims_its_offsets(
    tokenizer: ChatTokenizer, tmp_path: Path, is_sequence: bool
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import ByteLevel, Sequence

    file = _edited(tokenizer, tmp_path / "t") / "tokenizer.json"
    inner, trims = Tokenizer.from_file(str(file)), ByteLevel(trim_offsets=True)
    inner.post_processor = Sequence([trims]) if is_sequence else trims
    inner.save(str(file))
    loaded = load_tokenizer(file.parent)
    (line,) = tokenize_marked(loaded, [mark_text("a  \n\n b \t c  ")])
    assert not line.loss_mask[0] and all(line.loss_mask[1:])
    assert loaded.decode(line.token_ids) == "a  \n\n b \t c  "


WRITES = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}"


@pytest.mark.parametrize("template", ["none", WRITES, "{{ bos_token }}" + WRITES])
def test_what_the_tokenizer_puts_before_a_text_is_there_once(
    tokenizer: ChatTokenizer, tmp_path: Path, template: str
) -> None:
    loaded = _with_bos(tokenizer, tmp_path / "t", template)
    assert loaded.prefix_ids == [0] and tokenizer.prefix_ids == []
    messages = [{"role": "user", "content": "1 + 2"}]
    (ids,) = loaded.encode_chats([messages])
    assert ids[0] == 0 and ids.count(0) == 1
    assert loaded.encode_text(loaded.render(messages)) == ids
    assert 0 not in loaded.encode_continuation("1 + 2")
    (line,) = tokenize_marked(loaded, [mark_text(loaded.render(messages))])
    # the template may write it: then it is a token of the text, and still not learned
    assert list(line.token_ids)[: len(ids)] == ids
    assert line.loss_mask[0] == 0 and all(line.loss_mask[1:])


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (WRITES, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content + '<|endoftext|>' }}{% endfor %}", "<|endoftext|>"),
        ("{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}", "<|im_end|>"),
        (
            "{% for m in messages %}{{ '<|endoftext|>' if m.role == 'user' else '<|im_start|>' }}"
            "{{ m.content }}{% endfor %}",
            "<|endoftext|>",  # the header of the next turn
        ),
        ("{{ raise_exception('more turns') }}", "<|im_end|>"),
    ],
)
def test_a_response_ends_by_what_the_template_writes_behind_a_turn(
    tokenizer: ChatTokenizer, tmp_path: Path, template: str, end: str
) -> None:
    loaded = load_tokenizer(_edited(tokenizer, tmp_path / "t", chat_template=template))
    assert loaded.inner.convert_ids_to_tokens(loaded.eos_id) == end
    assert loaded.encode_response("7")[-1] == loaded.eos_id


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": [0, 2]}, {"eos_token_id": 5}, {0, 2, 5}),
        ({"text_config": {"eos_token_id": 7}}, None, {7}),
    ],
)
def test_engines_stop_where_both_configs_say(
    tmp_path: Path, config: dict, generation: dict | None, ids: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert engine_stop_ids(tmp_path) == ids


def test_a_token_without_an_embedding_is_refused_by_its_name(tokenizer: ChatTokenizer) -> None:
    loaded = load_tokenizer(tokenizer.folder)
    loaded.num_embeddings = loaded.vocab_size - 1
    last = loaded.inner.convert_ids_to_tokens(loaded.vocab_size - 1)
    with pytest.raises(DataError, match="the model has no embedding for") as refused:
        loaded.require_embedded([loaded.vocab_size - 1])
    assert last in refused.value.what and f"{loaded.vocab_size - 1} rows" in refused.value.why
    assert loaded.require_embedded([1, 2]) == [1, 2]
