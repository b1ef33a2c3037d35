"""Losses of preferences, policies and distillation: :mod:`cute_ops.composite.training`."""

import jax.numpy

from cute_ops.composite.public import published
from cute_ops.composite.training import Training
from cute_ops_jax.composite.losses import linear_cross_entropy
from cute_ops_jax.primitive.arrays import as_array, checked
from cute_ops_jax.primitive.function import register

_training = Training(jax.numpy, linear_cross_entropy, register, as_array, lambda array: None)
linear_log_probs = published(_training.linear_log_probs, __name__, "Array", checked)
linear_preference_loss = published(_training.linear_preference_loss, __name__, "Array", checked)
linear_policy_loss = published(_training.linear_policy_loss, __name__, "Array", checked)
linear_distillation_loss = published(_training.linear_distillation_loss, __name__, "Array", checked)
