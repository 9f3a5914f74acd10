"""Logs of a run: their list, their lines, and nothing outside of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from milescli.web import files, logs
from milescli.web.files import LineIndex
from tests.fake_run import WrittenRun


def lines(client: TestClient, path: str) -> dict:
    response = client.get(f"/api/runs/tiny-1/logs/{path}")
    assert response.status_code == 200, response.text
    return response.json()


def numbers(told: dict) -> list[int]:
    return [line["number"] for line in told["lines"]]


def counted_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the blocks that are read from now on."""
    read = list[int]()
    forwards = files.LineIndex.blocks
    backwards = files.LineIndex.blocks_backwards

    def blocks(index: LineIndex, first: int) -> Iterator[bytes]:
        for block in forwards(index, first):
            read.append(len(block))
            yield block

    def blocks_backwards(index: LineIndex) -> Iterator[tuple[int, bytes]]:
        for number, block in backwards(index):
            read.append(len(block))
            yield number, block

    monkeypatch.setattr(files.LineIndex, "blocks", blocks)
    monkeypatch.setattr(files.LineIndex, "blocks_backwards", blocks_backwards)
    return read


def test_attempts_are_listed_with_their_files(run: WrittenRun, client: TestClient) -> None:
    run.attempt(engine_0="one\n")
    run.attempt(engine_0="two\n", trainer_rank_0="")
    run.run.eval_log_dir().joinpath("engine-0.log").write_text("eval\n")
    told = client.get("/api/runs/tiny-1/logs").json()["attempts"]
    assert [one["name"] for one in told] == ["attempt_1", "attempt_2", "eval"]
    assert told[1]["files"] == [
        {"name": "engine-0.log", "size_bytes": 4},
        {"name": "trainer-rank-0.log", "size_bytes": 0},
    ]


def test_lines_by_number_and_from_the_end(run: WrittenRun, client: TestClient) -> None:
    run.attempt(engine_0="".join(f"line {number}\n" for number in range(1, 1001)))
    head = lines(client, "attempt_1/engine-0.log?limit=2")
    assert head["total"] == 1000
    assert head["lines"] == [{"number": 1, "text": "line 1"}, {"number": 2, "text": "line 2"}]
    tail = lines(client, "latest/engine-0.log?limit=2&tail=1")
    assert numbers(tail) == [999, 1000]
    assert numbers(lines(client, "latest/engine-0.log?limit=2&tail=1&offset=2")) == [997, 998]
    assert numbers(lines(client, "latest/engine-0.log?limit=3&tail=1&offset=999")) == [1]
    assert numbers(lines(client, "latest/engine-0.log?offset=998&limit=9")) == [999, 1000]
    assert len(lines(client, "latest/engine-0.log")["lines"]) == 500


@pytest.mark.parametrize("text", ["WORSE", "worse", "GRÖßER"])
def test_a_search_knows_no_case(
    run: WrittenRun, client: TestClient, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    said = [f"step {n}: {'größer, Worse' if n % 7 == 0 else 'well'}" for n in range(1, 101)]
    run.attempt(engine_0="\n".join(said))
    expected = [n for n in range(1, 101) if n % 7 == 0]
    found = lines(client, f"latest/engine-0.log?q={text}")
    assert (numbers(found), found["total"], found["is_all"]) == (expected, 14, True)
    assert numbers(lines(client, f"latest/engine-0.log?q={text}&limit=2&offset=1")) == [14, 21]
    assert numbers(lines(client, f"latest/engine-0.log?q={text}&limit=2&tail=1")) == [91, 98]
    assert numbers(lines(client, f"latest/engine-0.log?q={text}&limit=2&tail=1&offset=1")) == [
        84,
        91,
    ]


def test_a_search_ends_for_time_and_says_so(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    monkeypatch.setattr(logs, "SEARCH_S", -1.0)
    run.attempt(engine_0="here\n" * 100)
    assert not lines(client, "latest/engine-0.log?q=here")["is_all"]


def test_a_huge_file_is_read_from_its_end_without_the_rest(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 4096)
    (run.attempt() / "huge.log").write_bytes((b"y" * 99 + b"\n") * 10_000 + b"the end")
    assert lines(client, "latest/huge.log?tail=1&limit=1")["lines"][0]["text"] == "the end"
    read = counted_blocks(monkeypatch)
    assert lines(client, "latest/huge.log?tail=1&limit=1")["total"] == 10_001
    assert sum(read) <= 2 * 4096


@pytest.mark.parametrize("end", ["", "&tail=1"])
def test_a_search_ends_for_time_within_a_line_that_never_ends(
    run: WrittenRun, client: TestClient, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    monkeypatch.setattr(logs, "SEARCH_S", -1.0)
    (run.attempt() / "odd.log").write_bytes(b"y" * 6400)
    read = counted_blocks(monkeypatch)
    assert not lines(client, f"latest/odd.log?q=z{end}")["is_all"]
    assert len(read) == 1


def test_what_is_no_text_is_shown_as_far_as_it_is(run: WrittenRun, client: TestClient) -> None:
    (run.attempt() / "odd.log").write_bytes(b"\xff\x00<script>\r\n" + b"z" * 50_000)
    first, second = lines(client, "latest/odd.log")["lines"]
    assert first["text"] == "\ufffd\x00<script>"
    assert len(second["text"]) < 10_100


@pytest.mark.parametrize(
    "path",
    [
        "attempt_1/..%2f..%2frecipe.yaml",
        "..%2f..%2fother/recipe.yaml",
        "%2e%2e/recipe.yaml",
        "attempt_1/%2fetc%2fpasswd",
        "attempt_1/out.log",
        "attempt_1/folder%2fpasswd",
        "attempt_1/%00",
    ],
)
def test_nothing_outside_of_the_logs_is_read(
    run: WrittenRun, client: TestClient, path: str
) -> None:
    folder = run.attempt(engine_0="")
    (folder / "out.log").symlink_to("/etc/passwd")
    (folder / "folder").symlink_to("/etc")
    response = client.get(f"/api/runs/tiny-1/logs/{path}")
    assert response.status_code == 403, response.text
    assert "root" not in response.json()["what"] and "description" not in response.text


@pytest.mark.parametrize("path", ["attempt_1/none.log", "attempt_9/engine-0.log", "latest/"])
def test_a_log_that_is_not_there_is_not_found(
    run: WrittenRun, client: TestClient, path: str
) -> None:
    run.attempt(engine_0="")
    assert client.get(f"/api/runs/tiny-1/logs/{path}").status_code in (403, 404)


def test_a_run_without_logs(run: WrittenRun, client: TestClient) -> None:
    assert client.get("/api/runs/tiny-1/logs").json() == {"attempts": []}


def test_an_adapter_shows_the_logs_of_its_run(run: WrittenRun, client: TestClient) -> None:
    run.attempt(engine_0="one\n")
    WrittenRun(path=run.run.adapters_dir / "sums")
    told = client.get("/api/runs/tiny-1:sums/logs/attempt_1/engine-0.log").json()
    assert told["lines"] == [{"number": 1, "text": "one"}]


def test_a_folder_of_logs_that_names_itself(run: WrittenRun, client: TestClient) -> None:
    folder: Path = run.attempt(engine_0="one\n")
    (folder / "loop.log").symlink_to("loop.log")
    assert client.get("/api/runs/tiny-1/logs/attempt_1/loop.log").status_code in (403, 404)
    assert client.get("/api/runs/tiny-1/logs").status_code == 200
