"""A PromptSource over the rows of data files. Its position is its whole state. `prompt_source`
makes it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.epoch_order import epoch_order
from milescli.data.mapped_prompts import FileRows, MappedPrompts, evenly
from milescli.data.prompt_encoder import told_length

CHUNK_PROMPTS = 1024
"""Made at once where all are gone through."""


class FilePrompts:
    """Endless: an epoch is followed by the next, in another order.

    Of small files the rows are those that are kept. Of large ones they are all: one whose prompt is
    too long is passed over when it comes up, and the position counts it.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        max_tokens: int | None = None,
        refuses_long: bool = False,
        files: Sequence[FileRows] = (),
        places: Sequence[int] | None = None,
    ) -> None:
        """`prompts` in file order, at least one. `max_tokens`: longer ones are passed over, or an
        error where the source `refuses_long`. `files`: what they were made of, for checks;
        `places`: of each among the rows of all files, where some are left out."""
        assert prompts, "a source without prompts"
        self.files = files
        self.num_skipped = 0
        """Prompts passed over in this process, for being too long."""
        self._prompts = prompts
        self._places = range(len(prompts)) if places is None else places
        self._seed = seed
        self._shuffle = shuffle
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._refuses_long = refuses_long
        self._position = 0
        self._epoch = -1
        self._order: array[int] = array("q")

    def __len__(self) -> int:
        """Rows per epoch."""
        return len(self._prompts)

    @property
    def is_large(self) -> bool:
        """Prompts are made when they are asked for."""
        return isinstance(self._prompts, MappedPrompts)

    @property
    def position(self) -> int:
        """Rows taken since the start of the run, over all epochs."""
        return self._position

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All in file order; those of large files are made each time, too long ones included."""
        return self._prompts

    def first(self, count: int | None = None) -> list[Prompt]:
        """The first `count` kept prompts in file order; None: all."""
        return [prompt for _, prompt in self.first_placed(count)]

    def first_placed(self, count: int | None) -> list[tuple[int, Prompt]]:
        """The same, each with its place among all rows of the files."""
        kept: list[tuple[int, Prompt]] = []
        for start in range(0, len(self), CHUNK_PROMPTS):
            if count is not None and len(kept) >= count:
                break
            chunk = self._prompts[start : start + CHUNK_PROMPTS]
            kept += [
                (self._places[start + offset], prompt)
                for offset, prompt in enumerate(chunk)
                if self._is_short(prompt)
            ]
        return kept[:count]

    def texts(self, most: int) -> list[tuple[int, str]]:
        """(index, what the user wrote last) of at most so many prompts, evenly spread."""
        places = evenly(len(self), most)
        if isinstance(self._prompts, MappedPrompts):
            return self._prompts.texts(places)
        return [(self._prompts[place].index, self._prompts[place].text) for place in places]

    def some(self, most: int) -> list[Prompt]:
        """All kept prompts; of large files at most so many, evenly spread."""
        if not isinstance(self._prompts, MappedPrompts):
            return list(self._prompts)
        places = evenly(len(self), most)
        return [
            prompt
            for start in range(0, len(places), CHUNK_PROMPTS)
            for prompt in self._prompts.make(places[start : start + CHUNK_PROMPTS])
            if self._is_short(prompt)
        ]

    def seek(self, position: int) -> None:
        """Go to a position that was saved."""
        assert position >= 0, position
        self._position = position

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts, each with its epoch; moves the position. May cross epochs, more
        than once. Raises DataError where a whole epoch has none that is short enough, and where a
        large file has changed."""
        taken: list[tuple[int, Prompt]] = []
        num_tried = 0
        while len(taken) < count:
            positions = range(self._position, self._position + count - len(taken))
            rows = self.at(positions)
            taken += [(epoch, prompt) for epoch, prompt in rows if prompt is not None]
            num_tried += len(rows)
            self._position = positions.stop
            if not taken and num_tried > len(self):
                raise self.none_short()
        return taken

    def at(self, positions: Sequence[int]) -> list[tuple[int, Prompt | None]]:
        """What stands at some positions, each with its epoch; None in the place of a prompt that is
        too long. Does not move."""
        places = [divmod(position, len(self)) for position in positions]
        prompts = self._make([self._order_of(epoch)[offset] for epoch, offset in places])
        short = [prompt if self._is_short(prompt) else None for prompt in prompts]
        self.num_skipped += sum(prompt is None for prompt in short)
        return [(epoch, prompt) for (epoch, _), prompt in zip(places, short, strict=True)]

    def none_short(self) -> DataError:
        """That no prompt is short enough."""
        return self._too_long("every prompt", self._prompts[0])

    def _make(self, rows: list[int]) -> list[Prompt]:
        if isinstance(self._prompts, MappedPrompts):
            return self._prompts.make(rows)
        return [self._prompts[row] for row in rows]

    def _is_short(self, prompt: Prompt) -> bool:
        if len(prompt.token_ids) <= self._max_tokens:
            return True
        if self._refuses_long:
            raise self._too_long("a prompt", prompt)
        return False

    def _too_long(self, what: str, prompt: Prompt) -> DataError:
        return DataError(
            f"{what} is longer than {self._max_tokens} tokens",
            why=f"prompt {prompt.index} of {', '.join(str(file.path) for file in self.files)} has "
            f"{told_length(prompt, self._max_tokens)}",
            fix=f"--set data.max_prompt_tokens={len(prompt.token_ids)}",
        )

    def _order_of(self, epoch: int) -> array[int]:
        if epoch != self._epoch:
            self._order = epoch_order(
                len(self._prompts), seed=self._seed, epoch=epoch, shuffle=self._shuffle
            )
            self._epoch = epoch
        return self._order
