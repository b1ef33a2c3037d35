"""Masks and changes of scores in registers: expressions of :mod:`cute_ops.ops.attention.mods` as device code."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.expressions.graph import operands_of
from cute_ops.expressions.reads import FLOAT, SIZE, Mod, known, ranged, rounds_products
from cute_ops.expressions.text import text_of
from cute_ops.kernels.attention.folding import Folded, Scaled
from cute_ops.kernels.attention.limits import WORD, are_pairs, bit_of, interval, limits_of, words_of
from cute_ops.kernels.attention.registers import rounded_product
from cute_ops.kernels.attention.tensors import address_of
from cute_ops.kernels.emit.emitter import Emitter
from cute_ops.kernels.emit.primitives import DEVICE
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.tensor_core.sizes import WARP

HEAD, Q, K = 1, 2, 3  # of coordinates
# Columns of which a thread reads elements before it uses the first one, one by one and in pairs: registers are few.
SINGLE_COLUMNS, PAIRED_COLUMNS = 4, 16


def exp(x):
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def tanh(x):
    """``1 - 2 / (1 + exp(2 x))``: right to 2e-7 absolutely, which is what a mask asks for."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(exp(x * 2.0) + 1.0)


def divide(x, y):
    """The quotient, rounded once: ``floor(q / 49)`` of whole numbers is right."""
    found = x * cute.arch.rcp_approx(y)
    rest = x - found * y
    return cutlass.select_(cute.math.absf(rest) < Float32.inf, found + rest * cute.arch.rcp_approx(y), found)


# Scores need absolute accuracy, and instructions are dear.
FAST = {**DEVICE, "exp": exp, "tanh": tanh, "divide": divide}
# Of masks and indices, that one rounding decides: products are rounded as references round them, before a sum is.
ROUNDED = {**FAST, "multiply": rounded_product, "square": lambda x: rounded_product(x, x)}


class Evaluated:
    """A function of scores and coordinates, and what it reads of captured arrays.

    Coordinates are float32 in expressions, which hold whole numbers up to 2^24.
    """

    def __init__(self, mod):
        self.mod = mod
        first, reads = mod.given - 8, enumerate(mod.reads, mod.given)
        floats = frozenset([*range(first), *(i for i, read in reads if read.kind == FLOAT)])
        self.emit, *self.indices = (
            e and Emitter(text_of(e), ROUNDED if rounds_products(e, floats) else FAST)
            for e in (mod.expression, *(read.place for read in mod.reads))
        )

    def operands(self, given, captured, loaded, at, numbers=None):
        """The operands of one score: what is given, and what is read.

        Args:
            given: the score, if it has one, coordinates and sizes.
            captured: the arrays.
            loaded: what was read for other scores of the thread, which grows.
            at: the numbers of the query and of the key among the thread's.
            numbers: batch, head, q and k as whole numbers.
        """
        found = [*given]
        for i in range(len(self.mod.reads)):
            by_query, by_key = self.mod.depends(i)
            key = i, at[0] if by_query else None, at[1] if by_key else None
            if key not in loaded:
                loaded[key] = self.read(i, found, captured, numbers)
            found.append(loaded[key])
        return found

    def along(self, operands, place, c):
        """The operands of one score of a change, with the coordinate of its column as a step along a row."""
        at = 1 + (Q if place.keys_down else K)
        return [*operands[:at], place.along(c), *operands[at + 1 :]]

    def varying(self, place):
        """The operands of a change of scores that differ between columns of a row, besides the column's coordinate."""
        reads = range(len(self.mod.reads))
        return {0, *(self.mod.given + i for i in reads if self.mod.depends(i)[0 if place.keys_down else 1])}

    def rows_are_alike(self, place):
        """Whether a mask is the same in all rows of a warp, queries, as far as what it reads by query tells."""
        used = operands_of(self.mod.expression, self.mod.expression.outputs[0])
        reads = [(i, self.mod.depends(i)) for i in range(len(self.mod.reads)) if self.mod.given + i in used]
        own = [i for i, (by_query, _) in reads if by_query]
        if Q in used or any(all(by) for _, by in reads):
            return Boolean(False)
        loaded, rows = {}, []
        for r, c, at, coordinates in place.each():
            if c == 0:
                operands = self.operands(coordinates, place.sizes.captured, loaded, at, place.numbers(r, c))
                rows.append([operands[self.mod.given + i] for i in own])
        alike = Boolean(True)
        for values in zip(*rows):
            first = cute.arch.shuffle_sync(values[0], 0)
            for value in values:
                alike = alike & (value == first)
        return cute.arch.vote_all_sync(alike)

    def once(self, words, place):
        """Of bits of columns of a thread's rows those that a mask lets pass, where :meth:`rows_are_alike`."""
        shared = self._words(place)
        return [[word & each for word, each in zip(row, shared)] for row in words]

    def by_rows(self, words, place, rest):
        """Of bits of columns of a thread's rows those of rows of which a mask may be true, and whether that is all of
        it: of each row alone it may be known, as where a tile has queries of two documents.
        """
        known = [rest(row) for row in place.rows]
        words = [[cutlass.select_(some, word, Int32(0)) for word in row] for row, (_, some) in zip(words, known)]
        (every, some), (every_second, some_second) = known
        alike = (every | (some ^ True)) & (every_second | (some_second ^ True))
        return *words, cute.arch.vote_all_sync(alike)

    def _words(self, place):
        """The columns that a mask lets pass in rows that are alike, as bits of a thread's: each lane looks at one of 32
        columns of the tile.
        """
        count, lane, votes = len(place.columns), cute.arch.lane_idx(), []
        for i in range(-(-4 * count // WARP)):
            quarter, c = (i * WARP + lane) // count, (i * WARP + lane) % count  # of the threads of a row, one's column
            column = place.start + (quarter - lane % 4) * 2 + c // 2 * 8 + c % 2
            own = place._replace(start=column, columns=(0,))
            ((_, _, at, coordinates),) = list(own.each())[:1]
            operands = self.operands(coordinates, place.sizes.captured, {}, at, own.numbers(0, 0))
            votes.append(Int64(cute.arch.vote_ballot_sync(self.emit(*operands)[0])) & 0xFFFFFFFF)
        words, votes = [], [*votes, Int64(0)]
        for start in range(0, count, WORD):
            word = Int32(0)
            for quarter in range(4):
                number, shift = divmod(quarter * count + start, WARP)
                bits = Int32(((votes[number] | (votes[number + 1] << WARP)) >> shift) & 0xFFFFFFFF)
                word = cutlass.select_(lane % 4 == quarter, bits, word)
            words.append(word)
        return words

    @property
    def by_score(self):
        """The reads of an element for each score, by query and key."""
        return [i for i in range(len(self.mod.reads)) if all(self.mod.depends(i))]

    @property
    def in_pairs(self):
        """Whether there are reads by query and key, all in order of keys, and by numbers that a row of queries has."""
        return bool(self.by_score) and all(self._is_in_order(i) for i in self.by_score)

    def _is_in_order(self, i):
        place, first = self.mod.reads[i].place, self.mod.given - 8
        *others, last = place.outputs
        of_row = {first + n for n in range(8) if n != K}
        return self._number_of(place.nodes[last]) == K and all(operands_of(place, j) <= of_row for j in others)

    def pairs_of(self, place):
        """Where reads are :attr:`in_pairs`, of each the address of the element of the first column in each of a
        thread's rows, and the dtype.
        """
        found, nothing = {}, (Float32(0.0),) * (self.mod.given - 8)
        for i in self.by_score:
            array, addresses = place.sizes.captured[self.mod.reads[i].array], []
            for r, c, _, coordinates in place.each():
                if c == 0:
                    numbers = place.numbers(r, 0)
                    *others, _ = self._places(i, array, (*nothing, *coordinates), numbers)
                    addresses.append(address_of(array, (*others, numbers[K])))
            found[i] = addresses, array.element_type
        return found

    def _places(self, i, array, operands, numbers=None):
        """The indices of an element as whole numbers, see :meth:`read`, each within its dim."""
        places = []
        for node, x, size in zip(self.index_nodes(i), self.indices[i](*operands), array.shape):
            which = self._number_of(node)
            if numbers is not None and 0 <= which < len(numbers):
                places.append(cutlass.min(cutlass.max(numbers[which], Int32(0)), Int32(size) - 1))
            else:
                bounded = cute.arch.fmin(cute.arch.fmax(x, Float32(0.0)), Float32(size - 1))  # of NaN 0
                places.append(Int32(bounded))
        return places

    def loads_pairs(self, place, pairs):
        """Whether all of a warp's keys are numbers of elements, and those of pairs of columns lie where one instruction
        loads both. ``pairs``: see :meth:`pairs_of`.
        """
        last, found = place.numbers(0, -1)[K], Boolean(True)
        for i, (rows, dtype) in pairs.items():
            found = found & (last < Int32(place.sizes.captured[self.mod.reads[i].array].shape[-1]))
            for address in rows:
                found = found & (address % (2 * dtype.width // 8) == 0)
        return cute.arch.vote_all_sync(found)

    def load_pairs(self, pairs, columns, offsets, loaded):
        """Load the elements of some columns, two at once, in the place of :meth:`read`.

        Args:
            pairs: see :meth:`pairs_of`.
            columns: the numbers of a thread's columns.
            offsets: of all columns of a thread from its first one.
            loaded: see :meth:`operands`.
        """
        for i, (rows, dtype) in pairs.items():
            size = dtype.width // 8
            for c in columns[::2]:
                for r, row in enumerate(rows):
                    both, address = cute.make_rmem_tensor(2, dtype), row + offsets[c] * size
                    start = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=2 * size)
                    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(2)), both)
                    for j in range(2):
                        loaded[i, r, c + j] = both[j].to(Float32)

    def index_nodes(self, i):
        """The nodes of what a read has as indices."""
        indices = self.indices[i]
        return [indices.expression.nodes[node] for node in indices.expression.outputs] if indices else []

    def _number_of(self, node):
        """Which of batch, head, q and k an index is, or another number."""
        return node.operand - (self.mod.given - 8) if node.primitive == "operand" else -1

    def read(self, i, operands, captured, numbers=None):
        """An element of an array, or its size, by the operands before it.

        Args:
            numbers: batch, head, q and k as whole numbers, by which fewer instructions find an element.
        """
        read = self.mod.reads[i]
        array = captured[read.array]
        if read.kind.startswith(SIZE):
            return Float32(array.shape[int(read.kind.removeprefix(SIZE))])
        places = self._places(i, array, operands, numbers)
        # Of elements of one row the row's address is computed once.
        row = array if len(places) == 1 else array[(*places[:-1], None)]
        return row[places[-1]].to(Float32)


def by_index(arrays, mods):
    """Captured arrays as functions read them: with all leading dims as one."""
    ranks = {}
    for each in (mods.mask, mods.score):
        for read in each.mod.reads if each else ():
            if read.place is not None:
                ranks[read.array] = len(read.place.outputs)
    return tuple([folded(m, own=ranks[i] - 1) for i, m in enumerate(arrays)])


class Mods:
    """A mask, its bounds over a tile and a change of scores; each may be absent.

    Attributes:
        scale: of products of queries and keys.
        outer: a factor and an offset that make scores of the numbers that a change leaves, or of the products.
        masks_by_head: whether the mask may differ between heads.
        cap: the factors (a, b) if scores are ``a * tanh(b * product)``, else None.
        by_query, by_key: the reads of the mask that have bounds over a tile of queries, of keys.
    """

    def __init__(self, scale, score="", mask="", bounds="", dscore=""):
        self.scale = scale
        self.mask, self.score = (Evaluated(Mod.parse(text)) if text else None for text in (mask, score))
        device = self.mask.emit.device if self.mask else FAST
        self._bounds, *self._bounds_of_rest = (
            Emitter(text, device) if text else None for text in [*bounds.split(" | "), "", ""][:3]
        )
        self._score, self._dscore = (
            Folded(text, FAST) if text else None for text in (self.score and text_of(self.score.mod.expression), dscore)
        )
        self.outer = self._score.outer() if self._score else (scale, 0.0)
        cap = self._score.cap() if self._score else None
        self.cap = cap and (cap[0], cap[1] * scale)
        self.by_query, self.by_key = ranged(self.mask.mod) if self.mask else ([], [])
        self.masks_by_head = self.mask is not None and depends_on_head(self.mask.mod)
        # Of rows of queries, and of keys: limits of their columns, and the rest of the mask.
        self.parts = [parts_of(self.mask, axis) for axis in (K, Q)]

    @property
    def is_interval(self):
        """Whether a mask lets one interval of keys of each query pass, and so one of tiles of each block."""
        return self.mask is not None and self.parts[0][1] is None

    def has_rest(self, down):
        """Whether a mask has limits of each row's columns, and other parts; ``down``: whether rows are keys."""
        return self._bounds_of_rest[down] is not None

    def bounds(self, tile, place, tiles, sizes, rest=None):
        """Whether the mask, or its rest, is true of all scores of a tile, and whether it may be true of one.

        Args:
            tile: block, head and batch.
            place: the first and the last query, and the first and the last key.
            tiles: the numbers of the tile of queries and of that of keys; None of those of which one is given.
            sizes: of the call.
            rest: of the rest, whether rows are keys: see :meth:`has_rest`.
        """
        (q, k), mod = place, self.mask.mod
        both = [[*map(Float32, (first, last))] for first, last in ((q[0] + sizes.shift, q[1] + sizes.shift), k)]
        points = [Float32(tile.batch), Float32(tile.head)]
        numbers = [*points, *both[0], *both[1], *sizes.counts]
        operands = [*points, both[0][0], both[1][0], *sizes.counts]
        whole = tile.batch, tile.head, q[0] + sizes.shift, k[0]
        for i, count in enumerate(known(mod)[mod.given :]):
            value = None
            if count == 1 or (count == 2 and tiles[i in self.by_key] is None):
                value = self.mask.read(i, operands, sizes.captured, whole)
                numbers += [value] * count
            elif count == 2:
                numbers += self._range(i, tile, tiles, sizes)
            operands.append(value)
        return (self._bounds if rest is None else self._bounds_of_rest[rest])(*numbers)

    def _range(self, i, tile, tiles, sizes):
        """The least and the largest of what is read over a tile."""
        axis = 0 if i in self.by_query else 1
        table, number = sizes.ranges[axis], (self.by_query, self.by_key)[axis].index(i)
        batch, head = (min_size(x, table.shape[mode]) for mode, x in ((1, tile.batch), (2, tile.head)))
        place = sizes.first_slots[axis] + tiles[axis]
        return [table[2 * number + which, batch, head, place] for which in (0, 1)]

    def with_reads(self, tile, sizes):
        """The sizes of a block's tiles, with what a change of scores reads for all of them."""
        if self.score is None:
            return sizes
        given = Float32(0.0), Float32(tile.batch), Float32(tile.head), Float32(0.0), Float32(0.0), *sizes.counts
        reads = [i for i in range(len(self.score.mod.reads)) if self.score.mod.depends(i) == (False, False)]
        return sizes._replace(read=tuple([(i, self.score.read(i, given, sizes.captured)) for i in reads]))

    @cute.jit
    def change(self, scores, place: cutlass.Constexpr):
        """Replace products of queries and keys by numbers that :attr:`outer` makes scores of."""
        read = {(i, None, None): value for i, value in place.sizes.read}
        loaded, same, signs = [{}, {}] if const_expr(place.heads_by_row) else [read] * 2, Boolean(True), {}
        for (r, i), along in self._absolutes(place, loaded).items():
            keeps, signs[r, i] = along.between(place.columns)
            same = same & keeps
        if const_expr(self.score.in_pairs and are_pairs(place.columns) and not (place.keys_down or place.heads_by_row)):
            pairs = self.score.pairs_of(place)
            if self.score.loads_pairs(place, pairs):
                self._change_in_parts(scores, place, loaded[0], pairs)
            else:
                self._change_in_parts(scores, place, loaded[0], None)
        elif const_expr(len(signs) == 0):
            self._change(scores, place, loaded, {})
        elif cute.arch.vote_all_sync(same):
            self._change(scores, place, loaded, signs)
        else:
            self._change(scores, place, loaded, {})

    def _change(self, scores, place, loaded, signs):
        """``signs``: of what absolute values are taken of, by row and node, where all of a warp's columns keep them."""
        loaded = [{**loaded[0]}, {**loaded[1]}] if place.heads_by_row else [{**loaded[0]}] * 2
        for r, c, at, coordinates in place.each(down=bool(self.score.mod.reads)):
            given = Scaled(self.scale, scores[r, c]), *coordinates
            operands = self.score.along(self.score.operands(given, place.sizes.captured, loaded[r], at), place, c)
            own = {i: sign for (row, i), sign in signs.items() if row == r}
            scores[r, c] = self._score(operands, self.score.varying(place), own)

    def _change_in_parts(self, scores, place, loaded, pairs):
        """:meth:`_change`, where elements are read for each score: those of some columns are all on their way before
        the first one is used. ``pairs``: see :meth:`Evaluated.pairs_of`; None where they are loaded one by one.
        """
        loaded, mod, every = {**loaded}, self.score, [*place.each(down=True)]
        at_once = SINGLE_COLUMNS if pairs is None else PAIRED_COLUMNS
        for start in range(0, len(place.columns), at_once):
            columns = range(start, min(start + at_once, len(place.columns)))
            part, given = [each for each in every if each[1] in columns], []
            if pairs is not None:
                mod.load_pairs(pairs, columns, place.columns, loaded)
            for r, c, at, coordinates in part:
                operands = (Scaled(self.scale, scores[r, c]), *coordinates), place.sizes.captured, loaded, at
                given.append(mod.operands(*operands, place.numbers(r, c)))
            for (r, c, *_), operands in zip(part, given):
                scores[r, c] = self._score(mod.along(operands, place, c), mod.varying(place), {})

    def _absolutes(self, place, loaded):
        """The arguments of absolute values that change along a row by a step, by row and node."""
        found = {}
        if self._score.absolute:
            for r, c, at, coordinates in place.each():
                if c == 0:
                    given = Scaled(1.0, Float32(0.0)), *coordinates
                    operands = self.score.operands(given, place.sizes.captured, loaded[r], at)
                    along = self._score.along(self.score.along(operands, place, c), self.score.varying(place))
                    found |= {(r, i): each for i, each in along.items()}
        return found

    @property
    def is_changed_by_column(self):
        """Whether scores are changed one by one, however others of the tile are."""
        return self._dscore is not None and not self._score.absolute

    def by_column(self, products, place, columns=None):
        """Of each row and column, or only of some columns, what takes the place of a product of a query and a key, and
        a function from a cotangent of the score to one of the product.
        """
        loaded = {}
        for r, c, at, coordinates in place.each(down=True):
            if columns is not None and c not in columns:
                continue
            given = Scaled(self.scale, products[r, c]), *coordinates
            operands = self.score.along(self.score.operands(given, place.sizes.captured, loaded, at), place, c)
            varying = self.score.varying(place)
            yield r, c, self._score(operands, varying), partial(self._derived, operands, varying)

    def _derived(self, operands, varying, before):
        """A cotangent that is 0 stays 0: a hidden score may have no finite derivative. A cap's is always finite."""
        after = self._dscore([*operands, before], {*varying, len(operands)})
        if self.cap is not None:
            return after
        return cutlass.select_(before == 0.0, before, after)

    @cute.jit
    def hide(
        self, values, place: cutlass.Constexpr, hidden: cutlass.Constexpr, rest: cutlass.Constexpr = None,
        votes: cutlass.Constexpr = False,
    ):  # fmt: skip
        """Replace values of keys that a query does not attend to, and of what lies behind the last key.

        Args:
            rest: of a mask that :meth:`has_rest`, a function: see :meth:`Tiles.rest_of`.
            votes: whether a warp whose rows are alike looks at each column once, where rows are queries.
        """
        limits, others = self.parts[place.keys_down]
        by_words = (bool(limits) or others is None) and are_pairs(place.columns) and not place.heads_by_row
        words = [self._words(limits, place, r) for r in range(len(place.rows))] if by_words else None
        if const_expr(rest is not None and by_words and others is not None):
            whole, first, second = rest()[0], words[0], words[1]
            once, by_rows, rows_are_alike = others.once, others.by_rows, others.rows_are_alike if votes else never
            if not whole:
                if rows_are_alike(place):
                    first, second = once((first, second), place)
                    whole = Boolean(True)
                else:
                    first, second, whole = by_rows((first, second), place, rest)
            if whole:
                self._hide(values, place, hidden, (first, second), None)
            else:
                self._hide(values, place, hidden, (first, second), others)
        else:
            self._hide(values, place, hidden, words, others if by_words else self.mask)

    def _hide(self, values, place, hidden, words, mask):
        """:meth:`hide` by bits of columns, or by the number of keys where there are none, and by a mask or None."""
        last, loaded = Float32(place.sizes.seqlen_k), {}
        for r, c, at, coordinates in place.each(down=mask is not None and bool(mask.mod.reads)):
            kept = (words[r][c // WORD] & Int32(bit_of(c % WORD))) != 0 if words else coordinates[3] < last
            if mask is not None:
                operands = mask.operands(coordinates, place.sizes.captured, loaded, at, place.numbers(r, c))
                kept = kept & mask.emit(*operands)[0]
            values[r, c] = cutlass.select_(kept, values[r, c], Float32(hidden))

    def _words(self, limits, place, r):
        """The columns that limits let pass in a row of a thread, and that have a key, as bits."""
        down, count, last = place.keys_down, len(place.columns), place.sizes.seqlen_k
        row = place.rows[r] + place.shifts[0]
        at = (Float32(0.0), Float32(row)) if down else (Float32(row), Float32(0.0))
        operands = Float32(place.tile.batch), Float32(place.tile.head), *at, *place.sizes.counts
        low, high = interval(limits, operands, high=None if down else last - 1)
        words = words_of(low, high, place.start + place.shifts[1], count)
        return [cutlass.select_(row < last, word, Int32(0)) for word in words] if down else words

    def derive(self, cotangents, products, place):
        """Multiply cotangents of changed scores by the derivative of the change, of products of queries and keys."""
        loaded = {}
        for r, c, at, coordinates in place.each(down=bool(self.score.mod.reads)):
            given = Scaled(self.scale, products[r, c]), *coordinates
            operands = self.score.along(self.score.operands(given, place.sizes.captured, loaded, at), place, c)
            cotangents[r, c] = self._derived(operands, self.score.varying(place), cotangents[r, c])


def never(_):
    return Boolean(False)


def parts_of(mask, axis):
    """The limits of a coordinate in a mask, and the rest of it, or None."""
    limits, others = limits_of(mask.mod, axis, mask.emit.device) if mask else ([], None)
    return limits, others and Evaluated(others)


def depends_on_head(mask):
    """Whether a mask computes with the number of the head, or reads by it."""
    places = [read.place for read in mask.reads if read.place]
    return any(HEAD in operands_of(e, i) for e in (mask.expression, *places) for i in e.outputs)


def min_size(x, size):
    """An index of a dim that has one element for all, or one for each."""
    return cutlass.min(x, Int32(size) - 1)
