"""The ``cute-ops`` command: ``python -m cute_ops`` by a shorter name."""

import runpy


def main() -> None:
    runpy.run_module("cute_ops", run_name="__main__", alter_sys=True)
