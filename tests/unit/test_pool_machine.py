"""Random histories of the pool beside the plainest books of it: a count for every page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minidsa.kv_cache.pool import PagePool

FREE = -1


class PoolMachine(RuleBasedStateMachine):
    """Pages that are taken, shared, given back, kept and reclaimed, also where that is wrong."""

    @initialize(num_pages=st.integers(1, 12))
    def build(self, num_pages):
        self.pool = PagePool(num_pages)
        self.count = dict.fromkeys(range(1, num_pages + 1), FREE)
        self.tables = []

    @rule(count=st.integers(-1, 14))
    def take(self, count):
        free = [page for page, held in self.count.items() if held == FREE]
        if not 0 <= count <= len(free):
            with pytest.raises(ValueError, match=f"{count} pages asked for, {len(free)} free"):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(set(pages)) == count and set(pages) <= set(free)
        self.count |= dict.fromkeys(pages, 1)
        self.tables.append(pages)

    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from(sorted(self.count)))
        if self.count[page] == FREE:
            with pytest.raises(ValueError, match="free"):
                self.pool.share([page])
            return
        self.pool.share([page])
        self.count[page] += 1
        self.tables.append([page])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        kept = {page for page in table if data.draw(st.booleans())}
        resting = []
        for page in reversed(table):
            self.count[page] -= 1
            if not self.count[page]:
                if page in kept:
                    resting.append(page)
                else:
                    self.count[page] = FREE
        assert self.pool.release(table, kept) == resting

    @rule(data=st.data())
    def reclaim(self, data):
        page = data.draw(st.sampled_from(sorted(self.count)))
        if self.count[page] != 0:
            with pytest.raises(ValueError, match="does not rest"):
                self.pool.reclaim(page)
            return
        self.pool.reclaim(page)
        self.count[page] = FREE

    @invariant()
    def each_page_is_in_one_place(self):
        if not hasattr(self, "pool"):
            return
        resting = [page for page, count in self.count.items() if count == 0]
        self.pool.check(self.tables, resting)
        assert self.pool.num_free == sum(count == FREE for count in self.count.values())
        held = sum(count > 0 for count in self.count.values())
        assert self.pool.num_free + len(resting) + held == self.pool.num_pages


PoolMachine.TestCase.settings = settings(stateful_step_count=40, derandomize=True)
TestPool = PoolMachine.TestCase
