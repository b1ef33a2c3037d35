"""Rows of a linear layer a chunk at a time: :class:`cute_ops.composite.chunks.Chunks` in torch.

Arrays are written in place: the logits of all chunks lie in one place, each sum of gradients in another. If all rows
are one chunk, products make their results: the host needs fewer calls, and no memory outlives what lies in it. Rows
whose targets are ignored, those of prompts, of padding and of tokens that are not masked, can be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.overrides import handle_torch_function

from cute_ops.composite import chunks
from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops.ops.gemm.linear import linear, linear_dx
from cute_ops_torch.library.tensors import DTYPES

Tensor = torch.Tensor
State = TypeVar("State")
Inputs: TypeAlias = Mapping[str, Any]
Call = Callable[..., Inputs]
_linear = torch._C._nn.linear
# Plans a call of an op that is registered; gives None where its kernels do not take the tensors.
planned: dict[Op, Callable[[Sequence[Any], Sequence[Any]], Any]] = {}
_AUTO, _HALF = {"fused": "auto"}, (torch.bfloat16, torch.float16)
# Bytes that rows of logits begin at multiples of, and of which products take multiples: cuBLAS multiplies 50257 classes
# four to six times as long as 50256, which is why the others are a product of their own.
_ALIGNMENT = 16
# The part of rows that count from which on moving them costs about what their product saves.
_MOST_KEPT = 0.75
# Rows that are kept are a multiple of this part of all, and of a product's tile: each number of rows is a plan of its
# own on the host, and a mask's number varies from step to step.
_STEPS = 64


class Chunks:
    """The chunks of a call.

    Args:
        inputs: hidden, weight, bias and what else has rows, by name; those of another head with a word before each.
        attrs: ``accum_dtype`` and ``chunk_rows``, 0 where the heuristic chooses; ``skip_ignored``, whether rows with
            the target ``ignore_index`` may be left out.
        wanted: the gradients to sum up.
        share: whether the gradient of the hidden states may share an array with the logits.
        largest: where ranks share the classes, the most that one has: all must have the same chunks.
        call: runs an op, as a program's; a product that makes a result is ours then, where that is faster.

    Attributes:
        rows: how many there are, with those that are left out.
        kept: the places of the rows that are not; see :func:`find_kept`. None where all are taken.
        slices: the rows of each chunk.
        sums_apart: whether the weight's gradient is summed in a float32 tensor of its own and rounded at the end.
        spare: memory for logits; None where there is none yet.
        pitch: elements from one row of logits to the next.
        whole: how many of the classes are a multiple of what products are fast for.
        alone: whether one product of all rows makes each result.
        wanted: the gradients to sum up.
        heads: the words before the names of each head.
    """

    def __init__(
        self, inputs: Mapping[str, Any], attrs: Mapping[str, Any], wanted: Collection[str], share: bool = False,
        largest: int = 0, call: Call | None = None,
    ) -> None:  # fmt: skip
        self.rows: int = inputs["hidden"].shape[0]
        self.kept = _rows_that_count(inputs, attrs)
        self.inputs: Inputs = {name: self._of_kept(name, array) for name, array in inputs.items()}
        inputs = self.inputs
        self.hidden: Tensor = inputs["hidden"]
        self.weight: Tensor = inputs["weight"]
        self.bias: Tensor | None = inputs["bias"]
        self._call = _of_kernels(call, self.hidden)
        rows, width = self.hidden.shape
        classes, step = self.weight.shape[0], max(_ALIGNMENT // self.hidden.dtype.itemsize, 1)
        self.pitch: int = -(-classes // step) * step
        self.whole: int = classes // step * step or classes
        # Of what all ranks know: with other chunks they would wait for each other.
        most = -(-(largest or classes) // step) * step
        self.heads = [name.removesuffix("hidden") for name in inputs if name.endswith("hidden")]
        sizes = rows, width, len(self.heads) * most, self.hidden.dtype.itemsize
        asked: int = attrs["chunk_rows"]
        self.accum: str = attrs["accum_dtype"]
        apart = "dweight" in wanted and _dtype_of_sums(self.accum) != self.weight.dtype
        self.wanted = wanted
        shared, self.slices = 0, self._of_rows(asked or chunks.rows_per_chunk(*sizes))
        if not (asked or largest):
            shared, self.slices = self._plan(sizes, share and "dhidden" in wanted, apart)
        self.sums_apart = apart and len(self.slices) > 1
        self.alone = len(self.slices) == 1 and self.whole == self.pitch == classes
        shared = 0 if self.alone else shared
        self.spare = self.hidden.new_empty(shared) if shared else None
        self.chooses = apart and not (asked or largest)

    def _plan(self, sizes: tuple[int, int, int, int], share: bool, apart: bool) -> tuple[int, Sequence[slice]]:
        """The elements of an array that logits share with the gradient of the hidden states, 0 where they do not, and
        the rows of each chunk. ``apart``: several chunks sum the weight's gradient in a float32 tensor of its own.
        """
        least = not apart and "dweight" in self.wanted
        shared, slices = chunks.plan_shared(*sizes, least) if share else (0, self.slices)
        size = chunks.rows_beside_sum(sizes[0], self._fitting(), sizes[-1]) if apart else 0
        return (0, self._of_rows(size)) if size and -(-sizes[0] // size) <= len(slices) else (shared, slices)

    def _of_kept(self, name: str, array: Tensor | None) -> Tensor | None:
        if self.kept is None or array is None or name in ("weight", "bias", "count"):
            return array
        return self.kept.targets if name == "target" else take_rows(array, self.kept.places)

    def _of_rows(self, size: int) -> Sequence[slice]:
        count = self.hidden.shape[0]
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _new_sums(self, wanted: Collection[str]) -> dict[str, Tensor]:
        hidden, weight = self.hidden, self.weight
        found: dict[str, Any] = {}
        made = self._made()
        if made:  # by products
            found |= {name: None for name in ("dhidden", "dweight") if name in wanted}
        if "dhidden" in wanted and not made:
            memory = hidden.new_empty(hidden.shape) if self.spare is None else self.spare[: hidden.numel()]
            found["dhidden"] = memory.view(hidden.shape)
        if "dweight" in wanted and not made:
            self.dweight = torch.empty_like(weight)
            found["dweight"] = self.dweight if hidden.shape[0] else self.dweight.zero_()
            if self.sums_apart:
                found["dweight"] = torch.empty_like(weight, dtype=torch.float32)
                if self.spare is None and max(s.stop - s.start for s in self.slices) <= self._fitting():
                    # Until the sum is rounded, logits may take the place of the result.
                    self.spare = self.dweight.as_strided((weight.numel(),), (1,))
        if self.bias is not None and "dbias" in wanted:
            found["dbias"] = torch.zeros_like(self.bias, dtype=torch.float32)
        return found

    def _made(self) -> bool:
        """Whether gradients are what products return, which is compact."""
        return self.alone and self.weight.is_contiguous()

    def _fitting(self) -> int:
        """The rows of all heads' logits that fit the memory of the weight's gradient."""
        return self.weight.numel() // max(self.pitch * len(self.heads), 1)

    def each(self, state: State, body: Callable[[State, slice], State]) -> State:
        for at in self.slices:
            state = body(state, at)
        return state

    def new_rows(self) -> Tensor:
        return self.hidden.new_empty(self.hidden.shape[:1], dtype=torch.float32)

    def of_chunk(self, op: Op, inputs: Inputs, attrs: Inputs, at: slice) -> tuple[Inputs, Inputs]:
        return inputs, attrs

    def all_rows(self, array: Tensor) -> Tensor:
        return array if self.kept is None else put_rows(array, self.kept.places, self.rows)

    def cut(self, name: str, at: slice) -> Tensor:
        rows: Tensor = self.inputs[name][at]
        return rows

    def put(self, array: Tensor, at: slice, rows: Tensor) -> Tensor:
        if len(self.slices) == 1:  # of all rows: no copy
            return rows
        array[at] = rows
        return array

    def logits(self, at: slice, head: str = "") -> Tensor:
        """In the same memory for all chunks: at the end of what is spare, where there is any, another head's at its
        beginning.
        """
        hidden, weight, bias = (self.inputs[f"{head}{name}"] for name in ("hidden", "weight", "bias"))
        if self.alone and self._call and bias is None:
            return self._call(linear, {"x": hidden, "weight": weight}, _AUTO)["out"]  # type: ignore[no-any-return]
        if self.alone:
            return _linear(hidden, weight, bias)
        shape = at.stop - at.start, self.pitch
        size = math.prod(shape)
        if self.spare is None:
            self.spare = self.hidden.new_empty(size * len(self.heads))
        step = chunks.TILE if len(self.heads) == 1 else math.gcd(self.pitch, chunks.TILE)
        start = 0 if head else (self.spare.numel() - size) // step * step
        logits = self.spare[start : start + size].view(shape)
        if self.pitch > self.weight.shape[0]:
            logits = logits[:, : self.weight.shape[0]]
        rows = hidden[at]
        if bias is None and self._call and self.whole == self.weight.shape[0]:
            return self._multiplied(self._call, rows, weight, logits)
        return put_logits(logits, rows, weight, bias, self._parts())

    @staticmethod
    def _multiplied(call: Call, rows: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        """``logits``, filled by our kernel where that is faster."""
        if type(rows) is Tensor:
            return product_into(rows, weight, logits)
        call(linear, {"x": rows, "weight": weight}, _AUTO)  # of fake ones, so that its kernel is compiled ahead
        return logits

    def _parts(self) -> Sequence[slice]:
        return parts(self.weight.shape[0], self.whole)

    def sums(self) -> dict[str, Tensor]:
        return self._new_sums(self.wanted)

    def put_product(self, array: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        if self._made() and self._call:
            return self._call(linear_dx, {"dout": a, "weight": b}, _AUTO)["dx"]  # type: ignore[no-any-return]
        if self._made():
            return torch.mm(a, b)
        # Rounded once: the large product is added to the small one before it is stored.
        first, *others = self._parts()
        out = torch.mm(a[:, first], b[first], out=array[at])
        for part in others:
            out.addmm_(a[:, part], b[part])
        return array

    def add_product(self, total: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        """The first product overwrites the total."""
        if self._made():
            return torch.mm(a, b)
        for part in self._parts():
            add_product(total[part], at.start == 0, a[part], b)
        return total

    def add_rows(self, total: Tensor, at: slice, rows: Tensor) -> Tensor:
        return total.add_(rows.sum(0, dtype=torch.float32))

    def rounded(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: total if name == "dweight" else total.to(self.hidden.dtype) for name, total in sums.items()}
        if self.sums_apart:
            found["dweight"] = self.dweight.copy_(sums["dweight"])
        if "dhidden" in found:
            found["dhidden"] = self.all_rows(found["dhidden"])
        return found


def parts(classes: int, whole: int) -> Sequence[slice]:
    """The classes in one part or two: the last few, if only so many are a ``whole`` multiple, come first."""
    return [slice(None)] if whole == classes else [slice(whole, classes), slice(0, whole)]


def put_logits(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, parts: Sequence[slice]) -> Tensor:
    """``rows @ weight.T + bias``, in parts of the classes."""
    for part in parts:
        if bias is None:
            torch.mm(rows, weight[part].t(), out=out[:, part])
        else:
            torch.addmm(bias[part], rows, weight[part].t(), out=out[:, part])
    return out


def add_product(total: Tensor, first: bool, a: Tensor, b: Tensor) -> Tensor:
    """``total += a @ b``, rounded once to the dtype of the total, which the ``first`` product overwrites."""
    if total.dtype == a.dtype:
        return torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    if total.is_cuda:
        wide: dict[str, Any] = {"out_dtype": total.dtype, "out": total}
        return torch.mm(a, b, **wide) if first else torch.addmm(total, a, b, **wide)
    product = a.to(total.dtype) @ b.to(total.dtype)  # `out_dtype` is for CUDA only
    return total.copy_(product) if first else total.add_(product)


def _dtype_of_sums(accum: str) -> torch.dtype:
    return torch.float32 if accum == chunks.AUTO else DTYPES[accum]


def product_into(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``x @ weight.T`` in memory that is given, by our kernel where that is faster. To modes it is one function."""
    if torch._C._len_torch_function_stack():
        made: Tensor = handle_torch_function(product_into, (x, weight, out), x, weight, out)
        return made
    # Our kernel copies rows that do not begin at vectors, which cuBLAS reads.
    vectors = all(t.stride(1) == 1 and not (t.stride(0) * t.itemsize | t.data_ptr()) % _ALIGNMENT for t in (x, weight))
    writable = vectors and out.is_contiguous() and not out.data_ptr() % _ALIGNMENT
    kernel = planned[linear]((x, weight), [*_AUTO.values()]) if writable else None
    if kernel is None:
        return torch.mm(x, weight.t(), out=out)
    kernel.fill(("out",))(x, weight, out)
    torch.autograd.graph.increment_version(out)
    return out


def _of_kernels(call: Call | None, like: Tensor) -> Call | None:
    """``call`` where our kernels multiply tensors like this one."""
    return call if like.is_cuda and like.dtype in _HALF else None


class Kept(NamedTuple):
    """Rows that are kept.

    Attributes:
        places: their indices, of which none occurs twice but for the number of all rows, which stands for any row.
        targets: their targets; what stands for any row is ignored.
    """

    places: Tensor
    targets: Tensor


def _rows_that_count(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Kept | None:
    """Find them if others may be skipped and they are few. The host waits for their number, but not where the last call
    of as many rows took all of them: then this one does, too. A CUDA graph, which cannot wait, takes all rows.
    """
    if not attrs.get("skip_ignored") or (inputs["target"].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    target, ignored = inputs["target"], attrs["ignore_index"]
    rows, number = target.numel(), (target != ignored).sum()
    if type(number) is Tensor:  # a fake one, of kernels that are compiled ahead, never arrives
        key = target.device, rows, ignored
        last, number = _last.get(key), OnItsWay(number)
        make_room(_last)
        _last[key] = number
        if last is not None and not kept_size(rows, int(last)):
            return None
    size = kept_size(rows, int(number))
    return find_kept(target, ignored, size) if size else None


class OnItsWay:
    """A number on its way to the host."""

    def __init__(self, number: Tensor) -> None:
        self._number, self._event = number.to("cpu", non_blocking=True), None
        if number.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(number.device))

    def __int__(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


_last: dict[tuple[torch.device, int, int], OnItsWay] = {}  # how many rows of the last calls count, by their kind


def kept_size(rows: int, count: int) -> int:
    """How many rows to keep where ``count`` of them count; 0 for all of them."""
    step = max(chunks.TILE, (1 << max(rows - 1, 0).bit_length()) // _STEPS)
    size = -(-max(count, 1) // step) * step
    return size if size <= _MOST_KEPT * rows else 0


def find_kept(target: Tensor, ignore_index: int, size: int) -> Kept:
    """``size`` rows with all that count, in order."""
    rows, counts = target.numel(), target != ignore_index
    place = torch.where(counts, counts.cumsum(0) - 1, size)
    order = torch.arange(rows, device=target.device)
    places = order.new_full((size + 1,), rows).scatter_(0, place, order)[:size]
    return Kept(places, target.new_full((size + 1,), ignore_index).scatter_(0, place, target)[:size])


def rows_in_saved(saved: int, hidden: Tensor, weight: Tensor) -> int | None:
    """Rows of a chunk whose logits fit half of the elements that layers before the loss have not ``saved`` for their
    backward, which needs them again; None where that is no more than a chunk has anyway.
    """
    classes, width = weight.shape
    rows = min(saved // 2 // max(classes, 1), chunks.MAX_ROWS) // chunks.TILE * chunks.TILE
    sums = weight.requires_grad and weight.dtype != torch.float32
    beside = chunks.rows_beside_sum(math.prod(hidden.shape[:-1]), width, weight.dtype.itemsize) if sums else 0
    return rows if rows > beside and rows * classes > chunks.LOGITS_PER_HIDDEN * hidden.numel() else None


def take_rows(x: Tensor, places: Tensor) -> Tensor:
    return x.index_select(0, places.clamp(max=x.shape[0] - 1))


def put_rows(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """The inverse of :func:`take_rows`, with zeros in the other rows."""
    return x.new_zeros(rows + 1, *x.shape[1:]).index_copy_(0, places, x)[:rows]
