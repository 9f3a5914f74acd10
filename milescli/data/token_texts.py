"""Splits the text of a sample into the texts of its tokens, for the files of samples."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from milescli.data.tokenizer import ChatTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
"""SentencePiece's names for the tokens of single bytes."""
_SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens."""


class TokenTexts:
    """Splits a text into the texts of its tokens. Caches the bytes of tokens; not thread-safe."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer.inner, "backend_tokenizer", None), "decoder", None)
        self._bytes_of = _byte_alphabet() if "ByteLevel" in repr(decoder) else None
        self._added = frozenset(tokenizer.inner.added_tokens_decoder)  # made anew at each look
        self._pieces: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the whole text, special tokens included."""
        return str(
            self._tokenizer.inner.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def split(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return (the whole text, [num_tokens] number of its characters that each token adds). A
        token whose bytes are a part of a character that a later one completes adds 0."""
        text, lengths = self.decode(token_ids), list[int]()
        decoder, made = codecs.getincrementaldecoder("utf-8")("replace"), list[str]()
        pieces, last = self._pieces, len(token_ids) - 1
        for place, token in enumerate(token_ids):
            if (piece := pieces.get(token)) is None:
                piece = pieces[token] = self._bytes(token)
            made.append(decoder.decode(piece, place == last))
            lengths.append(len(made[-1]))
        joined = "".join(made)
        if joined == text:
            return text, lengths
        if joined == " " + text and lengths[0]:  # SentencePiece begins every text with a space
            lengths[0] -= 1
            return text, lengths
        shown = self._tokenizer.pieces(token_ids)  # of a kind that is not known here
        return "".join(shown), [len(piece) for piece in shown]

    def _bytes(self, token: int) -> bytes:
        inner = self._tokenizer.inner
        name = inner.convert_ids_to_tokens(token)
        if name is None:  # an id beyond the vocabulary, which decodes to nothing
            return b""
        if token in self._added:
            return str(name).encode()
        if (alphabet := self._bytes_of) is not None:
            if all(letter in alphabet for letter in name):
                return bytes(alphabet[letter] for letter in name)
            return str(name).encode()
        if (number := _BYTE_TOKEN.match(name)) is not None:
            return bytes([int(number[1], 16)])
        return str(name).replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return letter -> byte, in the alphabet of GPT-2: some bytes are their own letters, and the
    others, in order, are the letters from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    own = {chr(byte): byte for byte in shown}
    return own | {chr(256 + place): byte for place, byte in enumerate(hidden)}
