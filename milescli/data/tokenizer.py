"""Loads a model folder's tokenizer: encodes chats to token ids and decodes token ids. It trains no
vocabulary (`scratch_tokenizer` does)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milescli.core.errors import DataError
from milescli.core.files import read_json
from milescli.core.thinking import thinking_tokens
from milescli.core.types import Prompt
from milescli.data.chat_template import (
    AUTO,
    RAW,
    bounded_rendering,
    configured_template,
    ignoring_template_errors,
    no_template,
    template_of_folder,
)
from milescli.data.images import PromptImages, prompt_images
from milescli.data.messages import with_system_message
from milescli.data.prompt_encoder import Message
from milescli.platform.lazy import without_torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_FAMILIES = ("qwen2_5_vl", "qwen3", "qwen3_moe")
"""Families of models made from scratch, for which transformers uses `tokenizer_class`. For some
other families it uses a class of its own."""
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Two names of one class; transformers 5 writes the second."""
MAX_TOKENS_OF_CHARACTER = 4
"""Most bytes of a character in UTF-8."""
GENERATION_CONFIG = "generation_config.json"
_RESIZE = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "m = M.from_pretrained('{folder}'); m.resize_token_embeddings({size}); "
    "m.save_pretrained('{folder}')\""
)
PLACEHOLDER = "\u241fturn\u241f"
"""Replaces a turn to show what the template writes around it. No template trims it."""


MAX_CHARS_OF_TOKEN = 256
"""Upper bound: vocabularies have runs of spaces and dashes of half this length."""


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON can state and neither tokenizers nor tables
    take: halves of one character are joined, others replaced."""
    if _LONE_SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def prefix_longer_than(text: str, most: int) -> str:
    """Return a prefix of the text that has more than `most` tokens, or all of it if it is short."""
    return text[: MAX_CHARS_OF_TOKEN * (most + 1)]


def format_num_tokens(prompt: Prompt, most: int) -> str:
    """Return a prompt's number of tokens for messages; for a truncated prompt, a lower bound."""
    is_cut = prefix_longer_than(prompt.text, most) != prompt.text
    return f"at least {len(prompt.token_ids)}" if is_cut else str(len(prompt.token_ids))


class ChatTokenizer:
    """Encodes chats and decodes tokens as the model of one folder does. Made by `load_tokenizer`;
    threads may share it for decoding."""

    def __init__(
        self,
        inner: PreTrainedTokenizerBase,
        *,
        folder: Path,
        template: str | None,
        tools: Sequence[Any] = (),
    ) -> None:
        """Wrap `inner`. `template`: Jinja; None: prompts are raw text. `tools`: JSON schemas of the
        tools offered in chats that state none."""
        self.inner = inner
        """The tokenizer of transformers."""
        self.folder = folder
        self.template = template
        self.tools = tools
        self.images: PromptImages | None = prompt_images(folder)
        self.prefix_ids: list[int] = _prefix_of(inner)
        """What the tokenizer puts before every text (BOS), as its post-processor says."""
        self.eos_id: int = self._end_of_turn()
        """The token that ends a response."""
        self.num_embeddings: int | None = None
        """Rows of the model's embedding; None: not known."""
        self.vocab_size: int = len(inner)
        """Number of tokens, added ones included; a model's embedding may have more rows."""

    @property
    def pad_id(self) -> int | None:
        """Return a token that occurs in no text and ends none; None if there is none. Classifiers
        of transformers read their score before the first such token after the text."""
        known = (self.inner.pad_token_id, self.inner.unk_token_id, self.inner.bos_token_id)
        return next((token for token in known if token not in (None, self.eos_id)), None)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the special tokens."""
        return frozenset(self.inner.all_special_ids) | {
            number for number, token in self.inner.added_tokens_decoder.items() if token.special
        }

    @cached_property
    def special_texts(self) -> list[str]:
        """Return the tokens that the tokenizer treats as one piece wherever they occur in a text,
        as text."""
        return [str(token) for token in self.inner.added_tokens_decoder.values()]

    @cached_property
    def turn_texts(self) -> list[str]:
        """Return the special tokens as text; one of them ends a turn. `special_texts` also has
        those that some families use within a turn (`</think>`, `</tool_call>`)."""
        return [str(token) for token in self.inner.convert_ids_to_tokens([*self.special_ids])]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Return the chat with the template applied. `opens_answer`: append the opening of the
        assistant's turn. Raises ValueError if there is no template and the chat is more than a
        prompt."""
        tools, messages = tools or self.tools, self._in_template_form(messages)
        if self.template is None:
            if tools:
                raise ValueError("without a chat template, nothing tells the model about its tools")
            return _render_raw(messages)
        with bounded_rendering():
            text = self.inner.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=opens_answer,
            )
        return self._expand_image_opening(str(text))

    def render_marked(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        opens_answer: bool = False,
    ) -> list[tuple[int, int]]:
        """Return the spans [start, end), in characters of `render`, that the template itself marks
        as `generation`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tools, messages = tools or self.tools, self._in_template_form(messages)
        with bounded_rendering():
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=opens_answer,
                **self.inner.special_tokens_map,
            )
        before = [
            len(self._expand_image_opening(texts[0][:place])) for span in spans[0] for place in span
        ]
        return list(zip(before[::2], before[1::2], strict=True))

    def _expand_image_opening(self, text: str) -> str:
        """Return the template's output with each image mark as the model reads it."""
        sees = self.images
        if sees is None or sees.opening_id is None:
            return text
        opening, *rest = self.inner.convert_ids_to_tokens(list(sees.mark_ids))
        return text.replace(opening, f"\n\n{opening}{''.join(rest)}\n\n")

    def _in_template_form(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages in the form that the template supports: developer messages as such or as
        system messages, and images as parts or as text with the tokens that mark an image."""
        if any(one.get("role") == "developer" for one in messages) and not self._supports_developer:
            messages = with_system_message(messages)
        if self.images is None or self._supports_parts:
            return messages
        opening = self.images.opening_id
        marks = list(self.images.mark_ids) if opening is None else [opening]
        mark = "".join(self.inner.convert_ids_to_tokens(marks))
        return [
            {**message, "content": "".join(part.get("text", mark) for part in message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    @cached_property
    def _supports_developer(self) -> bool:
        """Return True if the template writes the text of a developer message: some leave out roles
        that they do not know."""
        if self.template is None:
            return False
        shown = [{"role": "developer", "content": PLACEHOLDER}, {"role": "user", "content": "a"}]
        with ignoring_template_errors(), bounded_rendering():
            return PLACEHOLDER in str(
                self.inner.apply_chat_template(shown, chat_template=self.template, tokenize=False)
            )
        return False

    @cached_property
    def _supports_parts(self) -> bool:
        """Return True if the template writes the image token for a part that is an image."""
        if self.template is None or self.images is None:
            return False
        shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
        # a template may raise anything at a part
        with ignoring_template_errors(), bounded_rendering():
            text = self.inner.apply_chat_template(
                shown, chat_template=self.template, tokenize=False
            )
            written = self.images.opening_id or self.images.token_id
            return str(self.inner.convert_ids_to_tokens(written)) in str(text)
        return False

    def encode_chats(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Sequence[Any]] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """Return [num_chats][num_tokens]: each chat rendered and tokenised, generation prompt
        included. `tools`: of each chat. `most`: a chat with more tokens may be truncated to no
        fewer than `most` + 1, as tokenising a text of 10 MB takes 2.5 GB."""
        if not chats:
            return []
        offered = tools or [()] * len(chats)
        rendered = [
            self.render(chat, tools=tools) for chat, tools in zip(chats, offered, strict=True)
        ]
        if most is None:
            return self._encoded(rendered)
        cut = [prefix_longer_than(text, most) for text in rendered]
        made = self._encoded(cut)
        for place, text in enumerate(rendered):
            if cut[place] != text and len(made[place]) <= most:  # a tokenizer that drops spaces
                made[place] = self._encoded([text])[0]
        return made

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        texts = [encodable(text) for text in texts]
        encoded = self.inner(texts, add_special_tokens=False)["input_ids"]
        return [[*self.missing_bos(ids), *self.require_embedded(ids)] for ids in encoded]

    def require_embedded(self, ids: list[int]) -> list[int]:
        """Return the tokens. Raises DataError if the model has no embedding for one, as when tokens
        were added and the model was not resized."""
        if self.num_embeddings is None or self.vocab_size <= self.num_embeddings:
            return ids
        if (beyond := max(ids, default=0)) >= self.num_embeddings:
            raise DataError(
                f"the model has no embedding for `{self.inner.convert_ids_to_tokens(beyond)}`",
                why=f"it is token {beyond} of the tokenizer in {self.folder}, but the embedding "
                f"has only {self.num_embeddings} rows",
                fix=_RESIZE.format(folder=self.folder, size=self.vocab_size),
            )
        return ids

    def missing_bos(self, ids: Sequence[int]) -> list[int]:
        """Return `prefix_ids` (the beginning-of-sequence token), or nothing if the text's tokens
        already begin with them because the chat template writes them. So the model reads them
        once."""
        length = len(self.prefix_ids)
        return [] if list(ids[:length]) == self.prefix_ids else self.prefix_ids

    def encode_text(self, text: str) -> list[int]:
        """Return [num_tokens] the tokens of a whole text, after `prefix_ids`."""
        return self._encoded([text])[0]

    def encode_continuation(self, text: str) -> list[int]:
        """Return [num_tokens] the tokens of a text that follows other tokens."""
        return list(self.inner(encodable(text), add_special_tokens=False)["input_ids"])

    def special_texts_in(self, messages: Sequence[Message]) -> set[str]:
        """Return the special tokens that the contents of messages contain as text: the model reads
        them as tokens, and a user's text could open a turn."""
        contents = [message.get("content") for message in messages]
        texts = [text for text in contents if isinstance(text, str)]
        return {token for token in self.special_texts if any(token in text for text in texts)}

    @cached_property
    def stop_texts(self) -> list[str]:
        """Return the tokens at which generation stops, as text."""
        known = [one for one in self.stop_ids if one < self.vocab_size]
        return [str(token) for token in self.inner.convert_ids_to_tokens(known) if token]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Return the tokens at which generation stops."""
        return engine_stop_ids(self.folder) | {self.eos_id, int(self.inner.eos_token_id)}

    def _end_of_turn(self) -> int:
        """Return the special token that the template writes after an assistant's turn, from which a
        model learns to stop; in some families it is the header of the next turn. Return the
        end-of-sequence token if the template writes none."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}]
        for later in ([], [turns[0]]):
            after = ""
            if self.template is not None:
                with ignoring_template_errors():  # a template that wants more than these turns
                    shown = self.render([*turns, *later], opens_answer=False)
                    after = shown.rpartition(PLACEHOLDER)[2] if PLACEHOLDER in shown else ""
            if (end := self.turn_end_token(after)) is not None:
                return end
        return int(self.inner.eos_token_id)

    def turn_end_token(self, text: str) -> int | None:
        """Return the token that ends the turn before `text`: the first stop token in the first run
        of special tokens, else the first of that run; None if there is none, or only one that also
        opens the assistant's turns."""
        run = _special_run(text, self.turn_texts)
        ids = [int(self.inner.convert_tokens_to_ids(token)) for token in run]
        stops = {self.inner.eos_token_id} | engine_stop_ids(self.folder)
        if stop := next((token for token in ids if token in stops), None):
            return stop
        opens = not run or run[0] in self._answer_opening or ids[0] == self.inner.bos_token_id
        return None if opens else ids[0]

    @cached_property
    def _answer_opening(self) -> str:
        """Return the text that the template writes between a user's turn and the answer."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}]
        with ignoring_template_errors():  # a template that wants more than these turns
            question = self.render(turns[:1], opens_answer=False)
            text = self.render(turns, opens_answer=False)
            return (
                text[len(question) :].partition(PLACEHOLDER)[0] if text.startswith(question) else ""
            )
        return ""

    def encode_response(self, text: str) -> list[int]:
        """Return [num_tokens] the tokens of a response as the model should write it, with the
        end-of-sequence token last."""
        return [*self.encode_continuation(text), self.eos_id]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return [num_tokens] the text that each token adds, special tokens included. Of several
        tokens that form one character, only the last adds text."""
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
        """Return the text without special tokens."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    @cached_property
    def _thinking_ids(self) -> frozenset[int]:
        """Return the special tokens between which the model thinks."""
        ids = dict(zip(self.turn_texts, self.special_ids, strict=True))
        return frozenset(ids[text] for text in thinking_tokens(ids)) - {self.eos_id}

    def decode_response(self, token_ids: Iterable[int]) -> str:
        """Return the text without special tokens, except those between which the model thinks:
        without them nothing separates its thinking from its answer."""
        if not self._thinking_ids:
            return self.decode(token_ids)
        hidden = self.special_ids - self._thinking_ids
        shown = [one for one in token_ids if one not in hidden]
        return str(self.inner.decode(shown, skip_special_tokens=False))


def load_tokenizer(
    folder: str | Path, *, chat_template: str = AUTO, tools: Sequence[Any] = ()
) -> ChatTokenizer:
    """Load the tokenizer in a Hugging Face folder. Code from the folder is never run.
    `chat_template`: as in `data.chat_template`; `tools`: as in ChatTokenizer. Raises DataError if
    there is none, or if it has no chat template or no end-of-sequence token."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError(
            f"there is no tokenizer folder {path}",
            why="it is a file" if path.exists() else "the folder does not exist",
            fix="--set model.path=FOLDER   # a Hugging Face folder with tokenizer.json and "
            "tokenizer_config.json",
        )
    inner = _read(path)
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is not None and type(backend.model).__name__ == "BPE":
        # transformers does not heed it there, and warns of it on the user's screen
        inner.clean_up_tokenization_spaces = False
    if backend is not None:
        _keep_spaces_in_offsets(backend.post_processor)
    if inner.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {path} has no end-of-sequence token",
            why="`eos_token` is not set in tokenizer_config.json, so no response could ever end",
            fix='add "eos_token": "<|im_end|>" (the token that ends a turn of this model) to '
            f"{path / 'tokenizer_config.json'}",
        )
    template = _template(inner, chat_template, path, tools=tools)
    return ChatTokenizer(inner, folder=path, template=template, tools=tools)


def _keep_spaces_in_offsets(processor: Any) -> None:
    """Let the offsets of tokens include their spaces, which belong to a turn as other text does.
    This changes no token."""
    if type(processor).__name__ == "Sequence":
        for one in processor:
            _keep_spaces_in_offsets(one)
    elif hasattr(processor, "trim_offsets"):
        processor.trim_offsets = False


def _template(
    inner: PreTrainedTokenizerBase, wanted: str, folder: Path, *, tools: Sequence[Any]
) -> str | None:
    """Return the chat template; of several named ones, that for tools if tools are offered. Raises
    DataError."""
    if wanted == RAW:
        return None
    if wanted != AUTO:
        return configured_template(wanted)
    if not inner.chat_template:
        raise no_template(folder)
    try:
        template = inner.get_chat_template(tools=list(tools) or None)
    except ValueError as error:
        raise DataError(
            f"{folder} has several chat templates",
            why=f"it has {', '.join(inner.chat_template)}, and none of them is named default",
            fix="--set data.chat_template=FILE   # copy the right one into its own file",
        ) from error
    return template_of_folder(template, folder)


def _render_raw(messages: Sequence[Message]) -> str:
    """Return a prompt without a template: the system prompt, a blank line, and the text."""
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            "without a chat template, a prompt must be a single text, but this one has the "
            f"turns {', '.join(roles)}"
        )
    return "\n\n".join(str(message["content"]) for message in messages)


def _special_run(text: str, special: Sequence[str]) -> list[str]:
    """Return the first run of adjacent special tokens in the text."""
    found = list[str]()
    starts = [text.index(token) for token in special if token in text]
    at = min(starts, default=len(text))
    while token := max((one for one in special if text.startswith(one, at)), key=len, default=""):
        found.append(token)
        at += len(token)
    return found


def _prefix_of(inner: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the post-processor puts before a text."""
    bare = list(inner("a", add_special_tokens=False)["input_ids"])
    whole = list(inner("a")["input_ids"])
    if not bare or whole == bare:
        return []
    starts = range(len(whole) - len(bare) + 1)
    start = next((at for at in starts if whole[at : at + len(bare)] == bare), 0)
    return whole[:start]


def engine_stop_ids(folder: Path) -> frozenset[int]:
    """Return the tokens at which engines end a response of this model: `eos_token_id` of
    config.json and of generation_config.json, as SGLang reads both."""
    ids = set[int]()
    for name in ("config.json", GENERATION_CONFIG):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # refused where it is read
            read = read_json(folder / name)
            for holder in (read, read.get("text_config") or {}):
                found = holder.get("eos_token_id")
                listed = found if isinstance(found, list) else [found]
                ids |= {one for one in listed if isinstance(one, int)}
    return frozenset(ids)


def _read(path: Path) -> PreTrainedTokenizerBase:
    try:
        with without_torch():
            return _class_for(path).from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
    except BaseException as error:
        # transformers raises many kinds, all about what is in the folder; a panic of the Rust in
        # tokenizers is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        present = ", ".join(sorted(item.name for item in path.iterdir())[:12]) or "nothing"
        reason = next(iter(str(error).splitlines()), "no message")
        raise DataError(
            f"cannot read the tokenizer in {path}",
            why=f"{type(error).__name__}: {reason}; the folder contains {present}",
            fix=f"copy tokenizer.json and tokenizer_config.json of the model into {path}",
        ) from error


def _class_for(path: Path) -> type[PreTrainedTokenizerBase]:
    """Return the class that AutoTokenizer would choose. AutoTokenizer itself takes three seconds:
    it imports the generation code of transformers, and with it torch's compiler. So the plain class
    of tokenizer.json, which models made from scratch have, is recognised here."""
    if _is_plain(path):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_plain(path: Path) -> bool:
    """Return True if the plain class of tokenizer.json is right. False also if a file cannot be
    read: transformers then reports what is wrong."""
    try:
        config = read_json(path / "tokenizer_config.json")
        model = read_json(path / "config.json")
        return (
            config["tokenizer_class"] in PLAIN_CLASSES
            and "auto_map" not in config
            and model["model_type"] in PLAIN_FAMILIES
            and (path / "tokenizer.json").is_file()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
