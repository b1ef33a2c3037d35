"""Command line: ``python -m cute_ops_torch build-extension``."""

from __future__ import annotations

import argparse
import sys

from cute_ops.errors import CacheError, CompileError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cute_ops_torch", description="cute_ops for PyTorch.")
    commands = parser.add_subparsers(required=True)
    commands.add_parser(
        "build-extension",
        help="build the C++ extension, which makes calls cheaper on the host, for the torch that is installed",
    )
    parser.parse_args(arguments)
    from cute_ops_torch.host import extension

    try:
        print(extension.build())
    except (CompileError, CacheError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
