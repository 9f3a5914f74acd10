"""The check `sandbox`: whether code of a model can be contained here, and by what. It is tried;
where no recipe runs such code, nothing fails."""

from __future__ import annotations

from milescli.core.errors import MachineError
from milescli.doctor.finding import Finding, fail, ok, skip, warn
from milescli.recipe.schema import Recipe
from milescli.sandbox.choose import choose


def check_sandbox(recipe: Recipe | None) -> list[Finding]:
    """Where the driver is: there rewards are computed."""
    runs_code = recipe is not None and recipe.runs_code
    packages = recipe.rollout.code.packages if recipe is not None and runs_code else None
    try:
        choice = choose(packages=packages)
    except MachineError as error:
        if runs_code:
            return fail("sandbox", error.what, why=error.why, fix=error.fixes)
        return skip("sandbox", f"no code of a model is run; it could not be here: {error.why}")
    what = choice.reason.partition(";")[0]
    if runs_code and choice.fixes:
        return warn("sandbox", what, why=choice.reason, fix=list(choice.fixes))
    return ok("sandbox", choice.reason)
