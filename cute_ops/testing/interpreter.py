"""Runs kernels on a CPU: CuTe DSL's Python objects are NumPy arrays here, of one number per thread.

The threads of a launch are the last axis of every array and run in lock step, so that barriers have nothing to do:
where one is missing is found in launches that are watched, see :mod:`races`, which takes longer. Functions are
rewritten as the DSL rewrites them: an ``if`` on a number of the threads runs both branches, each for its threads.
Memory raises at a load or store that is off its alignment or outside of all tensors, counts how often a byte is stored,
and reads as NaN where nobody has written.
"""

import ast
import inspect
import itertools
import math
import operator
import sys
import textwrap
from contextlib import contextmanager
from functools import cache, lru_cache, partial, reduce, wraps
from types import SimpleNamespace as Names
from typing import NamedTuple

import ml_dtypes
import numpy as np

from cute_ops.hardware import WARP
from cute_ops.testing.races import Order

GAP = 64
MOST_WATCHED = 1 << 21  # threads of a launch that is watched, times those of a cluster
# The threads that run, and how many of them are active; on the host it is one.
now = Names(mask=np.ones(1, bool), active=1, count=1, memory=None, order=None, watched=False, last=None)


class Lanes(np.ndarray):
    """A number per thread, or a vector per thread; one number alone stands for all threads'."""

    width = 0  # no kernel needs it, one puts it into the name of an instruction
    shape = property(lambda self: np.ndarray.shape.__get__(self)[:-1])

    def to(self, kind):
        return kind(self)

    # Numbers of the DSL do not change in place, and one number becomes one for each thread.
    __iadd__, __isub__, __imul__, __itruediv__ = (
        np.ndarray.__add__,
        np.ndarray.__sub__,
        np.ndarray.__mul__,
        np.ndarray.__truediv__,
    )

    def bitcast(self, kind):
        return np.ascontiguousarray(self).view(kind.dtype).view(Lanes)

    def reduce(self, combine, start, _):
        return combine(combine.reduce(self.view(np.ndarray), axis=0), start).view(Lanes)


class Kind:
    """A dtype of the DSL, which called converts to it."""

    inf, nan = math.inf, math.nan

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.size, self.width = self.dtype.itemsize, 8 * self.dtype.itemsize
        self.word, self.shift = np.dtype(f"u{self.size}"), self.size.bit_length() - 1  # sizes are powers of two
        self.each = np.frombuffer(b"\1" * self.size, self.word)[0]  # one in each byte
        self.constant = lru_cache(1024)(lambda x: np.array([x]).astype(self.dtype).view(Lanes))

    def __call__(self, x):
        if type(x) is not int:
            return np.atleast_1d(np.asarray(x)).astype(self.dtype).view(Lanes)
        return self.constant(x).copy()


KINDS = {
    name: Kind(getattr(ml_dtypes, name.lower(), name.lower()))
    for name in (
        "Float64",
        "Float32",
        "Float16",
        "BFloat16",
        "Float8_E4M3FN",
        "Float8_E5M2",
        "Int64",
        "Int32",
        "Int16",
        "Uint64",
        "Uint32",
        "Uint8",
        "Bool",
    )
}
Float32, Int64, Int32, Uint8, FP8 = (KINDS[name] for name in ("Float32", "Int64", "Int32", "Uint8", "Float8_E4M3FN"))


class Memory:
    """Bytes at addresses: global ones, or those of a launch's CTAs, a part each."""

    def __init__(self, size=0):
        self.bytes, self.inside, self.stores = np.full(size, 255, "u1"), np.zeros(size, bool), np.zeros(size, "u1")

    def grow(self, size, parts=1):
        """Room for parts of so many bytes: the first's address, and the way from one to the next."""
        start, step = self.bytes.size, -(-size // GAP) * GAP + GAP
        new = Memory(parts * step)
        new.inside.reshape(parts, step)[:, :size] = True
        for name, array in vars(new).items():
            setattr(self, name, np.concatenate([getattr(self, name), array]))
        return start, step

    def _index(self, address, offsets, kind):
        """Indices of active threads' elements, (elements, threads); one column if all threads have one address."""
        address = np.asarray(address).view(np.ndarray)
        if now.active < now.count:
            address = np.broadcast_to(address, now.count)[now.mask]
        index = (address >> kind.shift) + (offsets >> kind.shift)[:, None]
        if not index.size:
            return index
        first, last = address.min() + offsets.min(), address.max() + offsets.max() + kind.size
        if not (fine := first >= 0 and last <= self.bytes.size and not (address & kind.size - 1).any()):
            pass
        elif last - first <= 8 * index.size * kind.size and self.inside[first:last].all():
            pass  # a few neighbours: all are elements
        else:
            fine = (self.inside.view(kind.word)[index] == kind.each).all()
        if not fine:
            self._refuse(address + offsets[:, None], kind)
        return index

    def _refuse(self, places, kind):
        there = (places >= 0) & (places < self.bytes.size)
        index = np.where(there, places, 0) >> kind.shift
        fine = there & (self.inside.view(kind.word)[index] == kind.each) & (index << kind.shift == places)
        raise IndexError(f"{kind.dtype} at {places[~fine][0]}, off its alignment or outside of all tensors")

    def _note(self, index, kind, store):
        """Tell who watches the launch of an access."""
        places, active = np.zeros((len(index), now.count), int), np.broadcast_to(now.mask, (len(index), now.count))
        places[:, now.mask] = index * kind.size
        now.order.access(self, self is now.shared, places, active, kind.size, store)

    def read(self, address, offsets, kind):
        index = self._index(address, offsets, kind)
        if now.order:
            self._note(index, kind, False)
        values = self.bytes.view(kind.dtype)[index]
        if values.shape[1] == now.count:
            return values.view(Lanes)
        found = np.full((len(index), now.count * kind.size), 255, "u1").view(kind.dtype)
        found[:, now.mask] = values
        return found.view(Lanes)

    def write(self, address, offsets, kind, values):
        index = self._index(address, offsets, kind)
        if now.order:
            self._note(index, kind, True)
        if index.shape[1] < now.active:
            index = np.broadcast_to(index, (len(index), now.active))
        if now.active < now.count:
            values = np.broadcast_to(values, (len(index), now.count))[:, now.mask]
        self.bytes.view(kind.dtype)[index] = values
        np.add.at(self.stores.view(kind.word), index, kind.each)


class Registers:
    """Bytes of a thread's own, at places known at compile time."""

    def __init__(self, size):
        self.bytes = np.full((now.count, size), 255, "u1")

    def _part(self, address, offsets, kind):
        """All elements of a dtype, and which of them these are: a slice where they are neighbours."""
        view, places = self.bytes.view(kind.dtype), (address + offsets) // kind.size
        first, count = int(places[0]), len(places)
        neighbours = count == 1 or (places[-1] - first == count - 1 and (np.diff(places) == 1).all())
        return view, slice(first, first + count) if neighbours else places

    def read(self, address, offsets, kind):
        view, part = self._part(address, offsets, kind)
        return np.array(view[:, part]).T.view(Lanes)

    def write(self, address, offsets, kind, values):
        view, part = self._part(address, offsets, kind)
        if now.active < now.count:
            values = np.where(now.mask, values, view[:, part].T)
        view[:, part] = np.atleast_2d(np.asarray(values)).T


class Pointer(NamedTuple):
    memory: object
    address: object
    kind: Kind
    step: int = 0  # to the same place of the next CTA's shared memory

    def __add__(self, elements):
        return Pointer(self.memory, self.address + elements * self.kind.size, self.kind, self.step)

    def toint(self):
        return Int64(self.address)


class Layout:
    def __init__(self, shape, stride=None):
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        self.stride = stride or tuple(math.prod(self.shape[:i]) for i in range(len(self.shape)))

    def dims(self):
        return zip(self.shape, self.stride, strict=True)


class Known(Names):
    """A module of the DSL, as far as it is known here."""

    def __init__(self, name, /, **known):
        super().__init__(**known)
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{self._name}.{name} is not known to the interpreter")


class Tensor(Layout):
    def __init__(self, pointer, layout):
        super().__init__(*((layout.shape, layout.stride) if isinstance(layout, Layout) else (layout,)))
        self.iterator, self.element_type, self.layout = pointer, pointer.kind, self

    def _at(self, index):
        """The part at an index: None keeps a dim, a number alone counts through all of them."""
        if not isinstance(index, tuple) and len(self.shape) > 1:
            index = tuple(index // math.prod(self.shape[:d]) % n for d, n in enumerate(self.shape))
        places = [*zip(index if isinstance(index, tuple) else (index,), self.shape, self.stride, strict=True)]
        kept = [(n, s) for i, n, s in places if i is None]
        start = sum(steps(i, n, s) for i, n, s in places if i is not None)
        return Tensor(self.iterator + start, Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept)))

    def _access(self):
        """Address, bytes from there to each element, the first dim fastest, and dtype."""
        sizes = self.shape, self.stride, self.element_type.size
        known = all(type(n) is int for n in (*self.shape, *self.stride))
        return self.iterator.address, (offsets_known if known else offsets)(*sizes), self.element_type

    def load(self):
        return self.iterator.memory.read(*self._access())

    def store(self, values):
        self.iterator.memory.write(*self._access(), values)

    def __getitem__(self, index):
        part = self._at(index)
        return part if part.shape else part.load()[0]

    def __setitem__(self, index, value):
        self._at(index).store(value)

    fill = store


def offsets(shape, stride, each):
    """Bytes from the first element to every one."""
    found = np.zeros(1, int)
    for size, step in zip(shape, stride, strict=True):
        found = (np.arange(size)[:, None] * step + found).ravel()
    return found * each


offsets_known = lru_cache(4096)(offsets)


class Identity(Layout):
    """A tensor of its own coordinates, of one dim, and what is cut from it."""

    iterator = 0

    def __getitem__(self, index):
        return (self.iterator + sum(i * s for i, s in zip(index, self.stride, strict=True)),)


class Threads(NamedTuple):
    """A thread of those that lie side by side, with so many elements each."""

    threads: int
    vec: int
    t: object = None

    def get_slice(self, t):
        return self._replace(t=t)

    def partition_S(self, tile):
        across = self.threads * self.vec
        return part(tile, self.t * self.vec, (self.vec, -(-tile.shape[0] // across)), (1, across))

    partition_D = partition_S


def part(tile, start, shape, stride):
    """A tile that begins ``start`` elements past the beginning of another."""
    if isinstance(tile, Tensor):
        return Tensor(tile.iterator + start, Layout(shape, stride))
    found = Identity(shape, stride)
    found.iterator = tile.iterator + start
    return found


def local_tile(x, tiler, place):
    (size,), (index,) = tiler, place
    return part(x, index * size, (size,), (1,))


def group_modes(layout, begin, end):
    """Dims as one, which are counted together."""
    joined = [(*values[:begin], tuple(values[begin:end]), *values[end:]) for values in (layout.shape, layout.stride)]
    return Layout(*joined)


def steps(i, shape, stride):
    """How far the i-th element of a dim lies from the first one, or of dims that are counted as one."""
    if not isinstance(shape, tuple):
        return i * stride
    start = 0
    for size, step in zip(shape[:-1], stride[:-1], strict=True):
        start, i = start + i % size * step, i // size
    return start + i * stride[-1]


def copy(atom, source, target, pred=None):
    with masked(True if pred is None else pred.load()[0]):
        values = source.load()
        if atom == "cp.async" and now.order:
            now.copies.append((now.groups.copy(), now.mask.copy(), target, values))
            values = np.full(values.view(np.ndarray).shape, np.nan, values.dtype).view(Lanes)
        target.store(values)


def commit_group():
    if now.order:
        now.groups[now.mask] += 1


def wait_group(pending):
    """Complete the copies of the active threads, except those of the last ``pending`` groups."""
    if not now.order:
        return
    for group, mask, target, values in now.copies:
        done = mask & now.mask & (group < now.groups - pending)
        if done.any():
            with masked(done):
                target.store(values)
            mask &= ~done
    now.copies = [copied for copied in now.copies if copied[1].any()]


class Tiles(Tensor):
    """A tensor cut into tiles: ``tiles[None, i]`` is the i-th, counted through the dims of :attr:`rest`."""

    def __init__(self, tensor, tiler):
        super().__init__(tensor.iterator, tensor)
        self.tile = Layout(tiler, tensor.stride)
        steps = zip(tensor.dims(), tiler, strict=True)
        self.rest = Tensor(tensor.iterator, Layout(*zip(*((n // t, s * t) for (n, s), t in steps), strict=True)))
        self.shape = tiler, self.rest.shape

    def _at(self, index):
        return Tensor(self.rest._at(index[1]).iterator, self.tile)


def nested(shape, mode):
    """A mode of a shape; of a number the number itself."""
    return shape[mode] if isinstance(shape, tuple) else shape


def count(shape):
    """Elements of a shape, or of a part of one, which may be a tuple again."""
    return math.prod(map(count, shape)) if isinstance(shape, tuple) else shape


def make_ptr(kind, address, space="gmem", assumed_align=1):
    if assumed_align > 1 and (now.mask & (address % assumed_align != 0)).any():
        raise IndexError(f"addresses of {kind.dtype} off their alignment of {assumed_align} bytes")
    return Pointer(now.memory if space == "gmem" else now.shared, address, kind)


def allocate(count, _=16, kind=Uint8):
    start, step = now.shared.grow(count * kind.size, now.count // now.threads)
    return Pointer(now.shared, Int64(start + now.cta * step), kind, step)


def shuffle(value, lane):
    """The value of another lane of the warp; a lane's own where there is no such lane."""
    there = now.tidx - now.lane + lane < now.threads
    return shuffled(value, now.every - now.lane + np.where(there, lane, now.lane))


def shuffled(value, source):
    """Each thread's value from another thread of its warp."""
    if now.active < now.count and (now.mask != now.mask[now.every - now.lane]).any():
        raise RuntimeError("a warp exchanges numbers while some of its threads are elsewhere")
    told("shuffle")
    return np.broadcast_to(value, (now.count,))[source].view(Lanes)


def across(offset):
    """Of each thread the one whose lane differs from its own in these bits; its own where there is none."""
    if offset not in now.across:
        lane = now.lane ^ offset
        now.across[offset] = now.every + np.where(now.tidx - now.lane + lane < now.threads, lane - now.lane, 0)
    return now.across[offset]


def warp_reduction(value, combine, threads_in_group=WARP):
    for i in reversed(range(threads_in_group.bit_length() - 1)):
        value = combine(value, shuffled(value, across(1 << i)))
    return value


def inline_ptx(code, read_only_args, write_only_types=None, predicate=None):
    if code.startswith("mov."):
        return read_only_args[0]
    if code.startswith("st.async"):
        now.shared.write(read_only_args[0], np.zeros(1, int), Float32, read_only_args[1])
        return told("arrive", read_only_args[2], 0, -Float32.size)
    if code[:7] in ("add.rn.", "sub.rn.", "mul.rn."):
        return {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[code[:3]](*map(Float32, read_only_args))
    if code.startswith("max.NaN."):
        kind = ml_dtypes.bfloat16 if "bf16x2" in code else np.float16
        a, b = (np.atleast_1d(np.asarray(Int32(x)))[..., None].view(kind).astype(np.float32) for x in read_only_args)
        return plus_zero(kind, np.maximum(a, b).astype(kind).view("i4")[..., 0].view(Lanes))
    if code.startswith("trap"):
        raise RuntimeError("a kernel traps")
    if "setp.gt.s64" in code:
        return tuple(f(*read_only_args) for f in (np.maximum, np.minimum))
    if "fma.rn." in code:
        return plus_zero(ml_dtypes.bfloat16 if "bf16x2" in code else np.float16, *read_only_args)
    if "cvt.rn.satfinite.e" in code:
        kind, most = (FP8, 448) if "e4m3x2" in code else (KINDS["Float8_E5M2"], 57344)
        each = np.stack([np.clip(np.asarray(x), -most, most).astype(kind.dtype) for x in read_only_args], -1)
        return each.view(write_only_types[0].dtype)[..., 0].view(Lanes)
    if not code.startswith("prefetch"):
        raise NotImplementedError(code)


def plus_zero(kind, word):
    """Both halves of a word; the GPU gives every NaN the same bits."""
    found = np.atleast_1d(np.asarray(Int32(word)))[..., None].view(kind) + kind(0)
    found[np.isnan(found)] = np.array(0x7FFF, "i2").view(kind)
    return found.view("i4")[..., 0].view(Lanes)


def atomic_add(pointer, number):
    """The threads take turns in their order."""
    address, old = each(pointer.address), np.zeros(now.count, "i4")
    values = pointer.memory.bytes.view("i4")
    for thread in np.flatnonzero(now.mask):
        old[thread] = values[address[thread] // 4]
        values[address[thread] // 4] += int(each(number)[thread])
    return old.view(Lanes)


@contextmanager
def masked(condition):
    """Whether any thread is left."""
    grid, before = now, (now.mask, now.active)
    if condition is not True:
        grid.mask = before[0] & np.asarray(condition)
        grid.active = np.count_nonzero(grid.mask)
    try:
        yield grid.active > 0
    finally:
        grid.mask, grid.active = before


def branches(condition):
    """The branches of an ``if`` that are taken: 1 or 0 where all threads agree, else 3 and 2, with their threads."""
    if np.size(condition) == 1:
        yield int(bool(condition))
        return
    for branch in (3, 2):
        with masked(condition if branch == 3 else ~condition) as some:
            if some:
                yield branch


def dynamic_range(start, stop=None, step=1, unroll=0):
    start, stop = (0, start) if stop is None else (start, stop)
    for i in itertools.count():
        with masked(start + i * step < stop) as some:
            if not some:
                return
            yield Int32(start + i * step)


def any_range(*bounds):
    """A ``range`` whose bounds may be numbers of the threads."""
    return dynamic_range(*bounds) if dynamic(*bounds) else range(*bounds)


def dynamic(*numbers):
    return any(isinstance(number, Lanes) for number in numbers)


def chosen(condition, then, otherwise):
    """An ``if`` expression: where threads disagree, each evaluates its branch."""
    if np.size(condition) == 1:
        return then() if condition else otherwise()
    values = []
    for branch, mask in ((then, condition), (otherwise, ~condition)):
        with masked(mask) as some:
            values.append(branch() if some else 0)
    return np.where(condition, *values).view(Lanes)


def where(condition, x, y):
    """Elements of two vectors, or of one and a number. Both must have one dtype, as the DSL demands: 0 is an Int32."""
    x, y = (each if isinstance(each, Lanes) else (Int32 if isinstance(each, int) else Float32)(each) for each in (x, y))
    if x.dtype != y.dtype:
        raise ValueError(f"cute.where: x and y must have the same dtype, but got {x.dtype} and {y.dtype}")
    return np.where(condition, x, y).view(Lanes)


def merged(old, new):
    """A variable after some threads have set it; the others keep theirs."""
    if isinstance(new, tuple | list) and type(old) is type(new) and len(old) == len(new):
        return getattr(new, "_make", type(new))(map(merged, old, new))
    numbers = all(isinstance(x, Lanes | int | float) for x in (old, new))
    same = old is new or (not isinstance(old, Lanes) and not isinstance(new, Lanes) and old == new)
    return np.where(now.mask, new, old).view(Lanes) if numbers and not same else new


class Rewrite(ast.NodeTransformer):
    """Statements that threads may disagree on, by the functions above."""

    def _merging(self, body, at):
        """The statements; then every variable that they set is as only active threads have set it."""
        nodes = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
        names = sorted({node.id for node in nodes if isinstance(node.ctx, ast.Store) and node.id[0] != "_"})
        merge = [f"if __{at}: {n} = __dsl.merged(__{at}.get({n!r}), __new.get({n!r}))" for n in names]
        return [*body, *ast.parse("\n".join(["__new = {**locals()}", *merge])).body]

    def visit_If(self, node):
        at = node.lineno
        self.generic_visit(node)
        text = f"for __b in __dsl.branches({ast.unparse(node.test)}):\n __{at} = __b > 1 and {{**locals()}}\n"
        (loop,) = ast.parse(text + " if __b & 1: 0\n else: 0").body
        loop.body[1].body, loop.body[1].orelse = self._merging(node.body, at), self._merging(node.orelse, at)
        return loop

    def visit_For(self, node):
        self.generic_visit(node)
        text, at = ast.unparse(node.iter), node.lineno
        if text.startswith("cutlass.range("):
            node.body = [*ast.parse(f"__{at} = {{**locals()}}").body, *self._merging(node.body, at)]
        elif text.startswith("range("):
            bounds = text.removeprefix("range")
            node.iter = ast.parse(f"__dsl.any_range{bounds}", mode="eval").body
            before = ast.parse(f"__{at} = __dsl.dynamic{bounds} and {{**locals()}}").body
            node.body = [*before, *self._merging(node.body, at)]
        return node

    def visit_IfExp(self, node):
        self.generic_visit(node)
        test, then, other = (ast.unparse(each) for each in (node.test, node.body, node.orelse))
        return ast.parse(f"__dsl.chosen({test}, lambda: {then}, lambda: {other})", mode="eval").body

    def visit_BoolOp(self, node):
        kind = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return reduce(lambda a, b: ast.BinOp(a, kind, b), self.generic_visit(node).values)

    def visit_UnaryOp(self, node):
        opposite = f"__dsl.np.logical_not({ast.unparse(self.generic_visit(node).operand)})"
        return ast.parse(opposite, mode="eval").body if isinstance(node.op, ast.Not) else node


@cache
def jit(function):
    @cache
    def made():
        definition = Rewrite().visit(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0])
        definition.decorator_list = []
        space = function.__globals__ | {"__dsl": sys.modules[__name__]}
        exec(compile(ast.unparse(definition), f"<{function.__module__}.{function.__qualname__}>", "exec"), space)
        return space[function.__name__]

    return wraps(function)(lambda *args, **kwargs: made()(*args, **kwargs))


def launch(run, grid, block, cluster=None, use_pdl=False, **_):
    """Run a kernel; neighbouring CTAs of the second dimension are a cluster, or could be."""
    global now
    host, (columns, rows, planes), threads = now, [int(np.asarray(size).item()) for size in grid], math.prod(block)
    cta, tidx = np.divmod(np.arange(columns * rows * planes * threads), threads)
    across, rank = np.divmod(cta, rows)
    now = Names(
        mask=np.ones(cta.size, bool), active=cta.size, count=cta.size, threads=threads, cta=cta, tidx=tidx, rank=rank,
        grid=grid, dim=block, every=np.arange(cta.size), lane=tidx % WARP, across={},
        memory=host.memory, shared=Memory(), block=(across % columns, rank, across // columns),
        thread=(tidx % block[0], tidx // block[0] % block[1], tidx // (block[0] * block[1])),
        groups=np.zeros(cta.size, int), copies=[], order=None,  # asynchronous copies: committed groups, and each copy
    )  # fmt: skip
    size = threads * (rows if cluster else 1)
    if host.watched and cta.size * size <= MOST_WATCHED:
        known = host.last is not None and host.last.tells
        host.last = now.order = Order(cta.size, threads, size // threads, use_pdl, known)
    try:
        run()
        if now.order:
            now.order.end()
    finally:
        now = host


def each(number):
    """A number for each thread."""
    return np.broadcast_to(np.asarray(number), now.count)


def told(what, pointer=None, *numbers):
    """Report to the :class:`Order`, if there is one, an action that threads in lock step need not take."""
    if now.order:
        address = () if pointer is None else (each(getattr(pointer, "address", pointer)),)
        getattr(now.order, what)(now.mask, *address, *numbers)


def popc(x):
    """Bits of each word that are set."""
    return np.unpackbits(np.ascontiguousarray(x)[..., None].view("u1"), axis=-1).sum(-1, dtype="i4").view(Lanes)


def prmt(a, b, pick):
    """Bytes of two words; with the upper bit of its place each bit of a byte is the sign of the picked one."""
    words, found = Int64(a) & 0xFFFFFFFF | Int64(b) << 32, Int64(0)
    for i in range(4):
        place = Int64(pick) >> 4 * i
        byte = words >> (place & 7) * 8 & 255
        found = found | np.where(place & 8, (byte >> 7) * 255, byte) << 8 * i
    return found.view(Lanes).to(Int32)


lane = lambda: now.lane  # noqa: E731
ARCH = Known(
    "cute.arch",
    fmax=lambda x, y, nan=False: (np.maximum if nan else np.fmax)(x, y),
    fmin=lambda x, y, nan=False: (np.minimum if nan else np.fmin)(x, y),
    warp_reduction=warp_reduction, inline_ptx=inline_ptx, lane_idx=lambda: Int32(lane()),
    grid_dim=lambda: [*map(Int32, now.grid)], thread_idx=lambda: [*map(Int32, now.thread)],
    block_idx=lambda: [*map(Int32, now.block)], block_idx_in_cluster=lambda: Int32(now.rank),
    map_dsmem_ptr=lambda p, peer: p._replace(address=p.address + (peer - now.rank) * p.step),
    shuffle_sync_bfly=lambda x, offset: shuffled(x, across(int(offset))),
    shuffle_sync=lambda x, offset, mask_and_clamp=31: shuffle(  # the upper byte tells a warp's parts from each other
        x, lane() & mask_and_clamp >> 8 | offset & ~(mask_and_clamp >> 8)
    ),
    load=lambda p, kind, **_: Tensor(p._replace(kind=kind), 1)[0],
    warp_redux_sync=lambda x, kind: warp_reduction(x, {"max": np.maximum, "add": np.add}[kind]),
    atomic_add=atomic_add, popc=popc, rcp_approx=lambda x: 1 / Float32(x),
    vote_ballot_sync=lambda x: warp_reduction(Int64(x) << lane(), operator.or_).to(Int32),
    bfind=lambda x: Int32(np.frexp(np.where(x < 0, ~x, x).astype(float))[1] - 1),
    prmt=prmt,
    block_dim=lambda: [*map(Int32, now.dim)], warp_idx=lambda: Int32(now.tidx // WARP), make_warp_uniform=lambda x: x,
    warp_reduction_sum=lambda x, **_: warp_reduction(x, np.add),
    warp_reduction_max=lambda x, **_: warp_reduction(x, np.fmax), sync_threads=lambda: told("barrier"),
    barrier=lambda: told("barrier"), sync_warp=lambda: told("sync_warp"), cluster_wait=lambda: told("cluster_wait"),
    griddepcontrol_wait=lambda: told("wait_for_previous"), mbarrier_init=lambda p, count: told("initialise", p, count),
    mbarrier_arrive_and_expect_tx=lambda p, size: told("arrive", p, 1, size),
    mbarrier_wait=lambda p, parity: told("wait", p, each(parity)),
    cp_async_commit_group=commit_group, cp_async_wait_group=wait_group, cluster_arrive_relaxed=lambda: None,
    griddepcontrol_launch_dependents=lambda: told("let_next_start"), mbarrier_init_fence=lambda: None,
)  # fmt: skip
MATH = Known(
    "cute.math",
    rsqrt=lambda x, **_: 1 / np.sqrt(x), sqrt=lambda x, **_: np.sqrt(x), log=lambda x, **_: np.log(x),
    exp2=lambda x, **_: np.exp2(x), log2=lambda x, **_: np.log2(x),
    exp=lambda x, **_: np.exp(x), absf=np.abs, log1p=np.log1p, tanh=np.tanh,
    floor=np.floor, roundeven=np.rint, sin=np.sin, cos=np.cos, erf=lambda x: Float32(np.vectorize(math.erf)(x)),
)  # fmt: skip
COPIES = Known(
    "cute.nvgpu",
    CopyG2ROp=Names, CopyR2GOp=Names, LoadCacheMode=Names(GLOBAL=0, ALWAYS=0),
    StoreCacheMode=Names(STREAMING=0, WRITE_BACK=0), cpasync=Names(CopyG2SOp=lambda _: "cp.async"),
)  # fmt: skip
CUTE = Known(
    "cute",
    arch=ARCH, math=MATH, nvgpu=COPIES, jit=jit,
    kernel=lambda f: lambda *a: Names(launch=partial(launch, partial(jit(f), *a))),
    Tensor=Tensor, make_layout=Layout, make_tensor=Tensor, make_ptr=make_ptr, coalesce=lambda layout: layout,
    size=lambda x, mode=(slice(None),): count(reduce(nested, mode, getattr(x, "shape", x))),
    rank=lambda x: len(x.shape), full_like=np.full_like, zeros_like=np.zeros_like,
    where=where,
    recast_ptr=lambda p, dtype: p._replace(kind=dtype),
    recast_tensor=lambda x, k: Tensor(x.iterator._replace(kind=k), math.prod(x.shape) * x.element_type.size // k.size),
    make_rmem_tensor=lambda n, k: Tensor(Pointer(Registers(math.prod(n) * k.size), 0, k), n),
    make_copy_atom=lambda op, *_, **__: op, copy=copy, copy_atom_call=copy, local_tile=local_tile,
    group_modes=group_modes,
    make_tiled_copy_tv=lambda _, threads, values: Threads(threads.shape[0], values.shape[0]),
    make_identity_tensor=Identity,
    autovec_copy=lambda source, target: target.store(source.load()), ceil_div=lambda a, b: -(-a // b),
    select=lambda layout, mode: Layout(*(tuple(dims[m] for m in mode) for dims in (layout.shape, layout.stride))),
    zipped_divide=Tiles, crd2idx=lambda place, layout: sum(i * s for i, s in zip(place, layout.stride, strict=True)),
    AddressSpace=Names(gmem="gmem", smem="smem"), ReductionOp=Names(ADD=np.add, MAX=np.fmax), **KINDS,
)  # fmt: skip
SMEM = Names(
    allocate=allocate, allocate_array=lambda kind, count: allocate(count, kind=kind),
    allocate_tensor=lambda k, x, **_: Tensor(allocate(1 + sum((n - 1) * s for n, s in x.dims()), kind=k), x),
)  # fmt: skip
CUTLASS = Known(
    "cutlass",
    cute=CUTE, utils=Names(SmemAllocator=lambda: SMEM), const_expr=lambda x: x, Constexpr=None,
    range=dynamic_range, dynamic_expr=lambda x: x,
    range_constexpr=range, min=np.minimum, max=np.maximum,
    select_=lambda c, a, b: np.atleast_1d(np.where(c, a, b)).view(Lanes), Boolean=KINDS["Bool"], Float8E4M3FN=FP8,
    **KINDS,
)  # fmt: skip
MODULES = {"cutlass": CUTLASS, "cutlass.cute": CUTE, "cutlass.cute.nvgpu": COPIES}
