"""The fixture ``adapter``: a contract runs once for each of the frameworks that are installed.

A test with the mark ``on_gpus`` also runs with PyTorch's arrays on a GPU; JAX's are there by default.
"""

from __future__ import annotations

import pytest

from tests.contract.adapters import ADAPTERS, Adapter

made: dict[str, Adapter] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "adapter" in metafunc.fixturenames:
        names: list[object] = ["torch", "jax"]
        if metafunc.definition.get_closest_marker("on_gpus"):
            names.append(pytest.param("torch on cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("adapter", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest) -> Adapter:
    if request.param not in made:
        made[request.param] = ADAPTERS[request.param]()
    return made[request.param]
