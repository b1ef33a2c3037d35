"""Losses of Liger Kernel 0.8 on a linear head (``liger_kernel.chunked_loss``), by our ops.

Ours choose their chunks and compile nothing: ``chunk_size`` and ``compiled`` change no result. What is returned beside
a loss has no gradient, as Liger's. Losses are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

import cute_ops_torch
from cute_ops.composite.preferences import SMOOTHED, log_odds, logsigmoid
from cute_ops_torch.compat.refusal import missing, one_of, only
from cute_ops_torch.composite.autocast import autocast_given

Tensor = torch.Tensor
Reference = tuple[Tensor | None, Tensor | None, Tensor | None]
__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]
__getattr__ = missing(__name__, __all__, {})
# Kinds of DPO by Liger's names.
DPO = {"sigmoid": "dpo"} | {
    name: name
    for name in (
        "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
    )
}  # fmt: skip
POLICIES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")


# --- preferences -----------------------------------------------------------------------------------------------------


class _Preference(nn.Module):
    """A loss of pairs, whose chosen sequences come first.

    Attributes:
        kind: as :func:`cute_ops_torch.linear_preference_loss` calls it.
        average: whether log-probabilities are means over tokens.
    """

    kind: str
    average = True
    ignore_index: int
    beta: float
    alpha: float
    compute_nll_loss: bool

    def _loss(
        self, weight: Tensor, hidden: Tensor, target: Tensor, bias: Tensor | None, reference: Tensor | None = None,
        nll_target: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``(loss, (chosen log-probabilities, rejected ones, mean logits of both, the chosen tokens' loss, rewards of
        both))``.
        """
        pairs, other = len(target) // 2, nll_target is not None
        hidden, weight, bias = autocast_given(hidden, weight, bias)
        alpha = self.alpha if self.compute_nll_loss else 0.0
        loss, log_probs = cute_ops_torch.linear_preference_loss(
            hidden, weight, target, reference, bias, kind=self.kind, beta=self.beta, average=self.average,
            ignore_index=self.ignore_index, alpha=0.0 if other else alpha, **options,
        )  # fmt: skip
        log_probs = log_probs.detach()
        nll = torch.zeros_like(loss, requires_grad=False)
        if self.compute_nll_loss and nll_target is not None:
            of_chosen = hidden[:pairs], weight, nll_target[: len(nll_target) // 2], bias
            nll = cute_ops_torch.linear_cross_entropy(*of_chosen, ignore_index=self.ignore_index)
            loss = loss + self.alpha * nll
        elif self.compute_nll_loss:
            counts = (target[:pairs] != self.ignore_index).sum(-1)
            sums = (log_probs[:pairs] * counts).nan_to_num(0.0) if self.average else log_probs[:pairs]
            nll = -sums.sum() / counts.sum()
        rewards = self.beta * (log_probs if reference is None else log_probs - reference)
        logits = _sums_of_logits(hidden, weight, bias) / (pairs * target.shape[1] * len(weight))
        means = logits[:pairs].sum(), logits[pairs:].sum()
        return loss, (
            log_probs[:pairs], log_probs[pairs:], *means, nll.detach(), rewards[:pairs], rewards[pairs:]
        )  # fmt: skip


@torch.no_grad()
def _sums_of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of each sequence's logits, which is a product of sums."""
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + hidden.shape[1] * bias.sum(dtype=torch.float32)


@torch.no_grad()
def _of_reference(
    name: str, reference: Reference, target: Tensor, used: bool, *, ignore_index: int, average: bool
) -> Tensor:
    """The log-probabilities of sequences under a reference model, zeros without one."""
    hidden, weight, bias = reference
    if not used:
        return torch.zeros(len(target), device=target.device)
    if hidden is None or weight is None:
        raise ValueError(f"{name}: ref_input or ref_weight is None, which use_ref_model=True needs.")
    hidden, weight, bias = autocast_given(hidden, weight, bias)
    return cute_ops_torch.linear_log_probs(hidden, weight, target, bias, average=average, ignore_index=ignore_index)


class LigerFusedLinearDPOLoss(_Preference):
    """DPO and its kinds, all but IPO, as :func:`cute_ops_torch.linear_preference_loss` has them."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        one_of("LigerFusedLinearDPOLoss", "loss_type", loss_type, tuple(DPO))
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.compiled, self.chunk_size = compiled, chunk_size
        self.use_ref_model, self.average_log_prob, self.average = use_ref_model, average_log_prob, average_log_prob
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau
        self.kind = DPO[loss_type]

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``(loss, (log-probabilities of chosen and of rejected sequences, mean logits of both, the chosen tokens'
        loss, rewards of both))``.
        """
        reference = _of_reference(
            "LigerFusedLinearDPOLoss", (ref_input, ref_weight, ref_bias), target, self.use_ref_model,
            ignore_index=self.ignore_index, average=self.average,
        )  # fmt: skip
        # Liger's DPO without a kind does not smooth, and other kinds ignore it.
        smooths = self.loss_type != "sigmoid" and self.kind in SMOOTHED
        smoothing = self.label_smoothing if smooths else 0.0
        return self._loss(lin_weight, _input, target, bias, reference, label_smoothing=smoothing, tau=self.discopop_tau)


class LigerFusedLinearCPOLoss(_Preference):
    """CPO."""

    kind = "cpo"

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.label_smoothing, self.compiled, self.chunk_size = label_smoothing, compiled, chunk_size
        self.average_log_prob, self.average = average_log_prob, average_log_prob

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns what :class:`LigerFusedLinearDPOLoss` does."""
        return self._loss(lin_weight, _input, target, bias, label_smoothing=self.label_smoothing)


class LigerFusedLinearSimPOLoss(_Preference):
    """SimPO."""

    kind = "simpo"

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.label_smoothing, self.compiled, self.chunk_size = label_smoothing, compiled, chunk_size
        self.gamma = gamma

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns what :class:`LigerFusedLinearDPOLoss` does."""
        smoothing = self.label_smoothing
        return self._loss(lin_weight, _input, target, bias, label_smoothing=smoothing, gamma=self.gamma)


class LigerFusedLinearORPOLoss(_Preference):
    """ORPO."""

    kind, alpha = "orpo", 1.0

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss = ignore_index, beta, compute_nll_loss
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """Returns what :class:`LigerFusedLinearDPOLoss` does, and the means of the log-odds' sigmoid's logarithm and of
        the log-odds. ``nll_target`` has targets of all sequences, as ``target``.
        """
        if nll_target is not None and nll_target.shape != target.shape:
            shapes = f"{[*nll_target.shape]}, expected that of target, {[*target.shape]}"
            raise ValueError(f"LigerFusedLinearORPOLoss: nll_target has the shape {shapes}.")
        loss, more = self._loss(lin_weight, _input, target, bias, nll_target=nll_target)
        odds = log_odds(torch, more[0], more[1])
        return loss, (*more, logsigmoid(torch, odds).mean(), odds.mean())


class LigerFusedLinearKTOLoss(nn.Module):
    """KTO, of sequences that are no pairs."""

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.compiled, self.chunk_size = ignore_index, beta, compiled, chunk_size
        self.use_ref_model, self.average_log_prob = use_ref_model, average_log_prob

    def forward(
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``(loss, (sums over chosen and over rejected sequences of log-probabilities, of logits, of rewards))``."""
        if preference_labels is None:
            raise ValueError("LigerFusedLinearKTOLoss: preference_labels is None, expected a bool for each sequence.")
        average = self.average_log_prob
        _input, lin_weight, bias = autocast_given(_input, lin_weight, bias)
        reference = _of_reference(
            "LigerFusedLinearKTOLoss", (ref_input, ref_weight, ref_bias), target, self.use_ref_model,
            ignore_index=self.ignore_index, average=average,
        )  # fmt: skip
        loss, log_probs = cute_ops_torch.linear_preference_loss(
            _input, lin_weight, target, reference, bias, kind="kto", beta=self.beta, desirable=preference_labels,
            kl=0.0 if kl is None else kl.detach(), average=average, ignore_index=self.ignore_index,
        )  # fmt: skip
        log_probs = log_probs.detach()
        each = log_probs, _sums_of_logits(_input, lin_weight, bias), self.beta * (log_probs - reference)
        labels = preference_labels, ~preference_labels
        return loss, tuple((x * label).sum() for x in each for label in labels)


# --- policies --------------------------------------------------------------------------------------------------------


class LigerFusedLinearGRPOLoss(nn.Module):
    """GRPO, BNPO, Dr. GRPO, DAPO and CISPO; GSPO with ``importance_sampling_level="sequence"``."""

    def __init__(
        self, beta: float = 0.04, compiled: bool = True, use_ref_model: bool = True, chunk_size: int = 1,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, temperature: float = 1.0,
        delta: float | None = None, use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "LigerFusedLinearGRPOLoss"
        one_of(name, "loss_type", loss_type, POLICIES)
        levels = ("token",) if loss_type == "cispo" else ("token", "sequence")
        one_of(name, "importance_sampling_level", importance_sampling_level, levels)
        only(name, use_bias_correction_kl=(use_bias_correction_kl, False))
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError(f"{name}: max_completion_length is None, which loss_type='dr_grpo' needs.")
        if delta is not None and delta <= 0:
            raise ValueError(f"{name}: delta is {delta}, expected a positive number.")
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.importance_sampling_level = loss_type, importance_sampling_level
        self.max_completion_length, self.temperature = max_completion_length, temperature
        self.use_bias_correction_kl = use_bias_correction_kl
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """``(loss, metrics)``: the mean divergence from the reference, if ``beta`` is not 0, and the share of tokens
        whose ratio is clipped.
        """
        target = torch.where(attention_mask != 0, selected_token_ids, -100)
        _input, lin_weight, bias = autocast_given(_input, lin_weight, bias)
        reference = ref_per_token_logps if self.use_ref_model else None
        if self.use_ref_model and reference is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    "LigerFusedLinearGRPOLoss: neither ref_per_token_logps nor ref_input with ref_weight is given, "
                    "which use_ref_model=True needs."
                )
            ref_input, ref_weight, ref_bias = autocast_given(ref_input, ref_weight, ref_bias)
            with torch.no_grad():
                reference = cute_ops_torch.linear_log_probs(
                    ref_input[:, :, None], ref_weight, target[..., None], ref_bias, temperature=self.temperature
                )
        factor = vllm_is_ratio
        if factor is not None:
            factor = (factor[:, None] if factor.ndim == 1 else factor).expand(target.shape)
        ceiling = self.epsilon_high if self.loss_type == "cispo" else 1 + self.epsilon_high
        loss, tokens = cute_ops_torch.linear_policy_loss(
            _input, lin_weight, target, advantages, old_per_token_logps, reference, bias=bias, kind=self.loss_type,
            beta=self.beta, clip_low=self.epsilon_low, clip_high=ceiling - 1, ratio_bound=self.delta,
            level=self.importance_sampling_level, token_weights=factor,
            max_tokens=self.max_completion_length or 0, num_tokens=_tokens_of_all(target, num_items_in_batch),
            temperature=self.temperature,
        )  # fmt: skip
        return loss, self._metrics(tokens.detach(), target, advantages, old_per_token_logps, reference, ceiling)

    @torch.no_grad()
    def _metrics(
        self, tokens: Tensor, target: Tensor, advantages: Tensor, old: Tensor | None, reference: Tensor | None,
        ceiling: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kept = target != -100
        count = kept.sum().clamp(min=1)
        further = torch.zeros_like(tokens) if old is None else torch.where(kept, tokens - old, 0.0)
        if self.importance_sampling_level == "sequence":
            further = (further.sum(-1) / kept.sum(-1).clamp(min=1))[:, None]
        ratio, gain = further.exp(), advantages[:, None]
        clipped = (ratio > ceiling) & (gain > 0)
        if self.loss_type != "cispo":
            clipped = clipped | ((ratio < 1 - self.epsilon_low) & (gain < 0))
        found = [(clipped & kept).sum() / count]
        if self.beta:
            apart = torch.zeros_like(tokens) if reference is None else torch.where(kept, reference - tokens, 0.0)
            found.insert(0, (apart.exp() - apart - 1).sum() / count)
        return tuple(found)


def _tokens_of_all(target: Tensor, given: Tensor | float | None) -> Tensor | float | None:
    """A process's share of the tokens that losses of DAPO and CISPO are divided by."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return given
    if given is None:
        given = (target != -100).sum().float()
        distributed.all_reduce(given)
    return given / distributed.get_world_size()


# --- distillation ----------------------------------------------------------------------------------------------------


class LigerFusedLinearJSDLoss(nn.Module):
    """The generalised Jensen-Shannon divergence from a teacher, with the cross entropy of labels."""

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature = ignore_index, temperature
        self.compiled, self.chunk_size, self.return_soft_hard_loss = compiled, chunk_size, return_soft_hard_loss

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The loss, 0 where no token counts; with ``return_soft_hard_loss`` also its two parts."""
        student_input, student_weight, student_bias = autocast_given(student_input, student_weight, student_bias)
        teacher_input, teacher_weight, teacher_bias = autocast_given(teacher_input, teacher_weight, teacher_bias)
        student, teacher = (student_input, student_weight), (teacher_input, teacher_weight)
        any_counts = (true_labels != self.ignore_index).any()

        def loss(hard: float, soft: float) -> Tensor:
            found = cute_ops_torch.linear_distillation_loss(
                *student, *teacher, true_labels, student_bias, teacher_bias=teacher_bias, beta=self.beta,
                temperature=self.temperature, hard=hard, soft=soft, ignore_index=self.ignore_index,
            )  # fmt: skip
            return torch.where(any_counts, found, 0.0)

        if not self.return_soft_hard_loss:
            return loss(self.weight_hard_loss, self.weight_soft_loss)
        soft, hard = loss(0.0, 1.0), cute_ops_torch.linear_cross_entropy(
            *student, true_labels, student_bias, ignore_index=self.ignore_index
        )  # fmt: skip
        hard = torch.where(any_counts, hard, 0.0)
        return self.weight_hard_loss * hard + self.weight_soft_loss * soft, soft.detach(), hard.detach()
