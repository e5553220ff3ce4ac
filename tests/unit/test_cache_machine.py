"""Random histories of prefix cache and host tier, beside a model that knows tokens, not keys.

Checked after every operation: each page is in one place and counted as often as it is held; what is
found, given up, kept on the host and loaded is what the model says, in the model's order; the rows
behind a table are those of its own tokens, latent and index rows alike.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_model import CacheModel, ModelTable, stem
from canaries import Canaries, PoisoningPool
from minidsa.kv_cache.block_table import BlockTable
from minidsa.kv_cache.cache import KvCache

DOMAINS = (None, ("", ""), ("a", ""), ("", "a"))


class CacheMachine(RuleBasedStateMachine):
    """Tables that are filled, computed, grown, published, released, discarded and found again."""

    @initialize(
        num_pages=st.integers(2, 8),
        page_size=st.sampled_from([1, 2, 3]),
        num_host=st.sampled_from([None, 2, 20, 20]),
        poisons=st.booleans(),
    )
    def build(self, num_pages, page_size, num_host, poisons):
        self.canaries = Canaries(num_pages, page_size)
        tier = None if num_host is None else self.canaries.tier(num_host)
        self.cache = KvCache(num_pages, page_size, tier=tier)
        if poisons:
            self.cache.pool = PoisoningPool(num_pages, self.canaries, tier)
        self.model = CacheModel(num_pages, page_size, num_host)
        self.tables: list[tuple[BlockTable, ModelTable]] = []
        self.computed: dict[ModelTable, int] = {}
        self.opened: list[ModelTable] = []  # keeps every id unique

    def drawn(self, data):
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, 12),
        domain=st.sampled_from(DOMAINS),
        spare=st.integers(0, 2),
        reads=st.sampled_from([True, True, True, False]),
    )
    def admit(self, kind, length, domain, spare, reads):
        tokens = list(stem(kind, length))
        theirs = ModelTable(domain, tokens)
        ours = self.cache.new_table(domain or (), reuse=domain is not None)
        cached = self.cache.admit(ours, lambda a, b: tokens[a:b], length, spare, reads)
        assert cached == self.model.admit(theirs, spare, reads)
        if cached is None:
            assert not ours.pages
            return
        assert cached < length
        self.opened.append(theirs)
        self.tables.append((ours, theirs))
        self.computed[theirs] = cached
        self.cache.settle()

    @rule(kind=st.integers(0, 2), length=st.integers(1, 12), domain=st.sampled_from(DOMAINS))
    def hold(self, kind, length, domain):
        """What is cached of some tokens is held, whole and alone, and let go again."""
        tokens = list(stem(kind, length))
        theirs = ModelTable(domain, tokens)
        ours = self.cache.new_table(domain or (), reuse=domain is not None)
        cached = self.cache.hold(ours, lambda a, b: tokens[a:b], length)
        assert cached == self.model.hold(theirs)
        self.cache.settle()
        self.canaries.check(ours.pages, cached, self.rows(theirs))
        self.cache.release(ours)
        self.model.release(theirs)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 8))
    def compute(self, data, count):
        """Write the next rows and publish what is full, as a step does."""
        ours, theirs = self.drawn(data)
        start = self.computed[theirs]
        rows = self.rows(theirs)[start : start + count]
        self.cache.settle()
        self.canaries.write(ours.pages, start, rows)
        stop = self.computed[theirs] = start + len(rows)
        self.cache.publish(ours, lambda a, b: theirs.tokens[a:b], stop)
        self.model.publish(theirs, stop)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 6), spare=st.integers(0, 2))
    def grow(self, data, count, spare):
        """Further tokens, if there is room."""
        ours, theirs = self.drawn(data)
        stop = len(theirs.tokens) + count
        grown = self.cache.grow(ours, stop, spare)
        assert grown == self.model.grow(theirs, stop, spare)
        if grown:
            theirs.tokens += stem(len(theirs.tokens) % 2, count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), fails=st.booleans())
    def close(self, data, fails):
        """Release a table; one that failed leaves nothing, and what it computed is spoilt."""
        ours, theirs = pair = self.drawn(data)
        self.tables.remove(pair)
        del self.computed[theirs]
        held = {page for table, _ in self.tables for page in table.pages}
        own = [page for page in ours.pages if page not in held]
        if fails:
            self.cache.discard(ours)
            self.model.discard(theirs)
            # A step, failed or not, writes behind the copies that were noted before it.
            self.cache.settle()
            for page in own:
                self.canaries.poison(page)
        else:
            self.cache.release(ours)
            self.model.release(theirs)
        assert not ours.pages

    @rule()
    def flush(self):
        self.cache.flush()
        self.model.flush()

    def rows(self, theirs):
        owner = theirs.domain or id(theirs)
        return self.canaries.rows_of(owner, theirs.tokens)

    @invariant()
    def books_and_rows_agree(self):
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.check(table for table, _ in self.tables)
        assert cache.pool.num_free == model.num_free
        assert cache.prefix.num_idle == len(model.idle)
        assert len(cache.prefix) == len(model.device)
        assert (cache.num_evictions, cache.num_loads) == (model.num_evictions, model.num_loads)
        if cache.tier is not None:
            assert len(cache.tier) == len(model.host)
        for ours, theirs in self.tables:
            assert len(ours.pages) == len(theirs.pages)
            assert ours.num_shared == theirs.num_shared
            self.canaries.check(ours.pages, self.computed[theirs], self.rows(theirs))

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for ours, _ in self.tables:
            self.cache.release(ours)
        assert self.cache.num_available == self.cache.pool.num_pages
        self.cache.flush()
        assert self.cache.pool.num_free == self.cache.pool.num_pages
        self.cache.check([])


CacheMachine.TestCase.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=40, derandomize=True
)
TestCache = CacheMachine.TestCase
