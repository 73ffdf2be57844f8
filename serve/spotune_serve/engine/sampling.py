"""Choose the next token from one row of logits. Every function is pure.

A sampled token is the argmax of logits plus Gumbel noise, which draws from the softmax (Gumbel-max trick, Maddison et
al. 2014). The noise of a token depends only on the seed, the position and the token's id. If the logits of two replicas
differ in the last digits, they therefore almost always draw the same token: the probability of another one is at most
twice the total variation between the two distributions (Daliri et al. 2025, "Coupling without communication and
drafter-invariant speculative decoding").
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spotune_serve.engine.base import SamplingParams, TokenLogprob

Row = NDArray[np.float64]
Tokens = NDArray[np.intp]

_NUCLEUS_PREFIX = 1024
"""The nucleus is first searched in this many most likely tokens: sorting a whole vocabulary takes milliseconds."""


def next_token(logits: Row, params: SamplingParams, counts: Mapping[int, int], position: int) -> int:
    """The next token: the most likely one if the temperature is 0, else a sample.

    Args:
        logits: of the whole vocabulary [vocabulary]; not changed.
        params: how to choose.
        counts: how often each token was generated so far.
        position: number of tokens generated so far.

    Raises:
        ValueError: a logit is not a number, or no token is possible.
    """
    if np.isnan(logits).any():
        raise ValueError("the model's logits are not numbers (NaN)")
    row = biased(logits, params, counts)
    if params.temperature == 0:
        return int(row.argmax())
    if row.max() == -np.inf:
        raise ValueError("every token is forbidden by the model's generation settings and the logit bias")
    scores = (row - row.max()) / params.temperature
    tokens = candidates(scores, params)
    return int(tokens[(scores[tokens] + gumbel_noise(params.seed, position, tokens)).argmax()])


def biased(logits: Row, params: SamplingParams, counts: Mapping[int, int]) -> Row:
    """Logits [vocabulary] after logit bias, presence penalty and frequency penalty."""
    row = logits.copy()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if params.presence_penalty or params.frequency_penalty:
        for token, count in counts.items():
            row[token] -= params.presence_penalty + params.frequency_penalty * count
    return row


def candidates(scores: Row, params: SamplingParams) -> Tokens:
    """The ids of the tokens that can be sampled, after min_p, top_k and top_p in this order.

    Args:
        scores: logits over temperature [vocabulary]; the largest is 0.
        params: the three limits.
    """
    tokens: Tokens = np.flatnonzero(scores >= (np.log(params.min_p) if params.min_p > 0 else np.finfo(np.float64).min))
    if 0 < params.top_k < len(tokens):
        tokens = _largest(scores, tokens, params.top_k)
    if params.top_p < 1:
        tokens = _nucleus(scores, tokens, params.top_p)
    return tokens


def gumbel_noise(seed: int, position: int, tokens: Tokens) -> Row:
    """Independent Gumbel(0, 1) variables, one for each of the given token ids [tokens].

    Philox is a counter-based generator (Salmon et al. 2011). The seed is its key, and the position is in the high half
    of its counter, so the noise of two positions never overlaps. Only its raw bits are used: NumPy keeps those equal
    between versions.
    """
    generator = np.random.Philox(key=seed % 2**128, counter=position << 128)
    bits: NDArray[np.uint64] = np.asarray(generator.random_raw(int(tokens.max()) + 1), dtype=np.uint64)[tokens]
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1): neither logarithm is infinite
    noise: Row = -np.log(-np.log(uniform))
    return noise


def log_probabilities(logits: Row, token: int, top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
    """The natural log probability of a token, and those of the most likely tokens, the likeliest first.

    Args:
        logits: unmodified logits [vocabulary].
        token: the chosen token.
        top: number of most likely tokens.
    """
    largest = logits.max()
    normalizer = largest + np.log(np.exp(logits - largest).sum())
    likeliest = _largest(logits, np.arange(len(logits)), min(top, len(logits))) if top > 0 else np.arange(0)
    return float(logits[token] - normalizer), tuple(
        TokenLogprob(int(other), float(logits[other] - normalizer)) for other in likeliest
    )


def _largest(scores: Row, tokens: Tokens, count: int) -> Tokens:
    """The `count` tokens with the largest scores, in descending order; of equal scores, the lower ids."""
    threshold = np.partition(scores[tokens], -count)[-count]
    above = tokens[scores[tokens] > threshold]
    equal = tokens[scores[tokens] == threshold]
    chosen = np.concatenate([above, equal[: count - len(above)]])
    ordered: Tokens = chosen[np.lexsort((chosen, -scores[chosen]))]
    return ordered


def _nucleus(scores: Row, tokens: Tokens, top_p: float) -> Tokens:
    """The fewest tokens whose probabilities add up to at least `top_p` (Holtzman et al. 2020); at least one."""
    total = np.exp(scores[tokens]).sum()
    for count in (_NUCLEUS_PREFIX, len(tokens)):
        ordered = _largest(scores, tokens, min(count, len(tokens)))
        cumulative = np.exp(scores[ordered]).cumsum() / total
        if cumulative[-1] >= top_p:
            return ordered[: int(np.searchsorted(cumulative, top_p)) + 1]
    return tokens
