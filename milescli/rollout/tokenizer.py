"""A model folder's tokenizer: chat in, token ids out, and back. It trains no vocabulary
(`scratch_tokenizer` does)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_FAMILIES = ("qwen3", "qwen3_moe")
"""Of models made from scratch. transformers heeds `tokenizer_class` for them; for some other
families it knows better."""
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Two names of one class; transformers 5 writes the second."""
MAX_TOKENS_OF_CHARACTER = 4
"""A character has at most so many bytes of UTF-8."""
Message = dict[str, str]
"""`role` (system, user, assistant, tool) and `content`, both text."""


class ChatTokenizer:
    """The tokenizer of one model folder. Made by `load_tokenizer`; safe to share between threads
    for decoding."""

    def __init__(self, inner: PreTrainedTokenizerBase, *, folder: Path) -> None:
        self.inner = inner
        """As transformers has it."""
        self.folder = folder
        self.eos_id: int = int(inner.eos_token_id)
        """Ends a response."""
        self.vocab_size: int = len(inner)
        """Tokens, added ones included; a model's embedding may be larger."""

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template applied, with the opening of the assistant's turn at the end."""
        return str(
            self.inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """[num_chats][num_tokens] each chat rendered and tokenised, generation prompt included."""
        if not chats:
            return []
        rendered = [self.render(chat) for chat in chats]
        return [list(ids) for ids in self.inner(rendered, add_special_tokens=False)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """[num_tokens] of one chat."""
        return self.encode_chats([messages])[0]

    def encode_response(self, text: str) -> list[int]:
        """[num_tokens] of a response as the model should give it: the text, then the
        end-of-sequence token."""
        return [*self.inner(text, add_special_tokens=False)["input_ids"], self.eos_id]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """[num_tokens] the text that each token adds, special tokens included; empty where a
        character takes several, until its last."""
        pieces, start = [], 0
        for end in range(1, len(token_ids) + 1):
            text = str(self.inner.decode(list(token_ids[start:end]), skip_special_tokens=False))
            if text.endswith("\ufffd") and end - start < MAX_TOKENS_OF_CHARACTER:
                pieces.append("")
                continue
            pieces.append(text)
            start = end
        return pieces

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text without special tokens."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(folder: str | Path) -> ChatTokenizer:
    """The tokenizer in a Hugging Face folder. Code from the folder is never run.

    Raises DataError where there is none, or it has no chat template or no end-of-sequence token.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(
            f"there is no tokenizer folder {path}",
            why="it is a file" if path.exists() else "the folder does not exist",
            fix="--set model.path=FOLDER   # a Hugging Face folder with tokenizer.json and "
            "tokenizer_config.json",
        )
    inner = _read(path)
    if inner.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {path} has no end-of-sequence token",
            why="`eos_token` is not set in tokenizer_config.json, so no response could ever end",
            fix='add "eos_token": "<|im_end|>" (the token that ends a turn of this model) to '
            f"{path / 'tokenizer_config.json'}",
        )
    if not inner.chat_template:
        raise DataError(
            f"the tokenizer in {path} has no chat template",
            why="neither chat_template.jinja nor `chat_template` in tokenizer_config.json is "
            "there; base models often lack one",
            fix=[
                "use the instruct or chat version of the model",
                f"put the template of its family into {path / 'chat_template.jinja'}",
            ],
        )
    return ChatTokenizer(inner, folder=path)


def _read(path: Path) -> PreTrainedTokenizerBase:
    try:
        return _class_for(path).from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers raises many kinds, all about what is in the folder
        present = ", ".join(sorted(item.name for item in path.iterdir())[:12]) or "nothing"
        reason = next(iter(str(error).splitlines()), "no message")
        raise DataError(
            f"cannot read the tokenizer in {path}",
            why=f"{type(error).__name__}: {reason}; the folder holds {present}",
            fix=f"copy tokenizer.json and tokenizer_config.json of the model into {path}",
        ) from error


def _class_for(path: Path) -> type[PreTrainedTokenizerBase]:
    """What AutoTokenizer would choose. To ask it costs three seconds: it imports the parts of
    transformers that generate, and with them torch's compiler. So where the answer is the plain
    class of tokenizer.json, as for models made from scratch, it is not asked."""
    if _is_plain(path):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_plain(path: Path) -> bool:
    """False also for whatever cannot be read: transformers says what is wrong with it."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return (
            config["tokenizer_class"] in PLAIN_CLASSES
            and "auto_map" not in config
            and model["model_type"] in PLAIN_FAMILIES
            and (path / "tokenizer.json").is_file()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
