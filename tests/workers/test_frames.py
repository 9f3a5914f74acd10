"""Messages over a pipe: a full one holds nobody up, and what is no message is refused."""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import pytest

from milescli.workers.frames import JSON, PICKLE, SIZE, Codec, Outbox

MESSAGES = [
    (0, "call", ["play", {"a": "\n\u00fc"}]),
    (1, "cancel", None),
    (2, "error", "x" * 70_000),
]


@pytest.mark.parametrize("codec", [JSON, PICKLE])
def test_messages_come_out_as_they_went_in_up_to_a_torn_one(codec: Codec) -> None:
    sent = b"".join(map(codec.pack, MESSAGES))
    for lacking, num_whole in ((0, 3), (1, 2), (69_000, 2)):
        pipe = io.BytesIO(sent[: len(sent) - lacking])
        read = []
        while (frame := codec.read(pipe)) is not None:
            read.append(codec.unpack(frame))
        assert read == MESSAGES[:num_whole]


@pytest.mark.parametrize(
    "printed", [b"Loading model\n", b"[1, 2]\n", b"7\n", b'{"a": 1}\n', b'["a", 2, 3]\n']
)
def test_a_line_that_is_no_message_is_shown(printed: bytes) -> None:
    with pytest.raises(ValueError) as refused:
        JSON.unpack(printed)
    assert repr(printed) in str(refused.value)


def test_what_was_printed_into_the_pipe_is_no_frame() -> None:
    with pytest.raises(ValueError):
        PICKLE.read(io.BytesIO(b"Loading model ..."))


def test_a_full_pipe_holds_nobody_up_and_keeps_the_order() -> None:
    outbox, (reader, writer) = Outbox(PICKLE.pack), os.pipe()
    outbox.put("before it is open")
    thread = threading.Thread(target=outbox.run, args=(writer,))
    thread.start()
    for number in range(40):
        outbox.put(bytes([number]) * 50_000)  # 2 MB: far more than a pipe holds
    outbox.end()
    read = bytearray()
    while piece := os.read(reader, 1 << 20):
        read += piece
    thread.join()
    os.close(reader)
    messages, place = list[Any](), 0
    while place < len(read):
        end = place + SIZE.size + SIZE.unpack_from(read, place)[0]
        messages.append(PICKLE.unpack(read[place + SIZE.size : end]))
        place = end
    assert messages == ["before it is open", *(bytes([number]) * 50_000 for number in range(40))]


def test_what_is_put_where_nobody_reads_any_more_is_let_go() -> None:
    outbox, (reader, writer) = Outbox(PICKLE.pack), os.pipe()
    thread = threading.Thread(target=outbox.run, args=(writer,))
    thread.start()
    os.close(reader)
    for _ in range(3):
        outbox.put("lost")
    outbox.end()
    thread.join()
