"""Functions of causal-conv1d 1.7, by :func:`cute_ops_torch.causal_conv1d`.

An ``x`` in the memory of (batch, seqlen, channels), which theirs asks for beside states, runs
:func:`cute_ops_torch.causal_conv1d`, and one whose positions are neighbours
:func:`cute_ops_torch.causal_conv1d_channels_first`: neither is copied. With ``seq_idx`` the former is, with states the
latter.
"""

from __future__ import annotations

from typing import Any

import torch

import cute_ops_torch
from cute_ops_torch.compat.refusal import missing, one_of

Tensor = torch.Tensor
__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]
__getattr__ = missing(__name__, __all__, {})
ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:  # fmt: skip
    """A causal convolution of ``x``, (batch, channels, seqlen), with ``weight``, (channels, width).

    Args:
        x, weight, bias, activation: as :func:`cute_ops_torch.causal_conv1d` has them, positions last.
        seq_idx: (batch, seqlen), int32: which sequence each position is of. Below zero it is padding, which gives 0.
        initial_states: (batch, channels, width - 1): the inputs before x, of the sequence of its first position.
        return_final_states: return the last inputs, too, (batch, channels, width - 1).
        final_states_out: where to write them.

    Returns:
        (batch, channels, seqlen), or with the final states behind it.
    """
    one_of("causal_conv1d_fn", "activation", activation, ACTIVATIONS)
    if final_states_out is not None and not return_final_states:
        raise ValueError("causal_conv1d_fn: final_states_out is written with return_final_states=True only.")
    if seq_idx is not None:
        out, final = _of_sequences(x, weight, bias, seq_idx, initial_states, activation)
    elif initial_states is None and x.stride(-1) == 1 and x.stride(1) != 1:
        out, final = _of_neighbours(x, weight, bias, None, activation), _last(x, weight.shape[-1] - 1)
    else:
        out, final = _convolved(x, weight, bias, initial_states, activation)
    if not return_final_states:
        return out
    return out, final if final_states_out is None else final_states_out.copy_(final)


def _of_sequences(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, before: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The convolution of packed sequences, of which the first one may go on, and the last inputs."""
    given, ids, count = x, seq_idx, 0
    if before is not None:
        count = before.shape[-1]
        given, ids = torch.cat((before, x), -1), torch.cat((seq_idx[:, :1].expand(-1, count), seq_idx), -1)
    out = _of_neighbours(given, weight, bias, ids, activation)[..., count:]
    return out.masked_fill((seq_idx < 0)[:, None], 0.0), _last(given, weight.shape[-1] - 1)


def _of_neighbours(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str | None
) -> Tensor:
    """The convolution of positions that are neighbours in memory."""
    near = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return cute_ops_torch.causal_conv1d_channels_first(near, weight, bias, seq_idx, "silu" if activation else "none")


def _last(x: Tensor, count: int) -> Tensor:
    """The last inputs, zeros before the first one."""
    found = x[..., max(x.shape[-1] - count, 0) :]
    return torch.nn.functional.pad(found, (count - found.shape[-1], 0))


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    out, final = cute_ops_torch.causal_conv1d(
        _channels_last(x), weight, bias, None if before is None else _channels_last(before),
        "silu" if activation else "none",
    )  # fmt: skip
    return out.transpose(1, 2), final.transpose(1, 2)


def _channels_last(x: Tensor) -> Tensor:
    """(batch, channels, seqlen) as (batch, seqlen, channels), whose channels are neighbours in memory."""
    turned = x.transpose(1, 2)
    return turned if turned.stride(-1) == 1 or turned.shape[-1] == 1 else turned.contiguous()


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    cache_seqlens: Tensor | None = None, conv_state_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The convolution of new inputs behind those of a state, which then holds the newest ones. No gradient.

    Args:
        x: (batch, channels) or (batch, channels, seqlen).
        conv_state: (batch, channels, state length), of at least width - 1 inputs, the oldest first. It is written.
        weight, bias, activation: as in :func:`causal_conv1d_fn`.
        cache_seqlens: (batch,): how many inputs were before x. The state is a ring then, written from there on.
        conv_state_indices: (batch,): which states of ``conv_state`` are those of x. One below zero is padding, which
            gives 0 and writes none.
    """
    one_of("causal_conv1d_update", "activation", activation, ACTIVATIONS)
    single = x.ndim == 2
    if single:
        x = x.unsqueeze(-1)
    held, length, new, taps = conv_state, conv_state.shape[-1], x.shape[-1], weight.shape[-1] - 1
    if length < taps:
        raise ValueError(f"causal_conv1d_update: conv_state holds {length} inputs, fewer than width - 1 = {taps}.")
    with torch.no_grad():
        if conv_state_indices is not None:
            # Without a state there is padding alone.
            states = conv_state if conv_state.shape[0] else conv_state.new_zeros(1, *conv_state.shape[1:])
            held = states.index_select(0, conv_state_indices.clamp(min=0))
        if cache_seqlens is None:
            before = held[..., length - taps :]
            after = torch.cat((held, x.to(held.dtype)), -1)[..., new:]
        else:
            before = held.gather(-1, _places(cache_seqlens, -taps, 0, held))
            first = max(new - length, 0)  # those before are overwritten
            after = held.scatter(-1, _places(cache_seqlens, first, new, held), x[..., first:].to(held.dtype))
        out, _ = _convolved(x, weight, bias, before.to(x.dtype), activation)
        if conv_state_indices is None:
            conv_state.copy_(after)
        else:
            _write_states(conv_state, conv_state_indices, held, after)
            out = out.masked_fill((conv_state_indices < 0)[:, None, None], 0.0)
    return out.squeeze(-1) if single else out


def _write_states(states: Tensor, indices: Tensor, held: Tensor, after: Tensor) -> None:
    """Put new states where the indices say, none for padding: padding writes what the first other one does, since how
    many there are is not known without waiting for the GPU.
    """
    if indices.shape[0] and states.shape[0]:
        counts = indices >= 0
        rows = torch.arange(indices.shape[0], device=indices.device).where(counts, counts.int().argmax())
        written = after.where(counts.any(), held)  # of padding alone state 0 stays
        states.index_copy_(0, indices.clamp(min=0).long()[rows], written[rows])


def _places(seqlens: Tensor, start: int, stop: int, ring: Tensor) -> Tensor:
    """(batch, channels, stop - start): where these inputs are in a ring, counted from the next one."""
    places = (seqlens[:, None].long() + torch.arange(start, stop, device=ring.device)) % ring.shape[-1]
    return places[:, None].expand(-1, ring.shape[1], -1)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last inputs of packed sequences, (batch, channels, state length); zeros before a shorter one. No gradient.

    Args:
        x: (tokens, channels).
        cu_seqlens: (batch + 1,): where each sequence begins, and the end.
        state_len: how many inputs of each.
    """
    if not x.shape[0]:
        return x.new_zeros((cu_seqlens.shape[0] - 1, x.shape[1], state_len))
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    places = ends + torch.arange(-state_len, 0, device=x.device)
    inside = (places >= starts)[..., None]
    states = x.detach()[places.clamp(min=0)].where(inside, x.new_zeros(()))
    return states.transpose(1, 2)
