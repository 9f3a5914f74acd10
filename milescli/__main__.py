"""`python -m milescli` is `miles`."""

import sys

from milescli.commands.app import main

if __name__ == "__main__":
    sys.exit(main())
