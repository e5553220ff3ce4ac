"""Rows in host memory: they come back as they went, with their index keys, within the budget."""

import pytest
import torch

from canaries import Canaries
from checkpoints import t_cpu
from minidsa.kv_cache.cache import KvCache
from minidsa.kv_cache.host_tier import HostTier
from minidsa.kv_cache.layout import RowLayout
from minidsa.kv_cache.storage import CacheStorage
from model_driver import ModelDriver, Settings
from scheduler_fakes import submit

# The second layer shares the selection of another and owns no index keys.
LAYOUT = RowLayout(latent_width=6, index_width=4, index_layers=(True, False, True))


def storage_of(pages: int, page_size: int = 3) -> CacheStorage:
    storage = CacheStorage(LAYOUT, pages, page_size, torch.float32, torch.device("cpu"))
    for plane in storage.planes():
        plane.copy_(torch.randn(plane.shape))
    return storage


def page_bytes(storage: CacheStorage) -> int:
    return LAYOUT.bytes_per_token(4) * storage.page_size


def rows(storage: CacheStorage, page: int) -> list[torch.Tensor]:
    size = storage.page_size
    return [plane[..., page * size : (page + 1) * size, :].clone() for plane in storage.planes()]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_sch_12_sch_14_a_page_comes_back_whole_to_another_place(count):
    storage = storage_of(count + 1)
    tier = HostTier(storage, count * page_bytes(storage))
    wanted = [rows(storage, page) for page in range(count + 1)]
    for page in range(1, count + 1):
        tier.store(page, b"%d" % page)
    tier.settle()
    for plane in storage.planes():
        plane.fill_(torch.nan)
    for page in range(1, count + 1):
        tier.load(b"%d" % page, count + 1 - page)
    tier.settle()
    for page in range(1, count + 1):
        assert equal(rows(storage, count + 1 - page), wanted[page])


def test_copies_happen_in_the_order_they_were_asked_for():
    storage = storage_of(4)
    tier = HostTier(storage, page_bytes(storage))  # room for one page
    first, second = rows(storage, 1), rows(storage, 2)
    tier.store(1, b"a")
    tier.load(b"a", 3)
    tier.store(2, b"b")  # takes the place of a, after a was read
    tier.load(b"b", 1)
    tier.settle()
    assert equal(rows(storage, 3), first) and equal(rows(storage, 1), second)
    assert b"a" not in tier and b"b" in tier and len(tier) == 1


def test_the_page_used_longest_ago_makes_way_and_the_budget_holds():
    storage = storage_of(8)
    tier = HostTier(storage, 3 * page_bytes(storage) + 5)
    assert tier.num_pages == 3
    for page, key in enumerate((b"a", b"b", b"c"), 1):
        tier.store(page, key)
    tier.load(b"a", 7)
    tier.store(2, b"b")
    tier.store(4, b"d")
    assert [key in tier for key in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    tier.forget([b"a", b"unknown"])
    assert len(tier) == 2 and b"a" not in tier
    tier.forget()
    assert len(tier) == 0
    with pytest.raises(KeyError):
        tier.load(b"b", 1)


def test_a_budget_below_a_page_is_refused():
    storage = storage_of(2)
    with pytest.raises(ValueError, match=f"one page takes {page_bytes(storage)}"):
        HostTier(storage, page_bytes(storage) - 1)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(80, 512, (length,), generator=generator).tolist()


def test_sch_18_an_abort_before_its_copies_frees_each_page_once_and_moves_no_foreign_row():
    canaries = Canaries(2, 3)
    cache = KvCache(2, 3, tier=canaries.tier(2))

    def admit(first):
        """Four tokens: a page that is shared when it is full, and one for the last token."""
        tokens = range(first, first + 4)
        table = cache.new_table(())
        cached = cache.admit(table, lambda a, b: tokens[a:b], 4, 0)
        return table, cached, canaries.rows_of("all", tokens), lambda a, b: tokens[a:b]

    table, _, wanted, tokens = admit(10)
    cache.settle()
    canaries.write(table.pages, 0, wanted)
    cache.publish(table, tokens, 4)
    cache.release(table)
    for _ in range(3):
        other, cached, _, _ = admit(20)  # takes both pages: the first prompt's rows go to the host
        assert cached == 0
        cache.release(other)  # aborted while that copy is only noted
        table, cached, wanted, _ = admit(10)  # and come back
        assert cached == 3
        cache.check([table])
        cache.release(table)  # aborted while the load is only noted
        cache.check([])
        assert cache.num_available == 2
    table, cached, wanted, _ = admit(10)
    cache.settle()
    assert cached == 3
    canaries.check(table.pages, 3, wanted)
    cache.release(table)
    assert cache.num_loads == 3 and cache.num_available == 2


@pytest.mark.parametrize("preempt_every", [0, 4])
def test_sch_12_sch_15_an_evicted_prompt_comes_back_and_changes_no_id(preempt_every):
    settings = Settings(pages=14, host_pages=40, preempt_every=preempt_every)
    asked = [submit(f"r{i}", prompt(60 + i, i), 6) for i in range(4)]
    alone = {}
    for command in asked:
        alone |= ModelDriver(t_cpu(), Settings()).run([command]).ids
    driver = ModelDriver(t_cpu(), settings)
    cached = {}
    for _ in range(3):
        for command in asked:
            answers = driver.run([command])
            assert answers.ids[command.request_id] == alone[command.request_id]
            cached[command.request_id] = answers.ends[command.request_id].cached_tokens
    stats = driver.scheduler.stats()
    assert stats.num_evictions > 0 and stats.num_host_pages > 0
    assert stats.num_host_loads >= 7 * 6  # of two later turns, most pages of each prompt
    assert cached == {"r0": 56, "r1": 56, "r2": 56, "r3": 56}
    assert driver.scheduler.flush_cache()
    assert driver.scheduler.stats().num_host_pages == 0
    assert driver.run(asked[:1]).ends["r0"].cached_tokens == 0


def test_a_tier_smaller_than_a_prompt_only_helps_less():
    driver = ModelDriver(t_cpu(), Settings(pages=14, host_pages=2))
    asked = [submit(f"r{i}", prompt(60, i), 4) for i in range(3)]
    cold = ModelDriver(t_cpu(), Settings()).run(asked).ids
    for _ in range(3):
        for command in asked:
            name = command.request_id
            assert driver.run([command]).ids[name] == cold[name]
    assert driver.scheduler.stats().num_host_pages <= 2
