"""`miles serve`: what it refuses before it starts an engine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.commands.conftest import Miles


def test_what_cannot_be_served_is_refused(miles: Miles) -> None:
    folder = Path("runs/quickstart-1")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: quickstart\n")
    for wrong in ("quickstart-2", "quickstart-2@20"):
        said = miles("serve", wrong)
        assert (said.code, said.out) == (6, "") and "quickstart-1" in said.err
    said = miles("serve", "http://127.0.0.1:1/v1")
    assert said.code == 2 and "endpoint" in said.err


def test_a_port_in_use_is_refused(miles: Miles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        said = miles("serve", "org/name", "--port", str(number))
    assert said.code == 4 and f"miles serve org/name --port {number + 1}" in said.err


def test_one_form_is_chosen(miles: Miles) -> None:
    for wrong, word in (
        ((), "--recipe"),
        (("run", "--recipe", "qwen3-0.6b"), "--recipe"),
        (("run", "--lora", "4"), "--lora"),
        (("--recipe", "qwen3-0.6b", "--tokens", "5"), "max_response_tokens"),
    ):
        said = miles("serve", *wrong)
        assert said.code == 2 and word in said.err


def test_keys_must_be_private_and_whole(miles: Miles) -> None:
    command = ("serve", "--recipe", "qwen3-0.6b", "--lora", "4", "--port", "0", "--keys", "keys")
    file = Path("keys")
    assert miles(*command).code == 3
    key = "tml-0123456789abcdef"
    for text in ("", "alice", "alice short", f"alice {key}\nbob {key}\n", f"a {key} more"):
        file.write_text(text)
        file.chmod(0o600)
        said = miles(*command)
        assert said.code == 3 and "keys" in said.err and key not in said.err
        assert " > " not in said.err, "the other clients keep their keys"
    file.write_text(f"# mine\n\nalice {key}\nbob short\n")
    assert "fix: ${EDITOR:-vi} +4 keys" in miles(*command).err
    file.write_text(f"alice {key}\n")
    file.chmod(0o640)
    said = miles(*command)
    assert said.code == 3 and "chmod 600" in said.err
    file.unlink()
    os.mkfifo(file, 0o600)
    said = miles(*command)
    assert said.code == 3 and "Not a regular file" in said.err


def test_what_clients_cannot_train_is_refused(miles: Miles) -> None:
    for settings, word in (
        ((), "--lora 32"),
        (("--lora", "4"), "scratch"),
        (("--lora", "4", "--set", "train.optimizer.rule=muon"), "adamw"),
        (("--lora", "4", "--set", "train.lora.publish=merged"), "publish"),
    ):
        said = miles("serve", "--recipe", "quickstart", "--port", "0", *settings)
        assert said.code == 3 and word in said.err, said.err
