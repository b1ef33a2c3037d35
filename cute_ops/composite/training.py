"""Losses of preferences, policies and distillation on a linear head, written once for the arrays of any framework.

The head's log-probabilities come from the loss of a linear head, which never holds all logits; what follows are a few
numbers per token or sequence, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from cute_ops.composite import preferences
from cute_ops.composite.chunks import AUTO
from cute_ops.composite.linear_distillation import linear_distillation_rows, linear_distillation_total
from cute_ops.declaration.array_api import constant
from cute_ops.errors import shown
from cute_ops.ops.checks import MOST_FACTOR, TERM

Array = TypeVar("Array")
PREFERENCES = preferences.KINDS
POLICIES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
LEVELS = ("token", "sequence")


def _named(dtype: Any) -> str:
    """A dtype by name, of either framework or a name itself; None is float32."""
    if dtype is None:
        return "float32"
    return str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).removeprefix("torch.")


def _is_between(number: Any, least: float, most: float) -> bool:
    """Whether a number, of any type and size, is in a range."""
    return bool(least <= number <= most)


class Training(Generic[Array]):
    """The functions of a framework.

    Args:
        xp: its namespace: ``torch`` or ``jax.numpy``.
        losses: its ``linear_cross_entropy``.
        register: makes functions of ops.
        array: converts an argument to an array.
        device: where an array is; None where the framework brings arrays together by itself.
    """

    def __init__(
        self, xp: Any, losses: Callable[..., Any], register: Callable[..., Any], array: Callable[[Any], Any],
        device: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._xp, self._losses, self._array, self._device = xp, losses, array, device
        self._distillation = register(linear_distillation_rows), register(linear_distillation_total)

    def linear_log_probs(
        self, hidden: Array, weight: Array, target: Array, bias: Array | None = None, *, average: bool = False,
        ignore_index: int = -100, temperature: float = 1.0,
    ) -> Array:  # fmt: skip
        """Log-probabilities of sequences under a linear head, without ever holding all logits.

        ``sum(log_softmax(hidden @ weight.T / temperature)[target])`` over the tokens that are not ignored

        Args:
            hidden: ``T[*m s h]``: sequences of hidden states, each of which predicts the target beside it.
            weight: ``T[n h]``.
            target: integers ``[*m s]``.
            bias: ``T[n]``.
            average: divide by the number of tokens that are not ignored; NaN where there are none, as Liger's.
            ignore_index: the target of tokens that do not count.
            temperature: divides the logits.

        Returns:
            float32 ``[*m]``.
        """
        function, labels = "linear_log_probs", self._array(target)
        if not labels.shape:
            raise ValueError(f"cute.{function}: argument `target` has 0 dims, expected at least 1: I[*m s].")
        self._check_type(function, "average", average, bool)
        tokens, kept = self._tokens(function, (hidden, weight, labels, bias), ignore_index, temperature)
        total = tokens.sum(-1)
        return total / kept.sum(-1) if average else total  # type: ignore[no-any-return]

    def linear_preference_loss(
        self, hidden: Array, weight: Array, target: Array, reference: Array | None = None,
        bias: Array | None = None, *, kind: str = "dpo", beta: float = 0.1, alpha: float = 0.0, gamma: float = 0.5,
        label_smoothing: float = 0.0, tau: float = 0.05, average: bool | None = None,
        desirable: Array | None = None, kl: Any = 0.0, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: Any = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The loss of preferences between sequences, without ever holding all logits.

        With ``c``, ``r`` the log-probabilities of a pair's chosen and rejected sequence, averaged over tokens for ORPO
        and SimPO, those of the reference model subtracted but for ORPO, SimPO and CPO, and ``d = beta * (c - r)``:

        - ``dpo``: ``-logsigmoid(d)``, with ``label_smoothing`` conservative DPO
        - ``ipo``: ``(c - r - 1 / (2 * beta))^2``
        - ``cpo``: as ``dpo``, without a reference
        - ``simpo``: ``-logsigmoid(d - gamma)``
        - ``orpo``: ``-beta * logsigmoid(log(odds(c) / odds(r)))``
        - ``hinge``: ``max(1 - d, 0)``, of SLiC and, without a reference, of CPO
        - ``robust``: ``((e - 1) * logsigmoid(d) + e * logsigmoid(-d)) / (1 - 2 * e)`` with ``e = label_smoothing``
        - ``exo_pair``: the divergence of ``(sigmoid(d), sigmoid(-d))`` from ``(1 - e, e)``
        - ``nca_pair``: ``-logsigmoid(beta * c) - (logsigmoid(-beta * c) + logsigmoid(-beta * r)) / 2``
        - ``bco_pair``: ``-logsigmoid(beta * c) - logsigmoid(-beta * r)``
        - ``sppo_hard``: ``(c - 1 / (2 * beta))^2 + (r + 1 / (2 * beta))^2``
        - ``apo_zero``: ``sigmoid(-beta * c) + sigmoid(beta * r)``
        - ``apo_down``: ``sigmoid(beta * c) + sigmoid(-d)``
        - ``discopop``: ``-logsigmoid(d) * (1 - w) + exp(-d) * w`` with ``w = sigmoid(d / tau)``
        - ``kto``: ``1 - sigmoid(beta * (c - kl))`` of a desirable sequence, ``1 - sigmoid(beta * (kl - c))`` of another

        The mean over pairs, of KTO over sequences, plus ``alpha`` times the mean loss of the chosen tokens.

        Args:
            hidden: ``T[2b s h]``: all chosen sequences, then the rejected ones in the same order; ``T[b s h]`` for KTO.
            weight: ``T[n h]``.
            target: integers ``[2b s]``.
            reference: float32 ``[2b]``: log-probabilities of the sequences under the reference model, which
                :func:`linear_log_probs` gives; for all but ORPO, SimPO and CPO. No gradient is computed.
            bias: ``T[n]``.
            kind: one of those above.
            beta: the temperature of preferences; of ORPO the weight of its loss.
            alpha: weight of the loss of the chosen tokens, which ORPO and CPO have as 1.
            gamma: the margin of SimPO.
            label_smoothing: how often preferences are wrong; for DPO, CPO, SimPO, ``robust`` and ``exo_pair``; 0
                for others.
            tau: the temperature of DiscoPOP's weights.
            average: divide log-probabilities by the number of tokens that are not ignored; None: of ORPO and SimPO.
            desirable: bools ``[b]``, for KTO.
            kl: the reference point of KTO.
            ignore_index: the target of tokens that do not count.
            temperature: divides the logits.
            accum_dtype: as in :func:`linear_cross_entropy`.

        Returns:
            ``(loss, log_probs)``: a float32 scalar, and the sequences' log-probabilities, float32 ``[2b]``.

        Raises:
            ValueError: another kind, a reference or ``desirable`` that is missing, an odd number of sequences, a
                ``label_smoothing`` out of the kind's range.

        Source: Rafailov et al., DPO, 2023; Azar et al., IPO, 2023; Zhao et al., SLiC-HF, 2023; Hong et al., ORPO, 2024;
        Meng et al., SimPO, 2024; Xu et al., CPO, 2024; Ethayarajh et al., KTO, 2024; Chowdhury et al., Robust DPO,
        2024; Ji et al., EXO, 2024; Chen et al., NCA, 2024; Jung et al., BCO, 2024; Wu et al., SPPO, 2024;
        D'Oosterlinck et al., APO, 2024; Lu et al., DiscoPOP, 2024.
        """
        function, labels = "linear_preference_loss", self._array(target)
        count = self._check_preference(function, kind, labels, reference, desirable, label_smoothing)
        self._check_finite(function, beta=beta, alpha=alpha, gamma=gamma, tau=tau, kl=kl)
        if divisor := preferences.DIVISORS.get(kind):
            self._check_divisor(function, divisor, beta if divisor == "beta" else tau, f" for {kind!r}")
        if average is None:
            average = kind in preferences.AVERAGED
        self._check_type(function, "average", average, bool)
        tokens, kept = self._tokens(function, (hidden, weight, labels, bias), ignore_index, temperature, accum_dtype)
        log_probs = tokens.sum(-1)
        if average:
            log_probs = log_probs / kept.sum(-1)
        ratios = log_probs
        if kind not in preferences.ALONE and reference is not None:
            ratios = log_probs - self._numbers(function, "reference", reference, labels.shape[:1], hidden)
        if kind == "kto":
            wanted = self._numbers(function, "desirable", desirable, labels.shape[:1], hidden)
            losses = preferences.kto(self._xp, ratios, wanted, beta, kl)
        else:
            options = preferences.Options(beta, gamma, label_smoothing, tau)
            losses = preferences.PAIRS[kind](self._xp, ratios[:count], ratios[count:], options)
        loss = losses.mean()
        if alpha:
            loss = loss - alpha * tokens[:count].sum() / kept[:count].sum()
        return loss, log_probs

    def linear_policy_loss(
        self, hidden: Array, weight: Array, target: Array, advantages: Array, old: Array | None = None,
        reference: Array | None = None, *, bias: Array | None = None, kind: str = "grpo", beta: float = 0.04,
        clip_low: float = 0.2, clip_high: float = 0.2, ratio_bound: float | None = None, level: str = "token",
        token_weights: Array | None = None, max_tokens: int = 0, num_tokens: Any = None, ignore_index: int = -100,
        temperature: float = 1.0, accum_dtype: Any = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The clipped loss of a policy on sampled tokens, without ever holding all logits: GRPO and its kin.

        ``ratio = exp(log_prob - old)``; of a token ``-min(min(ratio, ratio_bound) * a, clip(ratio, 1 - clip_low,
        1 + clip_high) * a) * token_weight + beta * (exp(reference - log_prob) - (reference - log_prob) - 1)``. CISPO
        has ``-min(ratio, 1 + clip_high) * a * log_prob``, of a ratio without a gradient, in place of the smaller one.

        Args:
            hidden: ``T[b s h]``.
            weight: ``T[n h]``.
            target: integers ``[b s]``: the sampled tokens; ``ignore_index`` for those of the prompt.
            advantages: float32 ``[b]``.
            old: float32 ``[b s]``: log-probabilities when the tokens were sampled; those of now, without their
                gradient, where None.
            reference: float32 ``[b s]``: log-probabilities under the reference model; without it there is no such term.
            bias: ``T[n]``.
            kind: ``"grpo"``: the mean over sequences of the means over their tokens; ``"bnpo"``: the mean over all
                tokens; ``"dr_grpo"``: the sum over ``b * max_tokens``; ``"dapo"``, ``"cispo"``: the sum over
                ``num_tokens``.
            beta: weight of the divergence from the reference.
            clip_low, clip_high: how far the ratio may go.
            ratio_bound: the largest ratio of tokens with a negative advantage, which nothing else bounds.
            level: ``"sequence"`` takes the geometric mean of a sequence's ratios for each of its tokens, as GSPO.
            token_weights: float32 ``[b s]``: factors of tokens' losses, as those for what samples tokens in another
                precision; not of the divergence. No gradient is computed.
            max_tokens: for ``"dr_grpo"``; s where 0.
            num_tokens: for ``"dapo"`` and ``"cispo"``: a number, such as the tokens of all steps whose gradients are
                added up; those of the call where None.
            ignore_index: the target of tokens that do not count.
            temperature: divides the logits.
            accum_dtype: as in :func:`linear_cross_entropy`.

        Returns:
            ``(loss, log_probs)``: a float32 scalar, and the tokens' log-probabilities, float32 ``[b s]``.

        Raises:
            ValueError: another kind or level, CISPO of sequences' ratios.

        Source: Shao et al., DeepSeekMath, 2024; Liu et al., Understanding R1-Zero-Like Training, 2025; Yu et al., DAPO,
        2025; Zheng et al., GSPO, 2025; Chen et al., MiniMax-M1 (CISPO), 2025.
        """
        function, xp, labels = "linear_policy_loss", self._xp, self._array(target)
        self._check_kind(function, kind, POLICIES)
        self._check_kind(function, level, LEVELS[: 1 if kind == "cispo" else 2], "level")
        self._check_most(function, max_tokens)
        self._check_finite(function, beta=beta, num_tokens=num_tokens)
        bounds: dict[str, Any] = {"clip_low": clip_low, "clip_high": clip_high, "ratio_bound": ratio_bound}
        for name, bound in bounds.items():
            if isinstance(bound, Real) and bound not in (inf, -inf):  # infinity bounds nothing
                self._check_finite(function, **{name: bound})
        self._check_dims(function, labels)
        gain = self._numbers(function, "advantages", advantages, labels.shape[:1], hidden)[:, None]
        earlier, reference, factor = (
            None if given is None else self._numbers(function, name, given, labels.shape, hidden)
            for name, given in (("old", old), ("reference", reference), ("token_weights", token_weights))
        )
        tokens, kept = self._tokens(function, (hidden, weight, labels, bias), ignore_index, temperature, accum_dtype)
        # What is given for ignored tokens may be anything.
        earlier, reference, factor = (
            given if given is None else xp.where(kept != 0, given, 0 * kept) for given in (earlier, reference, factor)
        )
        further = tokens - (constant(xp, tokens) if earlier is None else earlier)
        if level == "sequence":
            further = ((further * kept).sum(-1) / self._least(kept.sum(-1)))[:, None]
        ratio = xp.exp(further)
        if kind == "cispo":
            losses = -constant(xp, xp.clip(ratio, None, 1 + clip_high)) * gain * tokens
        else:
            free = ratio if ratio_bound is None else xp.clip(ratio, None, ratio_bound)
            losses = -xp.minimum(free * gain, xp.clip(ratio, 1 - clip_low, 1 + clip_high) * gain)
        if factor is not None:
            losses = losses * factor
        if reference is not None and beta:
            apart: Any = reference - tokens
            losses = losses + beta * (xp.exp(apart) - apart - 1)
        losses = losses * kept
        return self._over_tokens(kind, losses, kept, max_tokens, num_tokens), tokens

    def linear_distillation_loss(
        self, hidden: Array, weight: Array, teacher_hidden: Array, teacher_weight: Array, target: Array | None = None,
        bias: Array | None = None, *, teacher_bias: Array | None = None, beta: float = 0.5, temperature: float = 1.0,
        hard: Any = 0.0, soft: Any = 1.0, ignore_index: int = -100, chunk_rows: int = 0,
        accum_dtype: Any = None,
    ) -> Array:  # fmt: skip
        """The divergence of a student's head from a teacher's, without ever holding all logits of either.

        ``soft`` times the mean of :func:`divergence` over the tokens that are not ignored, plus ``hard`` times the mean
        cross entropy of the target

        The gradients are computed in the forward, from logits that are computed once: four products with the divergence
        and the cross entropy together, two where no gradient is wanted. In float16 the backward computes the logits
        again, so that their gradient is multiplied by the loss' scale before it is rounded.

        Memory in PyTorch, beyond inputs and gradients, at 8192 x 2048 x 128256 in bfloat16: 1.05 GB for the weight's
        gradient in float32; both heads' logits of a chunk of 1024 rows lie in the memory of its bfloat16 result. At
        8192 x 4096 x 32000: 0.26 GB for the student's logits of half of the rows.

        Args:
            hidden: ``T[*m h]``.
            weight: ``T[n h]``.
            teacher_hidden: ``T[*m i]``; no gradient.
            teacher_weight: ``T[n i]``; no gradient.
            target: integers ``[*m]``; all tokens count where None.
            bias: ``T[n]``, of the student.
            teacher_bias: ``T[n]``; no gradient.
            beta: 0 is the forward Kullback-Leibler divergence, 1 the reverse one, between the generalised
                Jensen-Shannon divergence.
            temperature: divides both logits, for the divergence.
            hard: weight of the cross entropy: a number, or an array without dims, which may want a gradient.
            soft: weight of the divergence, likewise; with an array the student's logits are computed once for each.
            ignore_index: the target of tokens that do not count.
            chunk_rows: rows whose logits are held at a time; 0 chooses.
            accum_dtype: as in :func:`linear_cross_entropy`, but in PyTorch None rounds the weight's gradient twice,
                once for each half of the rows, where that takes less memory than its sum in float32.

        Returns:
            A float32 scalar.

        Raises:
            TypeError: dtypes that differ or are not listed.
            ValueError: shapes that do not fit, an attribute out of its range, ``hard`` without a target.

        Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015; Agarwal et al., On-Policy
        Distillation of Language Models, 2023.
        """
        function, xp = "linear_distillation_loss", self._xp
        self._check_factors(function, hard=hard, soft=soft)
        self._check_finite(function, hard=hard, soft=soft)
        constants = isinstance(hard, Real) and isinstance(soft, Real)
        has_hard = not isinstance(hard, Real) or bool(hard)
        if has_hard and target is None:
            raise ValueError(f"cute.{function}: option `hard` is {hard}, which needs the argument `target`.")
        self._check_type(function, "ignore_index", ignore_index, int)
        heads = [self._array(a) for a in (hidden, weight, teacher_hidden, teacher_weight)]
        if not heads[0].shape:
            raise ValueError(f"cute.{function}: argument `hidden` has 0 dims, expected at least 1: T[*m h].")
        rows = heads[0].shape[:-1]
        labels = None if target is None else self._numbers(function, "target", target, rows, heads[0])
        like: Any = heads[0][..., :1].sum(-1) if labels is None else labels
        zeros: Any = xp.zeros_like(like, dtype=xp.float32)
        kept = zeros == 0 if labels is None else labels != ignore_index
        accum = AUTO if accum_dtype is None else _named(accum_dtype)
        count, options = xp.where(kept, zeros + 1, zeros).sum(), (beta, temperature, accum, chunk_rows)
        of_rows, total = self._distillation
        apart = None
        if _named(heads[0].dtype) == "float16":
            apart = xp.where(kept, of_rows(*heads, bias, teacher_bias, *options), zeros).sum() / count
        elif not constants:  # arrays, which may want gradients
            weights = [xp.where(kept, 1 / count, zeros), None, None]
            apart = total(*heads, *weights, bias, teacher_bias, *options) + 0 / count
        if apart is not None:
            loss = soft * apart
            return loss + hard * self._losses(hidden, weight, target, bias, ignore_index) if has_hard else loss  # type: ignore[no-any-return]
        weights = [xp.where(kept, soft / count, zeros), None, None]
        if has_hard:
            known = (like >= 0) & (like < heads[1].shape[0])
            weights[1:] = [xp.where(kept, xp.where(known, hard / count, xp.nan), zeros), labels]
        return total(*heads, *weights, bias, teacher_bias, *options) + 0 / count  # type: ignore[no-any-return]

    # --- parts -------------------------------------------------------------------------------------------------------

    def _tokens(
        self, function: str, head: tuple[Any, ...], ignore_index: int, temperature: Any, accum_dtype: Any = None
    ) -> tuple[Any, Any]:  # fmt: skip
        """The log-probability of each token, 0 where it is ignored, and whether it counts, in float32."""
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            raise TypeError(f"cute.{function}: option `temperature` must be float, got {shown(temperature)}.")
        if not _is_between(temperature, 1 / MOST_FACTOR, MOST_FACTOR):
            problem = f"option `temperature` is {shown(temperature)}, expected a positive number, 2^-126 to 2^126."
            raise ValueError(f"cute.{function}: {problem}")
        options = {"logit_scale": 1.0 / float(temperature), "accum_dtype": accum_dtype}
        loss = self._losses(*head, ignore_index, reduction="none", **options)
        return -loss, 0 * constant(self._xp, loss) + (head[2] != ignore_index)

    def _over_tokens(self, kind: str, losses: Any, kept: Any, max_tokens: int, num_tokens: Any) -> Any:
        """The loss of a policy, from those of tokens, which are 0 where tokens are ignored."""
        if kind == "grpo":
            return (losses.sum(-1) / self._least(kept.sum(-1))).mean()
        if kind == "dr_grpo":
            return losses.sum() / (losses.shape[0] * (max_tokens or losses.shape[1]))
        count = kept.sum() if num_tokens is None or kind == "bnpo" else 0 * kept.sum() + num_tokens
        return losses.sum() / self._least(count)

    def _least(self, count: Any) -> Any:
        """At least one, for sequences without tokens."""
        return self._xp.where(count < 1, count * 0 + 1, count)

    def _check_kind(self, name: str, kind: str, kinds: tuple[str, ...], option: str = "kind") -> None:
        if kind not in kinds:
            known = " or ".join(filter(None, (", ".join(map(repr, kinds[:-1])), repr(kinds[-1]))))
            raise ValueError(f"cute.{name}: option `{option}` is {shown(kind)}, expected {known}.")

    def _check_type(self, function: str, option: str, value: Any, kind: type) -> None:
        """Raise TypeError unless a value is a bool, or an integer of any type that is none."""
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, Integral):
            raise TypeError(f"cute.{function}: option `{option}` must be {kind.__name__}, got {shown(value)}.")

    def _check_most(self, function: str, max_tokens: int) -> None:
        """Raise unless this is a number of tokens, or 0."""
        self._check_type(function, "max_tokens", max_tokens, int)
        if max_tokens < 0:
            raise ValueError(f"cute.{function}: option `max_tokens` is {max_tokens}, expected at least 0.")

    def _check_dims(self, function: str, target: Any) -> None:
        """Raise ValueError unless targets are those of sequences."""
        if len(target.shape) != 2:
            raise ValueError(f"cute.{function}: argument `target` has {len(target.shape)} dims, expected 2: I[b s].")

    def _check_finite(self, function: str, **options: Any) -> None:
        """Raise ValueError for numbers that are NaN, or beyond those of a loss in float32. Arrays are not looked at."""
        for name, value in options.items():
            if isinstance(value, Real) and not _is_between(value, *TERM):
                expected = f"a finite number, from {TERM[0]:g} to {TERM[1]:g}"
                raise ValueError(f"cute.{function}: option `{name}` is {shown(value)}, expected {expected}.")

    def _check_divisor(self, function: str, name: str, value: Any, of: str = "") -> None:
        """Raise ValueError for a number by which float32 cannot divide, such as 0. Arrays are not looked at."""
        if isinstance(value, Real) and not _is_between(abs(value), 1 / MOST_FACTOR, MOST_FACTOR):
            expected = f"2^-126 to 2^126{of}: the loss divides by it, in float32"
            raise ValueError(f"cute.{function}: option `{name}` is {shown(value)}, expected {expected}.")

    def _check_factors(self, function: str, **factors: Any) -> None:
        """Raise unless these options are numbers, or arrays without dims."""
        for name, value in factors.items():
            if not isinstance(value, Real):
                if (shape := getattr(value, "shape", None)) is None:
                    expected = "a number, or an array without dims"
                    raise TypeError(f"cute.{function}: option `{name}` must be {expected}, got {shown(value)}.")
                if len(shape):
                    raise ValueError(f"cute.{function}: option `{name}` has the shape {[*shape]}, expected [].")

    def _numbers(self, function: str, name: str, given: Any, shape: Sequence[Any], hidden: Any) -> Any:
        """An argument as an array of one real number, or bool, for each sequence or token, where ``hidden`` is."""
        array, expected = self._array(given), [*shape]
        if [*array.shape] != expected:
            problem = f"argument `{name}` has the shape {[*array.shape]}, expected {expected}."
            raise ValueError(f"cute.{function}: {problem}")
        if (device := self._device(array)) != (expects := self._device(hidden)):
            raise ValueError(f"cute.{function}: argument `{name}` is on {device}, but `hidden` is on {expects}.")
        dtype = _named(array.dtype)
        if name == "target" and dtype not in ("int64", "int32"):
            raise TypeError(f"cute.{function}: argument `target` has dtype {dtype}, expected int64 or int32.")
        if dtype.startswith(("complex", "float8")) or (dtype == "bool") != (name == "desirable"):
            expects = "bool" if name == "desirable" else "float32"
            raise TypeError(f"cute.{function}: argument `{name}` has dtype {dtype}, expected {expects}.")
        return array

    def _check_preference(
        self, name: str, kind: str, target: Any, reference: Any, desirable: Any, label_smoothing: float
    ) -> int:  # fmt: skip
        """The number of pairs, or of KTO's sequences."""
        self._check_kind(name, kind, PREFERENCES)
        self._check_dims(name, target)
        if kind not in (*preferences.ALONE, "hinge") and reference is None:
            raise ValueError(f"cute.{name}: argument `reference` is None, which {kind!r} needs.")
        if kind == "kto" and desirable is None:
            raise ValueError(f"cute.{name}: argument `desirable` is None, which 'kto' needs.")
        text, inside = preferences.SMOOTHED.get(kind, preferences.PLAIN)
        if not inside(label_smoothing):
            problem = f"option `label_smoothing` is {shown(label_smoothing)}, expected {text} for {kind!r}."
            raise ValueError(f"cute.{name}: {problem}")
        sequences = int(target.shape[0])
        if kind != "kto" and sequences % 2:
            problem = f"argument `target` has {sequences} sequences, which are no pairs of chosen and rejected ones."
            raise ValueError(f"cute.{name}: {problem}")
        return sequences if kind == "kto" else sequences // 2
