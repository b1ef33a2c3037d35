"""Dims that are expressions, drawn at random: as text, as sizes, and solved for the one name that is not known."""

from __future__ import annotations

import math
import random
from itertools import count, pairwise

from cute_ops.declaration.dims import Dim, parse


def draw(rng: random.Random) -> Dim:
    names = tuple(rng.sample("abc", rng.randint(0, 3)))
    if not names:
        return Dim(rng.randint(1, 9))
    divisor = rng.choice((1, 1, 2, 3, 128))
    return Dim(rng.choice((1, 1, 2, 3)), names, divisor, rng.random() < 0.5 and divisor > 1, rng.choice((0, 0, 1, -2)))


DRAWN = sorted({draw(random.Random(seed)) for seed in range(400)}, key=str)


def test_a_dim_is_its_text() -> None:
    for dim in DRAWN:
        assert parse(str(dim)) == dim and bool(dim.name) == (str(dim) in dim.names)


def test_solving_undoes_what_a_size_follows_from() -> None:
    rng, solved = random.Random(0), 0
    for dim in DRAWN * 30:
        dims = {name: rng.choice((rng.randint(0, 9), 64 * rng.randint(0, 9))) for name in "abc"}
        size, product = dim.of(dims), dim.factor * math.prod(dims[name] for name in dim.names)
        whole = dim.ceil or product % dim.divisor == 0
        assert bool(dim.wrong(dims)) == (not whole or (size < 0 and dim.offset < 0)), (dim, dims)
        if dim.ceil:
            assert 0 <= (size - dim.offset) * dim.divisor - product < dim.divisor, (dim, dims)
        elif whole:
            assert (size - dim.offset) * dim.divisor == product, (dim, dims)
        for name in dim.names:
            rest = {other: value for other, value in dims.items() if other != name}
            assert dim.of(rest) is None and dim.binds(rest) == ("" if dim.ceil else name)
            if whole and not dim.ceil and size >= 0:
                found = dim.solve(size, rest)
                assert found == dims[name] or (found is None and 0 in rest.values()), (dim, dims)
                solved += found is not None
    assert solved > 1000


def test_a_size_has_one_solution_or_none() -> None:
    for dim in DRAWN:
        if dim.ceil or not dim.names:
            continue
        *known, free = dim.names
        dims, found, fitting = dict.fromkeys(known, 2), {}, {}
        for n in count():
            if (size := dim.of(tried := {**dims, free: n})) >= 60:
                break
            if not dim.wrong(tried):
                fitting[size] = n
        for size in range(60):
            try:
                found[size] = dim.solve(size, dims)
            except ValueError:
                assert size not in fitting, (dim, size)
            else:
                assert fitting[size] == found[size], (dim, size)
        assert found and all(a < b for a, b in pairwise(found.values()))
