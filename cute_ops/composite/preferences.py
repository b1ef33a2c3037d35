"""Losses of preferences between two sequences, from their log-probabilities, for the arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Options(NamedTuple):
    """Numbers of a loss.

    Attributes:
        beta: the temperature of preferences; of ORPO the weight of its loss.
        gamma: the margin of SimPO.
        smoothing: how often preferences are wrong.
        tau: the temperature of DiscoPOP's weights.
    """

    beta: float
    gamma: float
    smoothing: float
    tau: float


def logsigmoid(xp: Any, x: Any) -> Any:
    return (x - abs(x)) / 2 - xp.log1p(xp.exp(-abs(x)))


def sigmoid(xp: Any, x: Any) -> Any:
    return xp.exp(logsigmoid(xp, x))


def _smoothed(xp: Any, x: Any, smoothing: float) -> Any:
    return -logsigmoid(xp, x) * (1 - smoothing) - logsigmoid(xp, -x) * smoothing


def _logistic(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return _smoothed(xp, o.beta * (c - r), o.smoothing)


def _simpo(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return _smoothed(xp, o.beta * (c - r) - o.gamma, o.smoothing)


def _ipo(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return (c - r - 1 / (2 * o.beta)) ** 2


def _orpo(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return -o.beta * logsigmoid(xp, log_odds(xp, c, r))


def log_odds(xp: Any, c: Any, r: Any) -> Any:
    """The logarithm of the odds' ratio."""
    return (c - r) - (xp.log(-xp.expm1(c)) - xp.log(-xp.expm1(r)))


def _hinge(xp: Any, c: Any, r: Any, o: Options) -> Any:
    missing = 1 - o.beta * (c - r)
    return xp.where(missing > 0, missing, 0 * missing)


def _robust(xp: Any, c: Any, r: Any, o: Options) -> Any:
    # What wrong preferences take away on average is added again.
    return _smoothed(xp, o.beta * (c - r), -o.smoothing / (1 - 2 * o.smoothing))


def _exo_pair(xp: Any, c: Any, r: Any, o: Options) -> Any:
    x = o.beta * (c - r)
    right, wrong = logsigmoid(xp, x), logsigmoid(xp, -x)
    share: Any = 0 * x + o.smoothing
    return xp.exp(right) * (right - xp.log1p(-share)) + xp.exp(wrong) * (wrong - xp.log(share))


def _nca_pair(xp: Any, c: Any, r: Any, o: Options) -> Any:
    c, r = o.beta * c, o.beta * r
    return -logsigmoid(xp, c) - (logsigmoid(xp, -c) + logsigmoid(xp, -r)) / 2


def _bco_pair(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return -logsigmoid(xp, o.beta * c) - logsigmoid(xp, -o.beta * r)


def _sppo_hard(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return (c - 1 / (2 * o.beta)) ** 2 + (r + 1 / (2 * o.beta)) ** 2


def _apo_zero(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return sigmoid(xp, -o.beta * c) + sigmoid(xp, o.beta * r)


def _apo_down(xp: Any, c: Any, r: Any, o: Options) -> Any:
    return sigmoid(xp, o.beta * c) + sigmoid(xp, -o.beta * (c - r))


def _discopop(xp: Any, c: Any, r: Any, o: Options) -> Any:
    x = o.beta * (c - r)
    # The power of -x overflows where its share is 0.
    share = logsigmoid(xp, x / o.tau)
    return -logsigmoid(xp, x) * (1 - xp.exp(share)) + xp.exp(share - x)


Pair = Callable[[Any, Any, Any, Options], Any]
# By kind: of the log-probabilities of a chosen and a rejected sequence, or what they are above a reference model's.
PAIRS: Mapping[str, Pair] = {
    "dpo": _logistic, "ipo": _ipo, "orpo": _orpo, "simpo": _simpo, "cpo": _logistic, "hinge": _hinge,
    "robust": _robust, "exo_pair": _exo_pair, "nca_pair": _nca_pair, "bco_pair": _bco_pair, "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero, "apo_down": _apo_down, "discopop": _discopop,
}  # fmt: skip
KINDS = (*PAIRS, "kto")
# Kinds without a reference model, and kinds whose log-probabilities are means over tokens.
ALONE, AVERAGED = ("orpo", "simpo", "cpo"), ("orpo", "simpo")
# By kind: the range of ``label_smoothing`` in words, and whether a number is in it.
SMOOTHED: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("dpo", "cpo", "simpo"), ("from 0 to 1", lambda share: 0 <= share <= 1)),
    "robust": ("at least 0 and below 0.5", lambda share: 0 <= share < 0.5),
    "exo_pair": ("at least 2^-126 and below 1", lambda share: 2**-126 <= share < 1),
}
# By kind: the option that its loss divides by.
DIVISORS = {"ipo": "beta", "sppo_hard": "beta", "discopop": "tau"}
PLAIN: tuple[str, Callable[[float], bool]] = ("0", lambda share: share == 0)  # of other kinds


def kto(xp: Any, ratios: Any, desirable: Any, beta: float, kl: Any) -> Any:
    """The loss of each sequence."""
    logits = beta * (ratios - kl)
    return 1 - sigmoid(xp, xp.where(desirable, logits, -logits))
