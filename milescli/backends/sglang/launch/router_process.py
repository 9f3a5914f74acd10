"""The router's process: `python -m milescli.backends.sglang.launch.router_process ...`, with the
arguments of sglang-router.

The package's own launcher does the same, but imports SGLang on the way: 5 s, and it breaks beside a
CPU build of torch."""

from __future__ import annotations

import argparse


def main() -> None:
    """Serve until a signal ends the process."""
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    from milescli.backends.sglang.launch import key

    parser = argparse.ArgumentParser(prog="miles-router")
    RouterArgs.add_cli_args(parser)
    arguments = RouterArgs.from_cli_args(parser.parse_args())
    arguments.api_key = key.take()
    Router.from_args(arguments).start()


if __name__ == "__main__":
    main()
