"""Random chats by many chat templates: what is learned of a turn is what an engine would have
generated from its prompt, or the row is refused for what is lost. The templates are our own of each
kind, those that installed packages ship, and those in the folder MILES_CHAT_TEMPLATES."""

from __future__ import annotations

import importlib.util
import os
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from milescli.data.chat_masks import MarkedText, mark_chat, tokenize_marked, truncated
from milescli.data.tokenizer import ChatTokenizer
from tests.data.chat_templates import KINDS, tokenizer_of

TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "description": "text"}},
                "required": ["a"],
            },
        },
    }
]
SPECIAL = re.compile(
    r"<\|[\w/:.-]+\|?>|<[\w/]+\|>|<\uff5c[^\uff5c]+\uff5c>|<[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,}\]|<\|\"\|>"
    r"|</?s>|<sop>|\[gMASK\]"
)
ADDED = re.compile(r"</?(?:think|tool_call|tool_response)>")
ENDS = {
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
    "llama3": ("<|eot_id|>",),
    "idefics3": ("<end_of_utterance>",),
    "smolvlm": ("<end_of_utterance>",),
    "muse": ("<|eot|>",),
}
"""Part of a file's name -> where the family's engines stop, its end-of-sequence token first."""
CONSONANTS = "bcdfghklmnprstvz"


def found() -> Iterator[Path]:
    """The templates that are on this machine."""
    for package in ("trl", "sglang"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            yield from sorted(folder.glob("*chat_template*/*.jinja"))
    if named := os.environ.get("MILES_CHAT_TEMPLATES"):
        yield from sorted(Path(named).glob("*.jinja"))


FOUND = list(found())


def tokenizer_of_file(file: Path, folder: Path, *, template: str | None = None) -> ChatTokenizer:
    """A tokenizer of bytes with the special tokens that a template writes."""
    text = file.read_text(encoding="utf-8") if template is None else template
    added = set(ADDED.findall(text))
    special = set(SPECIAL.findall(text)) | {"<bos>"}
    name = file.name.lower()
    ends = next((ends for part, ends in ENDS.items() if part in name), None)
    if ends is None:
        ends = ("<|im_end|>",) if "<|im_end|>" in special else ("</s>",)
    made = tokenizer_of(text, special=sorted(special | set(ends)), eos=ends[0], added=sorted(added))
    made.inner.bos_token = "<bos>"
    stops = made.inner.convert_tokens_to_ids(list(ends))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {stops}}}')
    return ChatTokenizer(made.inner, folder=folder, template=text)


class Words:
    """Makes words that occur once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._made: set[str] = set()

    def __call__(self, edges: bool = False) -> str:
        """Two words, with spaces around them sometimes."""
        made = []
        while len(made) < 2:
            word = "q" + "".join(self.random.choices(CONSONANTS, k=7))
            if word not in self._made:
                made.append(word)
                self._made.add(word)
        space = self.random.choice(["", "", " ", "\n"]) if edges else ""
        return f"{space}{made[0]} {made[1]}{space}"


def words_of(value: object) -> set[str]:
    """The words in a text, or in a turn."""
    return set(re.findall(r"q[b-z]{7}", repr(value)))


def said(words: Words, *, calls: bool, reasons: bool) -> dict[str, Any]:
    """A turn of the assistant."""
    turn: dict[str, Any] = {"role": "assistant", "content": words(edges=True)}
    if calls:
        call = {"name": "add", "arguments": {"a": words()}}
        turn["tool_calls"] = [{"type": "function", "id": "call00000", "function": call}]
        turn["content"] = words() if words.random.random() < 0.3 else ""
    if reasons and words.random.random() < 0.6:
        turn |= dict.fromkeys(("reasoning_content", "thinking"), words())
    elif reasons and words.random.random() < 0.4:
        turn["content"] = f"<think>\n{words()}\n</think>\n\n{words()}"
    return turn


def chat_of(seed: int) -> list[dict[str, Any]]:
    """A random chat of up to three rounds."""
    words = Words(seed)
    with_tools, reasons = seed % 2 == 1, seed % 3 == 2
    turns = [{"role": "system", "content": words()}] if seed % 5 == 4 else []
    for _ in range(words.random.randint(1, 3)):
        turns.append({"role": "user", "content": words(edges=True)})
        for _ in range(words.random.randint(0, 2) if with_tools else 0):
            turns.append(said(words, calls=True, reasons=reasons))
            result = {"role": "tool", "name": "add", "tool_call_id": "call00000"}
            turns.append({**result, "content": words()})
        turns.append(said(words, calls=False, reasons=reasons))
    return turns


def check(tokenizer: ChatTokenizer, turns: Sequence[dict[str, Any]]) -> str:
    """Compare the masks of a chat with what engines would read and write. Returns `learned`, or
    `refused` if the template takes no such chat or loses a part of it."""
    tools = TOOLS if any("tool_calls" in turn for turn in turns) else None
    try:
        texts = mark_chat(tokenizer, turns, tools=tools)
    except Exception as error:
        check_refusal(tokenizer, turns, tools, error)
        return "refused"
    open_turns = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    for text in texts:
        learned: dict[int, list[tuple[int, int]]] = {}
        for span in text.spans:
            (place,) = {
                at for at in open_turns if words_of(turns[at]) & words_of(text.text[slice(*span)])
            }
            learned.setdefault(place, []).append(span)
        for place, spans in learned.items():
            open_turns.remove(place)
            check_turn(tokenizer, turns, place, text, spans, tools)
        check_tokens(tokenizer, turns, text, min(learned), tools)
    assert not open_turns, "turns that are not learned"
    return "learned"


def check_turn(
    tokenizer: ChatTokenizer,
    turns: Sequence[dict[str, Any]],
    place: int,
    text: MarkedText,
    spans: Sequence[tuple[int, int]],
    tools: Any,
) -> None:
    """Compare the parts that are learned of one turn."""
    own = words_of(turns[place])
    shown = [text.text[slice(*span)] for span in spans]
    assert words_of(shown) == own, "all of the turn and nothing else"
    for (_, end), (start, _) in pairwise(spans):
        between = words_of(text.text[end:start])
        assert between and between <= words_of([t for t in turns if t["role"] == "tool"])
    prompt = tokenizer.render(turns[:place], tools=tools)
    given = text.text[: spans[0][0]]
    if TAGS.search(tokenizer.template or ""):  # which may leave out more of the opening
        pairs = zip(given, prompt, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert not words_of(given[shared:]) | words_of(prompt[shared:])
    elif given != prompt:  # both part in the opening of the answer
        assert prompt.startswith(given)
        asked = [turn for turn in turns[:place] if turn["role"] != "assistant"]
        assert words_of(asked) <= words_of(given), "the prompt, up to the opening of the answer"
        assert not text.text.startswith(prompt)
        alone = tokenizer.render(turns[: place + 1], tools=tools, opens_answer=False)
        assert not alone.startswith(prompt), "this turn by itself has the prompt"
    # an engine writes on until it stops
    stops = tokenizer.stop_texts
    last = shown[-1]
    ended = [last.index(stop) + len(stop) for stop in stops if stop in last]
    if ended:
        assert min(ended) == len(last), "nothing is learned behind the end"
        return
    behind = text.text[spans[-1][1] :]
    if text.ends_open and not behind.strip():
        return
    gap, _, after = behind.partition(min(words_of(behind), key=behind.index, default="\0"))
    follows = next((t for t in turns if words_of(after[:20]) & words_of(t)), {"role": "nobody"})
    special = tuple(tokenizer.turn_texts)
    assert (
        last.endswith(special)  # as the family ends a turn that is not the last
        or follows["role"] == "assistant"  # one goes on where the other ends
        or not any(token in gap for token in special)  # nothing ends it
        or TAGS.search(tokenizer.template or "")  # it marks no end
    )


def check_tokens(
    tokenizer: ChatTokenizer,
    turns: Sequence[dict[str, Any]],
    text: MarkedText,
    first: int,
    tools: Any,
) -> None:
    """The tokens before the first that is learned are the tokens of the prompt; cutting takes
    tokens from the end, and nothing else."""
    (line,) = tokenize_marked(tokenizer, [text])
    start = line.loss_mask.index(1)
    (prompt,) = tokenizer.encode_chats([turns[:first]], tools=[tools or ()])
    before = list(line.token_ids[:start])
    if not TAGS.search(tokenizer.template or ""):
        assert before == prompt or before == prompt[: len(before)]
    half = truncated(line, line.num_tokens // 2)
    assert half.loss_mask == line.loss_mask[: half.num_tokens]
    assert half.token_ids == line.token_ids[: half.num_tokens]


def check_refusal(
    tokenizer: ChatTokenizer, turns: Sequence[dict[str, Any]], tools: Any, error: Exception
) -> None:
    """A refusal names what is lost, and that is lost; or the template itself refuses the chat."""
    lost = re.search(r"omits (.*) of turn (\d+)|omits turn (\d+)", str(error))
    if lost is None:
        with pytest.raises(type(error)):
            for place, turn in enumerate(turns):
                if turn["role"] == "assistant":
                    tokenizer.render(turns[:place], tools=tools)
                    tokenizer.render(turns[: place + 1], tools=tools, opens_answer=False)
        return
    place = int(lost[2] or lost[3]) - 1
    parts = re.findall(r"`(\w+)`", lost[1] or "`content`")
    texts = [
        tokenizer.render(turns[: end + 1], tools=tools, opens_answer=False)
        for end in range(place, len(turns))
        if turns[end]["role"] == "assistant"
    ]
    for part in parts:
        assert not any(words_of(turns[place][part]) <= words_of(text) for text in texts), part


@pytest.mark.parametrize("name", KINDS)
def test_of_a_random_chat_what_engines_would_generate_is_learned(name: str) -> None:
    kind = KINDS[name]
    tokenizer = tokenizer_of(kind.template, special=kind.special, eos=kind.eos, added=kind.added)
    outcomes = [check(tokenizer, chat_of(seed)) for seed in range(40)]
    assert outcomes.count("learned") >= 8, "all random chats are refused"


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_templates_that_others_ship_are_read_the_same(file: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of_file(file, tmp_path)
    for seed in range(9):
        check(tokenizer, chat_of(seed))


TAGGED = [file for file in FOUND if TAGS.search(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("file", TAGGED, ids=lambda file: file.stem)
def test_masks_agree_with_the_marks_of_a_template(file: Path, tmp_path: Path) -> None:
    """But for the opening of the answer, the token that engines stop at, and what is behind it."""
    tagged = tokenizer_of_file(file, tmp_path)
    plain = tokenizer_of_file(file, tmp_path, template=TAGS.sub("", tagged.template or ""))
    for seed in range(4):
        turns = chat_of(2 * seed)
        try:
            texts = mark_chat(plain, turns)
        except Exception:  # see above
            continue
        assert [text.text for text in texts] == [text.text for text in mark_chat(tagged, turns)]
        for text, ours in zip(texts, mark_chat(tagged, turns), strict=True):
            assert words_of([text.text[slice(*span)] for span in text.spans]) == words_of(
                [ours.text[slice(*span)] for span in ours.spans]
            )
