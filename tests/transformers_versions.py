"""Run the tests of ``patch`` with several versions of transformers, each installed into a folder of its own.

    python tests/transformers_versions.py [VERSION ...] [--folder FOLDER]

Without versions: those that the project claims. It installs what the environment lacks for them from the package index,
into a temporary folder or into FOLDER, which the next run then uses again. It fails if any test does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The oldest version that is claimed, and the newest; between them where Hugging Face's models changed.
VERSIONS = ("5.0.0", "5.17.0", "5.23.0", "5.24.0")
TESTS = [f"tests/torch/test_torch_{name}.py" for name in ("patching", "recognising", "patch_report", "patch_families")]
_COUNTS = ("passed", "failed", "error", "skipped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, help="where to install, and what to use again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = [_run(one, (arguments.folder or Path(temporary)) / one) for one in arguments.versions]
    print(f"\n{'transformers':14}" + "".join(f"{name:>9}" for name in (*_COUNTS, "seconds")))
    for one, counts, seconds, _ in rows:
        print(f"{one:14}" + "".join(f"{counts.get(name, 0):9}" for name in _COUNTS) + f"{seconds:9.0f}")
    return int(any(code != 0 for *_, code in rows))


def _run(wanted: str, folder: Path) -> tuple[str, dict[str, int], float, int]:
    """Install one version and run the tests with it: its name, what was counted, seconds, and pytest's exit status."""
    print(f"transformers {wanted}", flush=True)
    if not (folder / "transformers").exists():
        # Its own dependencies too: versions differ in the huggingface_hub that they take. NumPy stays ours.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, f"transformers=={wanted}", f"numpy=={version('numpy')}"], check=True)
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.perf_counter()
    # Proves that the tests see this version, whatever else is installed.
    check = f"import transformers; assert transformers.__version__ == {wanted!r}, transformers.__version__"
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(pytest, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(ran.stdout, flush=True)
    last = ran.stdout.rstrip().rpartition("\n")[2]
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    return wanted, counts, time.perf_counter() - start, ran.returncode


if __name__ == "__main__":
    sys.exit(main())
