"""`python -m milescli` is `miles`."""

from milescli.commands.app import run

if __name__ == "__main__":
    run()
