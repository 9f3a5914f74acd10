"""Who holds the memory that a run would need."""

from __future__ import annotations

import os
from pathlib import Path

from milescli.core.errors import MemoryTaken
from milescli.core.units import GIB
from milescli.platform import memory_holders
from milescli.platform.memory_holders import Holder, largest_processes, name_holders


def _process(root: Path, pid: int, *, gib: float, words: str, parent: int = 1) -> None:
    folder = root / str(pid)
    folder.mkdir()
    pages = int(gib * GIB) // os.sysconf("SC_PAGE_SIZE")
    (folder / "statm").write_text(f"0 {pages} 0 0 0 0 0\n")
    (folder / "cmdline").write_text(words.replace(" ", "\0"))
    (folder / "stat").write_text(f"{pid} (a (name) b) S {parent} 0 0\n")


def test_the_largest_are_named_without_their_arguments(tmp_path: Path) -> None:
    _process(tmp_path, 11, gib=1, words="/usr/bin/python3 /home/me/train.py --key=opensesame")
    _process(tmp_path, 12, gib=8, words="python -m pkg.serve --token opensesame")
    _process(tmp_path, 13, gib=0.1, words="vim")
    _process(tmp_path, 14, gib=2, words="ray::IDLE")
    _process(tmp_path, 15, gib=0.5, words="/opt/game -x")
    (tmp_path / "16").mkdir()  # one that has just ended
    _process(tmp_path, 17, gib=9, words="tmux", parent=1)
    _process(tmp_path, os.getpid(), gib=9, words="python -m milescli", parent=17)
    shown = [(one.pid, one.name) for one in largest_processes(root=tmp_path)]
    assert shown == [(12, "python -m pkg.serve"), (14, "ray::IDLE"), (11, "python3 train.py")]


def test_a_refusal_says_who_holds_it_and_how_to_look(monkeypatch) -> None:
    error = MemoryTaken("it does not fit", why="20.0 > 12.0", fix=["--lora 16"])
    held = [Holder(pid=12, name="python -m pkg.serve", size_bytes=8 * GIB)]
    monkeypatch.setattr(memory_holders, "largest_processes", lambda: held)
    told = name_holders(error, held_bytes=10 * GIB)
    assert "other processes hold 10.0 GiB, without which it would fit" in told.why
    assert "python -m pkg.serve (process 12) 8.0 GiB" in told.why
    assert told.fixes[0].startswith("ps -o pid,rss,etime,args -p 12 ")
    assert told.fixes[1] == "--lora 16" and told.exit_code == error.exit_code
    monkeypatch.setattr(memory_holders, "largest_processes", list)
    assert "none of the large ones is yours" in name_holders(error, held_bytes=GIB).why
