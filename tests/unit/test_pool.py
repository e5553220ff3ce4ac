"""Pages: each is in exactly one place, whatever is taken, shared and given back."""

import random

import pytest

from minidsa.kv_cache.block_table import BlockTable, token_slots
from minidsa.kv_cache.cache import KvCache
from minidsa.kv_cache.pool import PagePool


def no_tokens(start, stop):
    raise AssertionError("a table without keys never asks for its tokens")


def test_page_zero_is_never_handed_out():
    pool = PagePool(5)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


@pytest.mark.parametrize("count", [4, -1, -4])
def test_pages_that_are_not_there_are_not_taken(count):
    pool = PagePool(3)
    with pytest.raises(ValueError, match="pages asked for, 3 free"):
        pool.take(count)
    assert pool.num_free == 3
    pool.check([])


def test_a_pool_needs_a_page():
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(0)


def test_the_warmest_pages_are_handed_out_first():
    pool = PagePool(100)
    first = pool.take(3)
    for _ in range(50):
        pool.release(first)
        assert pool.take(3) == first


def test_a_page_is_free_when_its_last_holder_gives_it_back():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.check([[page]])
    pool.release([page])
    assert pool.num_free == 2
    pool.check([])


def test_wrong_use_is_noticed_at_once():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([page])
    with pytest.raises(ValueError, match="is free"):
        pool.share([page])


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        ([[]], "reference counts"),  # a page is held by nobody
        ([[1], [1]], "reference counts"),  # and one by two, counted once
        ([[1, 0]], "reference counts"),  # padding is nobody's page
    ],
)
def test_check_compares_counts_with_holders(holders, message):
    pool = PagePool(2)
    assert pool.take(1) == [1]
    pool.check([[1]])
    with pytest.raises(RuntimeError, match=message):
        pool.check(holders)


@pytest.mark.parametrize(
    ("free", "message"), [([2, 2], "twice"), ([], "differs"), ([1], "differs")]
)
def test_check_compares_the_free_list_with_the_counts(free, message):
    pool = PagePool(2)
    pool.take(1)
    pool._free = free
    with pytest.raises(RuntimeError, match=message):
        pool.check([[1]])


def test_a_page_that_rests_is_neither_free_nor_held():
    pool = PagePool(3)
    pages = pool.take(3)
    assert pool.release(pages, kept=pages[:2]) == pages[1::-1]  # the last page first
    assert pool.num_free == 1
    pool.check([], resting=pages[:2])
    for resting in ([], pages, pages[:1]):
        with pytest.raises(RuntimeError, match="idle pages differ"):
            pool.check([], resting)
    pool.share(pages[:1])
    pool.check([pages[:1]], resting=pages[1:2])
    with pytest.raises(ValueError, match="does not rest"):
        pool.reclaim(pages[0])
    pool.reclaim(pages[1])
    with pytest.raises(ValueError, match="does not rest"):
        pool.reclaim(pages[1])
    assert pool.num_free == 2


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_a_table_grows_to_what_is_needed_and_no_further(page_size):
    cache, table = KvCache(10, page_size), BlockTable(page_size)
    for tokens in range(1, 10 * page_size + 1):
        assert cache.grow(table, tokens)
        assert len(table.pages) == -(-tokens // page_size)
        assert table.capacity >= tokens > table.capacity - page_size
        cache.check([table])
    assert not cache.grow(table, 10 * page_size + 1)
    assert len(table.pages) == 10
    cache.release(table)
    assert table.pages == [] and cache.pool.num_free == 10


def test_growth_takes_all_or_nothing():
    cache, mine, other = KvCache(4, 2), BlockTable(2), BlockTable(2)
    assert cache.grow(mine, 4)
    assert not cache.grow(other, 5)
    assert other.pages == [] and cache.pool.num_free == 2
    assert cache.num_tokens == 8
    cache.check([mine, other])


def test_admission_leaves_the_spare_pages_free():
    cache, table = KvCache(4, 2), BlockTable(2)
    assert cache.admit(table, no_tokens, 4, spare=3) is None
    assert cache.pool.num_free == 4 and table.pages == []
    assert cache.admit(table, no_tokens, 4, spare=2) == 0
    assert cache.pool.num_free == 2


def test_slots_follow_the_pages():
    assert token_slots([7, 2], 4, 2, 6) == [30, 31, 8, 9]


@pytest.mark.parametrize("seed", range(5))
def test_many_tables_share_a_small_pool(seed):
    rng = random.Random(seed)
    cache, tables = KvCache(20, 4), [BlockTable(4) for _ in range(6)]
    for _ in range(500):
        table = rng.choice(tables)
        if rng.random() < 0.2:
            cache.release(table)
        else:
            before = list(table.pages)
            cache.grow(table, rng.randrange(1, 40))
            assert table.pages[: len(before)] == before  # what is written stays where it is
        cache.check(tables)
        assert len({p for t in tables for p in t.pages}) == 20 - cache.pool.num_free
