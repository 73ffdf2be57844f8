from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotune_serve.engine.base import SamplingParams
from spotune_serve.engine.sampling import Row, biased, candidates, gumbel_noise, log_probabilities, next_token

_LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40).map(lambda values: np.array(values))


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "seed": 5, **values})


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    probabilities: Row = weights / weights.sum()
    return probabilities


@given(_LOGITS, st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.floats(0.01, 5), st.floats(0.01, 1))
def test_same_inputs_give_the_same_token(
    logits: Row, seed: int, position: int, temperature: float, top_p: float
) -> None:
    before = logits.copy()
    chosen = params(seed=seed, temperature=temperature, top_p=top_p, top_k=7, presence_penalty=0.5)
    tokens = {next_token(logits, chosen, {0: 2}, position) for _ in range(2)}
    assert len(tokens) == 1
    assert np.array_equal(logits, before)


@given(_LOGITS, st.integers(0, 2**64), st.integers(0, 1000))
def test_top_k_of_one_is_greedy(logits: Row, seed: int, position: int) -> None:
    sampled = next_token(logits, params(seed=seed, top_k=1, temperature=3.0), {}, position)
    assert sampled == next_token(logits, params(temperature=0.0), {}, position) == logits.argmax()


@given(_LOGITS, st.floats(0.05, 0.99))
def test_nucleus_is_the_smallest_set_that_reaches_top_p(logits: Row, top_p: float) -> None:
    scores = logits - logits.max()
    kept = candidates(scores, params(top_p=top_p))
    probabilities = softmax(logits)
    assert probabilities[kept].sum() >= top_p - 1e-9
    assert probabilities[kept].sum() - probabilities[kept].min() < top_p + 1e-9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_distributed_as_the_softmax(temperature: float) -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5])
    draws = 4_000
    found = Counter(next_token(logits, params(temperature=temperature), {}, position) for position in range(draws))
    frequencies = np.array([found[token] / draws for token in range(5)])
    assert np.abs(frequencies - softmax(logits / temperature)).max() < 0.03


def test_noise_of_neighbouring_positions_does_not_overlap() -> None:
    noise = [gumbel_noise(3, position, np.arange(64)) for position in range(8)]
    assert len({value for row in noise for value in row}) == 8 * 64
    assert abs(np.corrcoef(noise[0][4:], noise[1][:-4])[0, 1]) < 0.5


def test_noise_of_a_token_does_not_depend_on_the_other_candidates() -> None:
    assert np.array_equal(gumbel_noise(9, 4, np.arange(1000))[[7, 3]], gumbel_noise(9, 4, np.array([7, 3])))


def test_noise_is_the_same_in_every_release() -> None:
    assert gumbel_noise(1, 0, np.arange(2)) == pytest.approx([-0.17575800, 1.80764984], abs=1e-7)


def test_small_changes_of_the_logits_rarely_change_the_token() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=2000)
    noisy = logits + generator.normal(scale=1e-6, size=2000)
    tokens = [[next_token(row, params(), {}, position) for position in range(500)] for row in (logits, noisy)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 200


def test_top_k_keeps_the_lower_id_of_equal_logits() -> None:
    assert candidates(np.array([-1.0, 0.0, 0.0, 0.0, -2.0]), params(top_k=2)).tolist() == [1, 2]


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    scores = np.log(np.array([1.0, 0.5, 0.19, 0.21]))
    assert candidates(scores, params(min_p=0.2)).tolist() == [0, 1, 3]


def test_nucleus_of_a_large_flat_vocabulary_is_complete() -> None:
    assert len(candidates(np.zeros(5000), params(top_p=0.9))) == 4500


def test_penalties_and_bias_are_subtracted_from_and_added_to_the_logits() -> None:
    chosen = params(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={2: 3.0})
    assert biased(np.zeros(4), chosen, {0: 1, 1: 4}).tolist() == [-0.75, -1.5, 3.0, 0.0]


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = np.array([5.0, -np.inf, 1.0])
    assert {next_token(logits, params(temperature=100.0), {}, position) for position in range(200)} == {0, 2}


def test_tiny_temperature_is_greedy() -> None:
    logits = np.array([1.0, 1.1, -3.0])
    assert {next_token(logits, params(temperature=1e-300), {}, position) for position in range(50)} == {1}


@pytest.mark.parametrize("logits", [[0.0, np.nan], [-np.inf, -np.inf]])
def test_impossible_rows_are_an_error(logits: list[float]) -> None:
    with pytest.raises(ValueError, match=r"NaN|forbidden"):
        next_token(np.array(logits), params(), {}, 0)


def test_log_probabilities_are_natural_logarithms_of_the_softmax() -> None:
    logits = np.array([0.0, 2.0, 1.0])
    chosen, top = log_probabilities(logits, 0, 2)
    assert chosen == pytest.approx(np.log(softmax(logits)[0]))
    assert [(each.token, pytest.approx(each.logprob)) for each in top] == [
        (1, np.log(softmax(logits)[1])),
        (2, np.log(softmax(logits)[2])),
    ]


def test_log_probabilities_without_and_with_more_tokens_than_the_vocabulary() -> None:
    logits = np.array([0.0, 2.0, 1.0])
    assert log_probabilities(logits, 0, 0)[1] == ()
    assert [each.token for each in log_probabilities(logits, 0, 10)[1]] == [1, 2, 0]
