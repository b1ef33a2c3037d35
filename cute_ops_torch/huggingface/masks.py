"""Attention masks that are known without being computed: bands of keys around the place of a query.

Hugging Face's models make one mask for all layers, from a function of positions. Where that function is causal, a
sliding window or masks nothing, and no token is padding, our attention takes a few numbers in its place. Such a mask
is a :class:`BandMask`, a tensor that is computed when somebody else reads it. Compilers see the computed tensor, marked
with its band, and drop it where nothing reads it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from cute_ops_torch.composite.scaled_dot_product import computes
from cute_ops_torch.huggingface.match import Forward, with_own_code
from cute_ops_torch.huggingface.source import source_digest
from cute_ops_torch.library.modes import transforms_active

Tensor = torch.Tensor
# Functions of `transformers.masking_utils` with these sources are masks, or return one.
_MASKS = {"causal_mask_function": "ba35c80b3c360b2d", "bidirectional_mask_function": "7d0492ff55ef10f9"}
_MAKERS = {
    "and_masks": "d40aab19cc10157d", "sliding_window_overlay": "be6000111988c638",
    "sliding_window_bidirectional_overlay": "062ad81137003b7d", "packed_sequence_mask_function": "66fc0bc16889afb6",
    "remap_positions_for_packed_sequence": "2ad1051530d517b0",
}  # fmt: skip
# Functions that make the masks of a model, by the function that its config names.
CREATORS = (
    "create_causal_mask", "create_sliding_window_causal_mask", "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
)  # fmt: skip
# The attribute of a mask whose band is known, and of one whose band is that of sequences in the rows of a batch.
_BAND, _SEQUENCES = "_cute_band", "_cute_sequences"
ANY = -1


class Band(NamedTuple):
    """A mask of ``queries`` by ``keys``: query i attends to key k if ``-left <= k - (i + shift) <= right``, where
    ``ANY`` is no limit.
    """

    left: int
    right: int
    shift: int
    queries: int
    keys: int


class BandMask(Tensor):
    """A mask that is computed when an op reads it.

    Attributes:
        original: what the original function makes in its place: a tensor, or None where attention needs none.
    """

    original: Callable[[], Tensor | None]
    _compute: Any
    # What is computed of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, band: Band, batch: int, dtype: torch.dtype, device: torch.device, make: Callable[..., Tensor | None],
        offsets: Tensor | None = None,
    ) -> BandMask:  # fmt: skip
        """``make()`` is the original; with ``skip=False`` it is a tensor. ``offsets``: where sequences begin in all
        rows of the batch, and where the last one ends; None where each row is one.
        """
        shape = (batch, 1, band.queries, band.keys)
        mask: BandMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.original, mask._compute = cache(make), cache(partial(make, skip=False))
        if offsets is None:
            setattr(mask, _BAND, band)
        else:
            setattr(mask, _SEQUENCES, (band, offsets))
        return mask

    @property
    def computed(self) -> bool:
        return self._compute.cache_info().currsize > 0  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BandMask({getattr(self, _BAND, None) or getattr(self, _SEQUENCES)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(BandMask, lambda mask: mask._compute(), (args, kwargs or {}))
        return function(*args, **kwargs)


def band_of(mask: Tensor) -> Band | None:
    """The band of a mask; None where it is not known. What is made of a mask is another tensor, and one that somebody
    has read may be changed since.
    """
    band: Band | None = getattr(mask, _BAND, None)
    return None if isinstance(mask, BandMask) and mask.computed else band


def sequences_of(mask: Tensor | None) -> tuple[Band, Tensor] | None:
    """The band of a mask of several sequences in a row, and where they begin; None of other masks."""
    found: tuple[Band, Tensor] | None = getattr(mask, _SEQUENCES, None)
    return found if isinstance(mask, BandMask) and not mask.computed else None


def as_made(mask: Tensor | None) -> Tensor | None:
    """A mask as the original function makes it, or as somebody has changed it."""
    return mask.original() if isinstance(mask, BandMask) and not mask.computed else mask


def without_computing(create: Forward) -> Forward:
    """A function that makes masks as ``create`` does, and computes none that our attention does not read."""

    @with_own_code
    def created(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        embeds = kwargs.get("inputs_embeds", kwargs.get("input_embeds"))
        name = getattr(config, "_attn_implementation", None)
        if args or name not in ("sdpa", "eager") or embeds is None or not computes(embeds):
            return create(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return create(**{**kwargs, "config": _Config(config, _registered(name))})
        made, sides = create(**kwargs), _sides_of_call(create.__name__, kwargs)
        if sides is not None and type(made) is Tensor:
            keys = embeds if kwargs.get("encoder_hidden_states") is None else kwargs["encoder_hidden_states"]
            setattr(made, _BAND, Band(*sides, 0, embeds.shape[1], keys.shape[1]))
        return made

    return created


def _sides_of_call(name: str, given: Mapping[str, Any]) -> tuple[int, int] | None:
    """The limits of a mask that the function of this name makes, by its arguments: compilers do not see those of mask
    functions. None for a call that says more than the config and the length of one sequence.
    """
    known = {"config", "inputs_embeds", "input_embeds", "cache_position", "allow_is_causal_skip"}
    store: Any = given.get("past_key_values", given.get("cache"))
    if type(store).__name__ == "DynamicCache" and store.get_seq_length() == 0:
        known |= {"past_key_values", "cache", "position_ids"}  # beside a cache transformers reads no positions
    if name == "create_bidirectional_mask":
        known.add("encoder_hidden_states")
    if any(value is not None for key, value in given.items() if key not in known):
        return None
    config = given["config"]
    if name == "create_bidirectional_mask":
        return ANY, ANY
    if name == "create_bidirectional_sliding_window_mask" or not getattr(config, "is_causal", True):
        return None
    if name == "create_causal_mask":
        return ANY, 0
    window = getattr(config, "sliding_window", None)
    return (window - 1, 0) if name == "create_sliding_window_causal_mask" and window else None


class _Config:
    """A config whose attention has another name."""

    def __init__(self, config: Any, name: str) -> None:
        self._config, self._attn_implementation = config, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@cache
def _registered(name: str) -> str:
    """The name by which transformers finds our mask function in place of the one that it has by ``name``."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as FUNCTIONS

    ours = f"cute_{name}"
    FUNCTIONS.register(ours, partial(make_mask, FUNCTIONS[name]))
    return ours


def make_mask(plain: Callable[..., Tensor | None], **given: Any) -> Tensor | None:
    """A mask with the arguments of ``sdpa_mask`` and its like in transformers, of which ``plain`` is one."""
    if torch.compiler.is_compiling():  # which knows no closures, and reads no padding
        return plain(**given)
    band, offsets = _band(given), None
    if band is None:
        band, offsets = _of_sequences(given) or (None, None)
    if band is None:
        return plain(**given)
    given["attention_mask"] = None  # no token is padding

    def make(skip: bool = True) -> Tensor | None:
        no = {} if skip else {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return plain(**{**given, **no})

    if offsets is None and _is_skipped(plain, band, given):
        return make()
    eager = plain.__name__ == "eager_mask"
    dtype = given.get("dtype", torch.float32) if eager else torch.bool
    positions = given.get("cache_position")
    device = given.get("device", "cpu") if positions is None else positions.device
    return BandMask(band, given["batch_size"], dtype, device, make, offsets)


def _is_skipped(plain: Any, band: Band, given: Mapping[str, Any]) -> bool:
    """Whether ``plain`` makes no mask: a module's ``is_causal`` says what it would."""
    if (window := given.get("local_size")) is not None and band.keys >= window:
        return False
    if (band.left, band.right) == (ANY, ANY):
        return bool(given.get("allow_is_bidirectional_skip", False))
    alone = band.queries in (1, band.keys) and (band.left, band.right) == (ANY, 0)
    return alone and plain.__name__ == "sdpa_mask" and bool(given.get("allow_is_causal_skip", True))


def _band(given: Mapping[str, Any]) -> Band | None:
    """The band of a mask with these arguments; None where it is not known."""
    place = _place(given)
    function = given.get("mask_function")
    sides = None if function is None or place is None or transforms_active() else _sides(function)
    if sides is None or place is None:
        return None
    shift, queries, keys = place
    padding = given.get("attention_mask")
    if padding is not None and not _allows_all(padding, given.get("kv_offset", 0) + keys):
        return None
    left, right = sides
    # A limit that no key reaches is none.
    left = ANY if left >= shift + queries - 1 else left
    right = ANY if right >= keys - shift - 1 and right > 0 else right
    return Band(left, right, shift, queries, keys)


def _of_sequences(given: Mapping[str, Any]) -> tuple[Band, Tensor] | None:
    """The band of a mask of several sequences in a row, which transformers finds by their positions, and where they
    begin. Reading that waits for the GPU, as transformers does for it.
    """
    function, place = given.get("mask_function"), _place(given)
    if function is None or place is None or transforms_active():
        return None
    shift, queries, keys = place
    numbers = _free(function, "and_masks").get("mask_functions", ())
    numbers = [number for one in numbers for number in _free(one, "packed_sequence_mask_function").values()]
    sides = _sides(function, within_sequences=True)
    if sides is None or len(numbers) != 1 or shift or queries != keys or given.get("attention_mask") is not None:
        return None
    number = numbers[0].expand(given["batch_size"], -1)
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[:, 1:] = number[:, 1:] != number[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    offsets = torch.cat([starts, starts.new_full((1,), number.numel())]).int()
    return Band(*sides, 0, queries, keys), offsets


def _free(function: Any, name: str) -> dict[str, Any]:
    """Free variables of a mask function of this name, or made by a function of this name; none of other functions."""
    code = getattr(function, "__code__", None)
    if code is None or _names().get(code) != name:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _place(given: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The key beside the first query, and the numbers of queries and keys; None where they are not known."""
    keys, offset = given["kv_length"], given.get("kv_offset", 0)
    if "cache_position" not in given:
        start, queries = given.get("q_offset", 0), given["q_length"]
        return None if isinstance(start, Tensor) or isinstance(offset, Tensor) else (start - offset, queries, keys)
    # transformers before 5.2 has positions as a tensor. The last query is beside the last key, except in a cache whose
    # size is static, which transformers tells from others by this flag.
    queries = given["cache_position"].shape[0]
    last = queries == keys or (queries == 1 and given.get("allow_is_causal_skip", False))
    return (keys - queries, queries, keys) if last else None


def _allows_all(padding: Tensor, keys: int) -> bool:
    """Whether a padding mask masks nothing. Reading it waits for the GPU, as transformers does for ``sdpa``."""
    if padding.ndim != 2 or padding.shape[1] < keys:
        return False
    if padding.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(padding.all())


def _sides(function: Any, within_sequences: bool = False) -> tuple[int, int] | None:
    """The limits ``(left, right)`` of a mask function of transformers; None of other functions, and of those that tell
    sequences in a row from each other unless the limits are those ``within_sequences``.
    """
    name = _names().get(getattr(function, "__code__", None))  # type: ignore[arg-type]
    if name is None:
        return None
    free = _free(function, name)
    if name in ("packed_sequence_mask_function", "remap_positions_for_packed_sequence"):
        # Positions in a sequence differ as places do.
        if not within_sequences:
            return None
        return _sides(free["mask_function"]) if "mask_function" in free else (ANY, ANY)
    if name == "and_masks":
        found = [_sides(one, within_sequences) for one in free["mask_functions"]]
        return None if None in found else _narrower(found)
    window = free.get("sliding_window", 0)
    known = {
        "causal_mask_function": (ANY, 0), "bidirectional_mask_function": (ANY, ANY),
        "sliding_window_overlay": (window - 1, ANY), "sliding_window_bidirectional_overlay": (window, window),
    }  # fmt: skip
    return known[name] if window >= 0 and known[name][0] >= ANY else None


def _narrower(found: Sequence[Any]) -> tuple[int, int]:
    left, right = (min((limit for limit in side if limit != ANY), default=ANY) for side in zip(*found, strict=True))
    return left, right


@cache
def _names() -> dict[types.CodeType, str]:
    """The names of mask functions, or of what makes them, by their code."""
    from transformers import masking_utils

    found = {}
    for name, digest in {**_MASKS, **_MAKERS}.items():
        function = getattr(masking_utils, name, None)
        if function is None or source_digest(function) != digest:
            continue
        codes = [each for each in function.__code__.co_consts if isinstance(each, types.CodeType)]
        (inner,) = [each for each in codes if each.co_name.isidentifier()] or [function.__code__]
        found[inner] = name
    return found
