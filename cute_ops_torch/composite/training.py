"""Losses of preferences, policies and distillation: :mod:`cute_ops.composite.training`."""

import torch

from cute_ops.composite.public import published
from cute_ops.composite.training import Training
from cute_ops_torch.composite.linear_cross_entropy import linear_cross_entropy
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import register

_training = Training(torch, linear_cross_entropy, register, lambda array: array, lambda array: array.device)
linear_log_probs = published(_training.linear_log_probs, __name__, "Tensor", checked)
linear_preference_loss = published(_training.linear_preference_loss, __name__, "Tensor", checked)
linear_policy_loss = published(_training.linear_policy_loss, __name__, "Tensor", checked)
linear_distillation_loss = published(_training.linear_distillation_loss, __name__, "Tensor", checked)
