import os, signal, time
from pathlib import Path
import pytest
IDS = [l for l in Path(os.environ["IDS"]).read_text().splitlines() if l]
LIMIT = int(os.environ.get("TEST_LIMIT", "70"))
LOG = open(os.environ["LOG"], "a", buffering=1)
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    place = {i: n for n, i in enumerate(IDS)}
    kept = [i for i in items if i.nodeid in place]
    kept.sort(key=lambda i: place[i.nodeid])
    LOG.write(f"# collected {len(items)} kept {len(kept)} of {len(IDS)}\n")
    items[:] = kept
def _late(*_): raise TimeoutError(f"test took {LIMIT} s")
signal.signal(signal.SIGALRM, _late)
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    signal.alarm(LIMIT); start = time.time()
    yield
    signal.alarm(0)
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        LOG.write(f"{report.outcome}\t{report.duration:.2f}\t{report.nodeid}\n")
