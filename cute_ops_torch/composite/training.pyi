"""Losses of preferences, policies and distillation: :mod:`cute_ops.composite.training`. Made by ``python -m cute_ops_torch.tools.stubs``."""

from typing import Any

from torch import Tensor

def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    average: bool = False,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> Tensor:
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

def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    reference: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str = "dpo",
    beta: float = 0.1,
    alpha: float = 0.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    tau: float = 0.05,
    average: bool | None = None,
    desirable: Tensor | None = None,
    kl: Any = 0.0,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: Any = None,
) -> tuple[Tensor, Tensor]:
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

def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    kind: str = "grpo",
    beta: float = 0.04,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_bound: float | None = None,
    level: str = "token",
    token_weights: Tensor | None = None,
    max_tokens: int = 0,
    num_tokens: Any = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: Any = None,
) -> tuple[Tensor, Tensor]:
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

def linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    hard: Any = 0.0,
    soft: Any = 1.0,
    ignore_index: int = -100,
    chunk_rows: int = 0,
    accum_dtype: Any = None,
) -> Tensor:
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
