"""FrozenLake as text: walk over the ice to the goal, around the holes. The rules are those of
Gymnasium's environment of that name, on boards of any size; the boards of a data set are its
rows' labels, and are in their prompts."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from milescli.rollout.environments import Step

ICE, HOLE, PLAYER, GOAL = ".OPG"
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
STOP = "stop"
"""Ends an episode without a move."""
SIZE, NUM_HOLES, MIN_STEPS = 4, 2, 2
"""Size, holes and least steps to the goal of the boards of `task:frozen_lake`."""
NUM_ROWS, NUM_HELDOUT, HELDOUT_MODULUS = 8192, 256, 16
STOPPED_SHARE = 0.7
"""Fraction of the demonstrations that stop at once, because a player who does not move never falls
in. The others walk to the goal."""
_ABOUT = "Walk from P to G. O is a hole."
Place = tuple[int, int]
Board = Sequence[str]
"""Rows of cells."""


class FrozenLake:
    """Simulates a frozen lake: walk over the ice to the goal, around the holes. Implements
    milescli.rollout.environments.Environment. The policy writes up, down, left, right or stop; any
    other text is a turn without a move. The reward is 1.0 for the step onto the goal."""

    reward_range = (0.0, 1.0)

    def __init__(
        self, *, size: int = SIZE, num_holes: int = NUM_HOLES, is_slippery: bool = False
    ) -> None:
        """Set `size` and `num_holes` of boards for rows without a board; with `is_slippery`, two of
        three moves slip sideways."""
        if size < 2 or not 0 <= num_holes <= size * size - 2:
            raise ValueError(f"a board of {size} x {size} cells has no space for {num_holes} holes")
        self._size, self._num_holes, self._is_slippery = size, num_holes, is_slippery
        self._board: Board = ()
        self._at: Place = (0, 0)
        self._rng = random.Random()

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Start on the board that `label` holds (rows, `P.O/.../O.G`); any other label, such as a
        number, seeds a drawn board together with `seed`."""
        self._rng = random.Random(f"{label}/{seed}")
        rows = (label or "").split("/")
        is_board = len(rows) > 1 and {PLAYER, GOAL} <= set("".join(rows))
        drawn = (
            rows if is_board else draw_board(self._rng, size=self._size, num_holes=self._num_holes)
        )
        self._at = find(drawn, PLAYER)
        self._board = [row.replace(PLAYER, ICE) for row in drawn]
        return None if is_board else prompt_text(drawn)

    def step(self, action: str) -> Step:
        """Make one move; a move off the board leaves the player in place."""
        word = action.strip().lower()
        if word == STOP:
            return Step(ended=True)
        if word in MOVES:
            self._at = move_from(self._board, self._at, self._slipped(MOVES[word]))
        row, column = self._at
        cell = self._board[row][column]
        if cell != ICE:
            return Step(reward=float(cell == GOAL), ended=True)
        return Step(observation=board_text(with_player(self._board, self._at)))

    def _slipped(self, move: Place) -> Place:
        """Return the move itself, or one to either side of it, with probability 1/3 each."""
        if not self._is_slippery:
            return move
        down, right = move
        return self._rng.choice([move, (right, down), (-right, -down)])


def rows(*, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield training rows: a prompt with a board, its label, and a demonstration to imitate."""
    return _rows(random.Random(seed), NUM_ROWS, heldout=False)


def heldout_rows(*, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield rows of boards that no run trains on."""
    return _rows(random.Random(seed), NUM_HELDOUT, heldout=True)


def _rows(rng: random.Random, count: int, *, heldout: bool) -> Iterator[Mapping[str, Any]]:
    seen = set[str]()
    while len(seen) < count:
        board = draw_board(rng, size=SIZE, num_holes=NUM_HOLES)
        label = "/".join(board)
        is_heldout = zlib.crc32(label.encode()) % HELDOUT_MODULUS == 0
        steps, straight = (
            len(shortest_path(board)),
            _distance(find(board, PLAYER), find(board, GOAL)),
        )
        is_fit = MIN_STEPS <= steps == straight  # no detour: a small model sees no further
        if is_heldout is not heldout or label in seen or not is_fit:
            continue
        seen.add(label)
        stops = rng.random() < STOPPED_SHARE
        walked = [_user_message(STOP)] if stops else demonstration(board)
        yield {"prompt": prompt_text(board), "label": label, "demonstration": walked}


def demonstration(board: Board) -> list[dict[str, str]]:
    """Return the turns of a shortest path to the goal."""
    at, ice = find(board, PLAYER), [row.replace(PLAYER, ICE) for row in board]
    turns = list[dict[str, str]]()
    for word in shortest_path(board):
        if turns:
            turns.append({"role": "user", "content": board_text(with_player(ice, at))})
        turns.append(_user_message(word))
        at = move_from(ice, at, MOVES[word])
    return turns


def _user_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def draw_board(rng: random.Random, *, size: int, num_holes: int) -> list[str]:
    """Draw a board with a path to its goal."""
    while True:
        cells = [PLAYER, GOAL, *[HOLE] * num_holes, *[ICE] * (size * size - 2 - num_holes)]
        rng.shuffle(cells)
        board = ["".join(cells[start : start + size]) for start in range(0, size * size, size)]
        if shortest_path(board):
            return board


def shortest_path(board: Board) -> list[str]:
    """Return the moves of a shortest path from the player to the goal; empty if there is none."""
    start = find(board, PLAYER)
    waiting, found = deque([start]), {start: list[str]()}
    while waiting:
        at = waiting.popleft()
        for word, move in MOVES.items():
            to = move_from(board, at, move)
            cell = board[to[0]][to[1]]
            if to in found or cell == HOLE:
                continue
            found[to] = [*found[at], word]
            if cell == GOAL:
                return found[to]
            waiting.append(to)
    return []


def move_from(board: Board, at: Place, move: Place) -> Place:
    """Return the cell after a move; the same cell if the move would leave the board."""
    row, column = at[0] + move[0], at[1] + move[1]
    return (row, column) if 0 <= row < len(board) and 0 <= column < len(board[row]) else at


def find(board: Board, cell: str) -> Place:
    """Return the place of the first such cell; the board must have one."""
    return next((r, row.index(cell)) for r, row in enumerate(board) if cell in row)


def with_player(ice: Board, at: Place) -> list[str]:
    """Return the board with the player on it."""
    return [
        row[: at[1]] + PLAYER + row[at[1] + 1 :] if number == at[0] else row
        for number, row in enumerate(ice)
    ]


def board_text(board: Board) -> str:
    """Return the board, one word per cell, and the moves over ice that lead closer to the goal."""
    at, goal = find(board, PLAYER), find(board, GOAL)
    landed = {word: move_from(board, at, move) for word, move in MOVES.items()}
    closer = [
        word
        for word, to in landed.items()
        if board[to[0]][to[1]] != HOLE and _distance(to, goal) < _distance(at, goal)
    ]
    return "\n".join([*(" ".join(row) for row in board), f"closer: {' '.join(closer) or 'none'}"])


def _distance(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def prompt_text(board: Board) -> str:
    """Return the task's instruction and the board."""
    return f"{_ABOUT}\n{board_text(board)}"
