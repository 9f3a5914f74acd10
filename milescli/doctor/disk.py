"""Checks disks: of the folder of runs, of Ray's sessions, and of models from the hub. Measures
speed by a real write."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from milescli.core.units import GIB, MIB, format_bytes, format_duration
from milescli.doctor.finding import Finding, fail, ok, warn
from milescli.doctor.fixes import another_folder, nearest_folder
from milescli.doctor.roles import critic_facts
from milescli.models import table
from milescli.plan.choices import choose_precision
from milescli.plan.types import Log
from milescli.platform.machine import Machine
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe

NEEDED, WANTED = 2 * GIB, 20 * GIB
"""Free bytes for runs: for the smallest run with two checkpoints, and for real models."""
SPEED_WANTED = 50 * MIB
"""Bytes per second; a checkpoint of a 1B model with its optimizer has 16 GB."""
SCRATCH = Path("/tmp")
"""Folder of every run's Ray session. It is not TMPDIR, because socket paths are limited to 107
bytes."""
SCRATCH_NEEDED, SCRATCH_WANTED = 256 * MIB, 2 * GIB
"""Free bytes there: for the logs of Ray and of one engine, and for several with what Ray spills."""
RAY_FULL = 0.95
"""Ray's `local_fs_capacity_threshold`: on a fuller disk Ray accepts no object that does not fit
into shared memory."""
CHECKPOINT_BYTES = {"fp32": 16, "bf16": 14}
"""Bytes per parameter, as Megatron-Core saves them: weights, the optimizer's own float32 weights,
two moments. Measured for fp32 on quickstart."""
SLOW_SAVE_S = 600.0
"""Seconds of a save above which there is a warning, because the run waits for it at its end."""


def check_disk(
    folder: Path, *, free_bytes: int | None = None, bytes_per_s: float | None = None
) -> list[Finding]:
    """Check free space and speed of the folder of runs, or of the nearest existing parent."""
    existing = nearest_folder(folder)
    another = f"--set run.dir={shlex.quote(str(another_folder(but_not=existing)))}"
    in_the_way = next(
        (path for path in (folder.absolute(), *folder.absolute().parents) if path.is_file()), None
    )
    if in_the_way is not None:
        why = f"{in_the_way} is a file, but runs are stored in the folder {folder}"
        away = shlex.join(["mv", str(in_the_way), f"{in_the_way}.old"])
        return fail("disk", f"{folder} cannot be created", why=why, fix=[away, another])
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    look = f"du -xh --max-depth=2 {shlex.quote(str(existing))} | sort -h | tail   # by size"
    if free < NEEDED:
        why = f"the smallest run with two checkpoints needs {format_bytes(NEEDED)}"
        return fail(
            "disk", f"{format_bytes(free)} free in {existing}", why=why, fix=[another, look]
        )
    if os.statvfs(existing).f_files and not os.statvfs(existing).f_favail:
        return fail(
            "disk",
            f"no file can be created in {existing}",
            why="its file system has no inodes left",
            fix=[another, look],
        )
    try:
        speed = write_speed(existing) if bytes_per_s is None else bytes_per_s
    except OSError as error:
        why = f"{os.strerror(error.errno or errno.EIO)}; runs are stored there"
        return fail("disk", f"{existing} is not writable", why=why, fix=another)
    what = f"{format_bytes(free)} free in {existing}, writes {format_bytes(speed)}/s"
    if free < WANTED or speed < SPEED_WANTED:
        why = (
            f"recommended: {format_bytes(WANTED)} and {format_bytes(SPEED_WANTED)}/s, for "
            "checkpoints of real models"
        )
        return warn("disk", what, why=why, fix=[another, look] if free < WANTED else another)
    return ok("disk", what)


def write_speed(folder: Path, *, size_bytes: int = 32 * MIB) -> float:
    """Return the bytes per second of one synced write. Raises OSError if it fails."""
    block = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.monotonic()
        for _ in range(size_bytes // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size_bytes / (time.monotonic() - start)


def check_scratch(*, folder: Path = SCRATCH) -> list[Finding]:
    """Check the folder of Ray's session and the engines' sockets."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"miles")
    except OSError as error:
        why = f"{os.strerror(error.errno or errno.EIO)}; Ray stores its session there"
        fixes = [
            f"mount -o remount,rw,size=8G {folder}",
            f"mkdir -p {shlex.quote(str(folder))} && chmod 1777 {shlex.quote(str(folder))}",
        ]
        return fail("scratch", f"{folder} is not writable", why=why, fix=fixes)
    usage = shutil.disk_usage(folder)
    what = f"{format_bytes(usage.free)} free in {folder}"
    look = f"du -xsh {folder}/* | sort -h | tail   # what uses the space?"
    resize = (
        f"mount -o remount,size={format_size(usage.total + 2 * SCRATCH_WANTED)} {folder}   # if "
        "it is a tmpfs"
    )
    if usage.free < SCRATCH_NEEDED:
        why = f"Ray's session and the engines' logs need {format_bytes(SCRATCH_NEEDED)} there"
        return fail(
            "scratch", what, why=why, fix=[resize, look] if os.path.ismount(folder) else look
        )
    used = 1 - usage.free / usage.total
    if usage.free < SCRATCH_WANTED or used > RAY_FULL:
        why = (
            f"it is {used:.0%} full; Ray spills objects there that its store cannot hold, and "
            f"stops above {RAY_FULL:.0%}"
        )
        return warn("scratch", what, why=why, fix=look)
    return ok("scratch", what)


def check_checkpoints(
    recipe: Recipe,
    machine: Machine,
    *,
    free_bytes: int | None = None,
    bytes_per_s: float | None = None,
) -> list[Finding]:
    """Check that the disk has space for `checkpoint.keep` checkpoints and one more, written before
    the oldest is removed, and estimate how long one takes to write."""
    from milescli.runtime.inputs.model_facts import planned_facts

    numbers = table(planned_facts(recipe)).num_parameters
    if (critic := critic_facts(recipe)) is not None:
        numbers += table(critic).num_parameters
    precision = choose_precision(recipe, machine, Log())
    per_checkpoint = numbers * CHECKPOINT_BYTES[precision]
    needed = (recipe.checkpoint.keep + 1) * per_checkpoint
    existing = nearest_folder(Path(recipe.run.dir).expanduser())
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    what = (
        f"{format_bytes(per_checkpoint)} each, at most {format_bytes(needed)}; "
        f"{format_bytes(free)} free in {existing}"
    )
    roomy = another_folder(but_not=existing, needed_bytes=needed)
    elsewhere = f"--set run.dir={shlex.quote(str(roomy))}"
    if needed > free:
        fewer = int(free // per_checkpoint) - 1
        why = (
            f"{recipe.checkpoint.keep} are stored while one more is written: {numbers:,} "
            f"parameters x {CHECKPOINT_BYTES[precision]} bytes"
        )
        fixes = [*([f"--set checkpoint.keep={fewer}"] if fewer >= 1 else []), elsewhere]
        return fail("checkpoints", what, why=why, fix=fixes)
    seconds = per_checkpoint / (write_speed(existing) if bytes_per_s is None else bytes_per_s)
    what += f"; one takes about {format_duration(seconds)} to write from here alone"
    if seconds > SLOW_SAVE_S:
        why = (
            "a stopped run waits for it; `machine.step_timeout_s` is "
            f"{recipe.machine.step_timeout_s:g} s"
        )
        return warn("checkpoints", what, why=why, fix=elsewhere)
    return ok("checkpoints", what)


def check_download(recipe: Recipe, *, free_bytes: int | None = None) -> list[Finding]:
    """Check that the hub's cache has space for the models that are not in it yet. Assumes bfloat16
    weights, as in most releases."""
    from milescli.backends.hub.repo import cache_dir
    from milescli.doctor.hub_access import is_cached, wanted_repos
    from milescli.runtime.inputs.model_facts import facts_of_recipe

    cache = cache_dir()
    lacking = {
        name: key
        for kind, name, key in wanted_repos(recipe)
        if kind == "model" and not is_cached((kind, name, key))
    }
    if not lacking:
        return ok("download", "no model needs to be downloaded")
    models = [
        recipe.model if key == "model.path" else Model(path=name) for name, key in lacking.items()
    ]
    needed = 2 * sum(table(facts_of_recipe(model)).num_parameters for model in models)
    existing = nearest_folder(cache)
    free = shutil.disk_usage(existing).free if free_bytes is None else free_bytes
    what = (
        f"the launch will download {', '.join(f'`{name}`' for name in lacking)}: about "
        f"{format_bytes(needed)}; {format_bytes(free)} free in {existing}"
    )
    if needed > free:
        roomy = another_folder(but_not=existing, needed_bytes=needed)
        fixes = [
            f"export HF_HOME={shlex.quote(str(roomy.with_name('huggingface')))}",
            "hf cache ls   # shows its content; `hf cache rm` deletes it",
        ]
        return fail("download", what, why=f"the hub's cache is {cache}", fix=fixes)
    return ok("download", what)


def format_size(size_bytes: int) -> str:
    """Format a size for mount, in whole GiB, rounded up: 8G."""
    return f"{-(-size_bytes // GIB)}G"
