"""What `miles` and `python -m milescli` run."""

import sys

from milescli.core.imports import run_gc_rarely


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    run_gc_rarely()  # before the verbs, torch and Ray are imported
    from milescli.commands.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
