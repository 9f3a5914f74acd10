"""Makes a small byte-level BPE tokenizer from text, as a Hugging Face folder, for models made from
scratch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from milescli.core.errors import RecipeError

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Padding, and the two ends of a turn, with the ids 0, 1 and 2. TURN_END is the end-of-sequence
token."""

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens of a model that accepts images, with the ids 3 to 6."""

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""The vocabulary has all bytes, so that any text can be encoded, and the special tokens."""

ROLE_HEADERS = "system\nuser\nassistant\n"
"""Added to every training text, so that the opening of a turn becomes a few tokens and not one per
letter."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\ntools:' }}"
    "{% for tool in tools %}{% set function = tool.function %}{{ '\\n' + function.name + '(' +"
    " function.parameters.properties.keys() | join(', ') + '): ' + function.description }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' +'
    " call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    " + message['content'] }}",
    " }}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}",
)
"""The same template, for a model that sees images."""


def make_scratch_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | Path,
    *,
    max_length: int = 4096,
    sees_images: bool = False,
) -> Path:
    """Train on `texts` and write tokenizer.json and tokenizer_config.json; equal input gives equal
    bytes. Digits are always separate tokens. `vocab_size`: upper bound; short texts give fewer
    tokens. `sees_images`: add the tokens that mark images. Raises RecipeError if it is too small
    for all bytes."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise RecipeError(
            f"a vocabulary of {vocab_size} is too small",
            why=f"256 bytes and {len(SPECIAL_TOKENS)} special tokens need {MIN_VOCAB_SIZE}",
            fix="--set model.scratch.vocab_size=512",
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    corpus = [ROLE_HEADERS + text for text in texts]
    special = (*SPECIAL_TOKENS, *VISION_TOKENS) if sees_images else SPECIAL_TOKENS
    (path / "tokenizer.json").write_text(_train(corpus, vocab_size, special), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, *special[len(SPECIAL_TOKENS) :]],
        "chat_template": IMAGE_CHAT_TEMPLATE if sees_images else CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return path


def _train(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True) + "\n"
