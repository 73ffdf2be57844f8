"""The interleaving of sources: the order of their times, exact shares, and the same result from any position."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from spotune_trainer.data.mixture_schedule import draws_between
from spotune_trainer.data.sampling.interleave import Interleave

LENGTH = 120
weights = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, 10**9), st.fractions(Fraction(1, 1000), 50)), min_size=1, max_size=7
).map(lambda values: [Fraction(value) for value in values])


def walk(shares: list[Fraction], length: int) -> list[tuple[int, int]]:
    """Source and draw of each position, found by always taking the draw with the lowest time."""
    drawn = [0] * len(shares)
    found = []
    for _ in range(length):
        source = min(range(len(shares)), key=lambda each: (Fraction(2 * drawn[each] + 1, 2) / shares[each], each))
        found.append((source, drawn[source]))
        drawn[source] += 1
    return found


@settings(deadline=None, max_examples=60)
@given(weights, st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_any_part_of_the_stream_is_that_of_a_walk_from_the_beginning(
    given: list[Fraction], one: int, other: int
) -> None:
    interleave = Interleave(given)
    walked = walk(interleave.shares, LENGTH)
    start, stop = min(one, other), max(one, other)
    sources, draws = draws_between(interleave, start, stop)
    assert list(zip(sources.tolist(), draws.tolist(), strict=True)) == walked[start:stop]
    assert interleave.counts(stop) == [sum(source == each for source, _ in walked[:stop]) for each in range(len(given))]


@settings(deadline=None, max_examples=60)
@given(weights, st.integers(0, 10**12))
def test_counts_are_within_the_bound_of_the_shares(given: list[Fraction], position: int) -> None:
    interleave = Interleave(given)
    counts = interleave.counts(position)
    assert sum(counts) == position
    for count, share in zip(counts, interleave.shares, strict=True):
        assert abs(count - position * share) <= (1 + (len(given) - 2) * share) / 2


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.integers(1, 1000))
def test_counts_are_exact_after_whole_rounds(given: list[int], rounds: int) -> None:
    interleave = Interleave([Fraction(weight) for weight in given])
    assert interleave.counts(rounds * sum(given)) == [rounds * weight for weight in given]


def test_a_source_is_spread_evenly() -> None:
    sources, _ = draws_between(Interleave([Fraction(3), Fraction(1)]), 0, 12)
    assert sources.tolist() == [0, 0, 1, 0] * 3
    sources, _ = draws_between(Interleave([Fraction(1)] * 3), 0, 6)
    assert sources.tolist() == [0, 1, 2] * 2


def test_times_beyond_64_bits_are_compared_exactly() -> None:
    """Sizes without common factors have a common multiple beyond any machine integer."""
    sizes = [999_983, 999_979, 999_961, 999_959]
    interleave = Interleave([Fraction(size) for size in sizes])
    position = sum(sizes)
    sources, draws = draws_between(interleave, position - 4, position + 4)
    assert sorted(sources[:4].tolist()) == [0, 1, 2, 3]
    assert draws.tolist() == [sizes[source] - 1 for source in sources[:4]] + [
        0 + sizes[source] for source in sources[4:]
    ]
