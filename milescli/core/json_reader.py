"""JSON that we did not just write ourselves: files of models and runs, labels, arguments of tool
calls, replies. Whatever such text holds, reading it ends, with one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from milescli.core.files import read_regular_bytes

TOO_DEEP = "nested too deeply"


def parse_json(text: str | bytes | bytearray, **hooks: Any) -> Any:
    """Return the value of a JSON text. `hooks` are those of `json.loads`. Raises JSONDecodeError,
    with the position, for all that it cannot be: also for text that is no UTF-8, nesting beyond
    what Python can recurse into, and numbers of more digits than Python reads."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **hooks)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"no UTF-8 at byte {error.start}", "", 0) from error
    except RecursionError:
        raise json.JSONDecodeError(TOO_DEEP, "", 0) from None
    except ValueError as error:  # Python's limit of digits
        raise json.JSONDecodeError(str(error).partition(";")[0], "", 0) from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises JSONDecodeError as `parse_json`, and OSError as
    `read_regular_bytes`."""
    return parse_json(read_regular_bytes(path))
