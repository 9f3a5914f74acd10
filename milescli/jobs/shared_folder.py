"""Fills in the scripts for SLURM and ssh, which use the same folder and the same environment on
every node."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from milescli.core.units import GIB, format_duration
from milescli.jobs.job import Job

LONGEST_S = 24 * 3600
"""Of a SLURM job, since partitions have limits; a run that needs more is queued again."""
START_S = 1800
"""Room for downloads, conversion and start in a time limit. An estimate."""
SHORTEST_NOTICE_S = 300
"""Before a time limit, to save."""
SAVE_S = 120
"""Of that notice, for the checkpoint; the rest is for the step that is half done."""


def shared_folder_values(job: Job) -> dict[str, str]:
    """Return the values that SLURM and ssh share: this folder and this environment on every
    node."""
    resources = [f"--num-cpus={job.ray_cpus}", f"--num-gpus={job.gpus}"]
    return {
        "nodes": str(job.num_nodes),
        "folder": shlex.quote(str(job.folder)),
        "bin": shlex.quote(str(job.bin_dir)),
        "launch": shlex.join(job.launch(recipe=job.loaded.source)),
        "run": shlex.quote(str(Path(job.run_dir).expanduser() / job.name)),
        "start_s": str(math.ceil(job.loaded.recipe.machine.start_timeout_s)),
        "resources": " ".join(resources),
    }


def slurm_values(job: Job) -> dict[str, str]:
    """Return the shared values and SLURM's own: devices, memory, time and a signal before the
    end."""
    forecast, lines = job.plan.forecast, []
    if job.gpus:
        lines.append(f"#SBATCH --gres=gpu:{job.gpus}")
    if job.share == 1.0:
        lines += ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    else:
        node = job.machine.nodes[0]
        lines += [
            f"#SBATCH --cpus-per-task={math.floor(node.cpu_cores * job.share)}",
            f"#SBATCH --mem={math.floor(node.memory_bytes * job.share / GIB)}G",
        ]
    notice_s = SHORTEST_NOTICE_S
    if forecast:
        notice_s = max(SHORTEST_NOTICE_S, math.ceil(2 * forecast.step_s) + SAVE_S)
        run_s = forecast.step_s * job.plan.steps
        minutes = math.ceil(min(LONGEST_S, 2 * run_s + START_S) / 60)
        lines += [
            f"# {job.plan.steps} steps are estimated at {format_duration(run_s)}: twice that and "
            "half an hour, a day at most",
            f"#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00",
        ]
    return {
        **shared_folder_values(job),
        "job": job.label,
        "sbatch": "\n".join(lines),
        "notice_s": str(notice_s),
    }
