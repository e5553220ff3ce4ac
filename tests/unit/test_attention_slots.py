"""Slots of a step's requests: every position in order, whatever the pages, run or no run."""

from itertools import chain

import hypothesis.strategies as st
import torch
from hypothesis import given

from minidsa.attention.metadata import Part
from minidsa.attention.slots import LONG_RUN, SHORTEST_PIECE, RequestSlots


@st.composite
def block_tables(draw) -> tuple[list[list[int]], list[int], int]:
    """Pages in runs of every length, the tokens of each request, and the page size."""
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    tables, lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        pages: list[int] = []
        for run in draw(st.lists(st.integers(1, 140), min_size=1, max_size=5)):
            start = draw(st.integers(1, 900))
            pages.extend(range(start, start + run))
        tables.append(pages)
        lengths.append(draw(st.integers(1, len(pages) * page_size)))
    width = max(map(len, tables))
    return [pages + [0] * (width - len(pages)) for pages in tables], lengths, page_size


@given(block_tables())
def test_pieces_are_the_positions_in_order(case):
    tables, lengths, size = case
    part = Part(
        query_lens=(1,) * len(tables),
        context_lens=tuple(length - 1 for length in lengths),
        block_table_BP=torch.tensor(tables, dtype=torch.int32),
    )
    slots = RequestSlots(part, size)
    for request, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
        expected = [pages[i // size] * size + i % size for i in range(length)]
        row = slots.table_BL[request].tolist()
        assert row[:length] == expected
        assert set(row[length:]) <= {expected[0]}
        for reach in {length, max(1, length - 5), 1 + length // 2}:
            pieces = slots.pieces(request, reach)
            found = [
                list(range(p.start, p.stop)) if isinstance(p, slice) else p.tolist() for p in pieces
            ]
            assert list(chain.from_iterable(found)) == expected[:reach]
            assert len(found) == 1 or min(map(len, found)) >= SHORTEST_PIECE
            runs = [p for p in pieces if isinstance(p, slice)]
            assert all(p.stop - p.start >= LONG_RUN - 2 * SHORTEST_PIECE for p in runs)
            assert len(pieces) <= 2 * len(runs) + 1
            assert slots.has_long_run(request, reach) == bool(runs)
