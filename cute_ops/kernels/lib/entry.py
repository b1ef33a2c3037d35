"""The function that every kernel is exported as."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


class Entry:
    """Takes the present arguments and the stream, and calls the kernel with the arguments at its ``places``, None for
    absent ones. A tensor whose contiguous dim is not its last arrives with that dim last and is passed on as declared.

    Nothing is launched if the first tensor has no memory or no element: such a call only loads the module, which is how
    :func:`cute_ops.jit.loader.preload` gets it onto a device ahead of time.
    """

    def __init__(self, kernel: Any, places: tuple[int | None, ...], orders: dict[int, tuple[int, ...]]) -> None:
        """``orders``: by place, the declared dims in the order of arrival if that differs from the declared order."""
        self.kernel = kernel
        self.places = places
        self.orders = orders

    @cute.jit
    def __call__(self, *arguments):
        full = [None if place is None else self._declared(arguments[place], place) for place in self.places]
        # A vector has no rows that could be zero: only its address tells such a call.
        if arguments[0].iterator.toint() != 0 and cute.size(arguments[0]) > 0:
            self.kernel(*full, arguments[-1])

    def _declared(self, argument, place):
        """An argument with its dims in declared order."""
        order = self.orders.get(place)
        if order is None:
            return argument
        dims = [order.index(i) for i in range(len(order))]
        return cute.make_tensor(argument.iterator, cute.select(argument.layout, mode=dims))
