"""How keys are shared out: every tile once, and waves that are full."""

import pytest

from minidsa.attention.kernels.splits import Processors


def parts(length, queries):
    return sum(many * -(-tiles // length) for tiles, many in queries.items())


@pytest.mark.parametrize(("queries", "expected"), [(1, 32), (8, 8), (32, 2), (64, 1), (128, 1)])
def test_sparse_decode_of_128_heads_fills_one_wave(queries, expected):
    """2048 keys in tiles of 64 on 132 multiprocessors, two blocks of heads for a part."""
    length = Processors(132, 2, 64).tiles_per_part({32: queries})
    assert -(-32 // length) == expected


def test_one_long_request_among_short_ones_is_cut():
    queries = {1: 30, 2048: 1}
    length = Processors(132, 1, 64).tiles_per_part(queries)
    assert length < 40
    assert parts(length, queries) <= 3 * 132 + 31


@pytest.mark.parametrize("most", [1, 31, 40, 200])
def test_no_more_parts_than_allowed(most):
    queries = {1: 30, 2048: 1}
    length = Processors(132, 1, 64).tiles_per_part(queries, most)
    assert parts(length, queries) <= max(most, 31)


@pytest.mark.parametrize("queries", [{}, {1: 1}, {1: 500}, {7: 3}])
def test_a_part_has_a_tile_and_no_more_than_there_are(queries):
    assert 1 <= Processors(4, 2, 64).tiles_per_part(queries) <= max(queries, default=1)
