"""`miles serve`: what it refuses before it starts an engine."""

from __future__ import annotations

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
