"""Print how many statements of each room of the core the last ``make test COVERAGE=1`` ran.

Worker processes are not measured, and of kernels only what the tests' interpreter runs.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[1]


def main() -> None:
    measured = Coverage(config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in sorted((ROOT / "cute_ops").rglob("*.py")):
        _, statements, _, missing, _ = measured.analysis2(str(path))
        rooms[room_of(path)][0] += len(statements)
        rooms[room_of(path)][1] += len(missing)
    rooms["all"] = [sum(column) for column in zip(*rooms.values(), strict=True)]
    print(f"{'room of cute_ops':24}{'statements':>12}{'run':>8}")
    for room, (count, missed) in rooms.items():
        if count:
            print(f"{room:24}{count:12}{1 - missed / count:8.1%}")


def room_of(path: Path) -> str:
    """The folder in the package, of kernels and ops the family; modules at the top are one room."""
    parts = path.relative_to(ROOT / "cute_ops").parts[:-1]
    return "/".join(parts) or "top"


if __name__ == "__main__":
    main()
