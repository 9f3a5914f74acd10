"""Are the kernels there that a device is computed with: on CUDA SGLang's, built for this torch, and
TransformerEngine's for the trainer, which can do without; on a CPU ours, compiled for it, without
which runs are slower."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from milescli.backends.sglang.launch.kernels import PACKAGE, Kernels, kernels
from milescli.doctor.finding import Finding, fail, ok, skip, warn
from milescli.doctor.fixes import pip_install
from milescli.platform.cpu_kernel_library import NoKernels, loaded
from milescli.platform.machine import Machine


def check_kernels(
    machine: Machine, *, there: Kernels | None = None, has_engine: bool | None = None
) -> list[Finding]:
    """Findings `kernels` and `layers`. `there`, `has_engine`: what is installed, looked up where
    they are not given."""
    if machine.kind == "cpu":
        return check_compiled()
    if machine.kind != "cuda":
        return skip("kernels", "SGLang's CUDA kernels are for NVIDIA's devices")
    if has_engine is None:
        has_engine = importlib.util.find_spec("transformer_engine") is not None
    layers = (
        "TransformerEngine computes the trainer's layers"
        if has_engine
        else "no TransformerEngine: the trainer's layers are computed by PyTorch's kernels"
    )
    return _judge(there or kernels()) + ok("layers", layers)


def check_compiled() -> list[Finding]:
    """Finding `kernels` of a CPU; compiles them where nobody has yet, for a second."""
    try:
        library = loaded()
    except NoKernels as error:
        why = f"{error}; rollout and training use PyTorch's own calls, which are slower"
        return warn("kernels", "none for this CPU", why=why, fix=error.fix)
    return ok("kernels", f"compiled for this CPU, in {Path(library._name).parent}")


def _judge(there: Kernels) -> list[Finding]:
    what = f"{PACKAGE} {there.installed or 'is missing'}, torch {there.torch}"
    if there.fit:
        return ok("kernels", f"{what}: tested together")
    if there.tested is None:
        why = f"no kernels were tested with torch {there.torch}"
        return warn(
            "kernels", what, why=why, fix="miles doctor   # its finding `engine` tries them"
        )
    why = f"kernels are built for one torch; those of torch {there.torch} are {there.tested}"
    return fail(
        "kernels", what, why=why, fix=pip_install("--no-deps", f"{PACKAGE}=={there.tested}")
    )
