"""What clients have saved: whole or not there, and only for who saved it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from milescli.core.errors import CheckpointError
from milescli.runtime.service.states import EPHEMERAL, Info, States

INFO = Info(
    tenant="alice",
    model_id="0a1b:train:0",
    kind="weights",
    name="one",
    base_model="org/name",
    adapter="lora of rank 4",
    rank=4,
    seed=1,
    saved_at=0.0,
)


async def _fill(folder: Path) -> None:
    (folder / "tensors").write_text("1")


def _add(states: States, info: Info, **options: bool) -> Path:
    return asyncio.run(states.add(info, _fill, **options))


def test_a_state_is_found_by_its_path_by_who_saved_it(tmp_path: Path) -> None:
    states = States(tmp_path)
    folder = _add(states, INFO)
    found, info = states.find("tinker://0a1b:train:0/weights/one", tenant="alice", kind="weights")
    assert found == folder and (found / "tensors").read_text() == "1"
    assert replace(info, saved_at=0.0) == INFO and info.saved_at > 0
    for path, tenant, kind in (
        (INFO.path, "bob", "weights"),
        (INFO.path, "alice", "sampler_weights"),
        ("tinker://0a1b:train:0/weights/two", "alice", "weights"),
        ("tinker://0a1b:train:0/weights/..", "alice", "weights"),
        ("tinker://../../weights/one", "alice", "weights"),
        ("/etc/passwd", "alice", "weights"),
    ):
        with pytest.raises(ValueError, match="you have no state"):
            states.find(path, tenant=tenant, kind=kind)  # type: ignore[arg-type]


def test_a_name_is_taken_once_and_stays_below_the_folder(tmp_path: Path) -> None:
    states = States(tmp_path)
    _add(states, INFO)
    with pytest.raises(ValueError, match="already"):
        _add(states, INFO)
    _add(states, INFO, overwrite=True)
    for name in ("", "..", "a/b", ".hidden", "x" * 129, "a\n"):
        with pytest.raises(ValueError, match="cannot be a name"):
            _add(states, replace(INFO, name=name))
    assert [each.name for each in states.all_of(tenant="alice")] == ["one"]
    assert states.all_of(tenant="bob") == []


def test_what_was_not_written_whole_is_not_there_and_leaves_nothing(tmp_path: Path) -> None:
    states = States(tmp_path)

    async def fail(folder: Path) -> None:
        await _fill(folder)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        asyncio.run(states.add(INFO, fail))
    assert not list(tmp_path.rglob("tensors"))
    with pytest.raises(ValueError, match="you have no state"):
        states.find(INFO.path, tenant="alice", kind="weights")


def test_a_new_server_keeps_what_has_a_name(tmp_path: Path) -> None:
    states = States(tmp_path)
    kept = _add(states, INFO)
    gone = _add(states, replace(INFO, name=f"{EPHEMERAL}1", kind="sampler_weights"))
    torn = kept.with_name("torn")
    torn.mkdir()
    states.clean()
    assert kept.exists() and not gone.exists() and not torn.exists()
    (kept / "state.json").write_text("{")
    assert states.all_of(tenant="alice") == []


def test_a_state_whose_successor_was_not_put_in_its_place_is_kept(tmp_path: Path) -> None:
    states = States(tmp_path)
    folder = _add(states, INFO)
    folder.rename(folder.with_name(f".old-{folder.name}"))
    States(tmp_path).clean()
    assert states.find(INFO.path, tenant=INFO.tenant)[0] == folder


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_a_full_disk_is_named_and_the_older_state_stays(tmp_path: Path, error: Exception) -> None:
    states = States(tmp_path)
    folder = _add(states, INFO)

    async def fails(fresh: Path) -> None:
        (fresh / "tensors").write_text("2")
        raise error

    with pytest.raises(CheckpointError, match=r"tinker://.*was not saved") as caught:
        asyncio.run(states.add(INFO, fails, overwrite=True))
    assert "No space left" in caught.value.why
    assert (folder / "tensors").read_text() == "1"
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
