"""Twenty bugs of a kind that caches and schedulers are known for, each a small replacement.

Each names the file, the text that is right and what it becomes. `test_planted.py` applies them one
by one to a copy of the sources.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`right` stands once in `file`; with `wrong` in its place what `what` says becomes true."""

    name: str
    what: str
    file: str
    right: str
    wrong: str


BUGS = (
    Bug(
        "hit-not-counted",
        "a page that is found in the cache is used without a reference of its own",
        "kv_cache/cache.py",
        "        self.pool.share(found)\n",
        "        self.pool.share(found[1:])\n",
    ),
    Bug(
        "last-token-shared",
        "the last token of a prompt is taken from the cache too, so nothing is left to compute",
        "kv_cache/cache.py",
        "(num_tokens - 1) // self.page_size) if reads",
        "num_tokens // self.page_size) if reads",
    ),
    Bug(
        "partial-page-published",
        "a page is found by others before its last rows are computed",
        "kv_cache/cache.py",
        "full, chain = num_computed // self.page_size, table.chain",
        "full, chain = min(-(-num_computed // self.page_size), len(table.pages)), table.chain",
    ),
    Bug(
        "drafts-published",
        "rows behind the end of a request count as valid, rejected drafts among them",
        "scheduler/scheduler.py",
        "num_rejected = num_drafts + 1 - len(result.token_ids) if num_drafts else 0",
        "num_rejected = 0",
    ),
    Bug(
        "salt-not-in-key",
        "tenants find each other's rows",
        "kv_cache/prefix_cache.py",
        '        digest.update(struct.pack("<Q", len(data)) + data)\n',
        '        digest.update(struct.pack("<Q", 0))\n',
    ),
    Bug(
        "key-without-its-past",
        "a page is found by its own tokens whatever stands before them",
        "kv_cache/prefix_cache.py",
        "            digest.update(data[start : start + size])\n",
        "            digest = sha256(data[start : start + size])\n",
    ),
    Bug(
        "restored-to-the-wrong-page",
        "rows that come back from the host go to the page before",
        "kv_cache/cache.py",
        "            self.tier.load(key, table.pages[stop])\n",
        "            self.tier.load(key, table.pages[max(0, stop - 1)])\n",
    ),
    Bug(
        "index-rows-stay-behind",
        "latent rows move to the host and back without their index rows",
        "kv_cache/host_tier.py",
        "_by_page(plane, storage.page_size) for plane in storage.planes()]",
        "_by_page(plane, storage.page_size) for plane in storage.planes()[:1]]",
    ),
    Bug(
        "copies-not-awaited",
        "a step is computed before the rows that were found on the host are there",
        "scheduler/scheduler.py",
        "        step = self._planner.plan()\n        self.cache.settle()\n",
        "        step = self._planner.plan()\n",
    ),
    Bug(
        "copies-out-of-order",
        "rows are loaded from the host before others have made way, from the same place",
        "kv_cache/host_tier.py",
        "        noted, self._noted = self._noted, []\n",
        "        noted, self._noted = sorted(self._noted), []\n",
    ),
    Bug(
        "failed-rows-on-the-host",
        "rows of a request that failed are still found in host memory",
        "kv_cache/cache.py",
        "            self.tier.forget(table.chain.keys)\n",
        "            self.tier.forget(table.chain.keys[:0])\n",
    ),
    Bug(
        "failed-rows-kept",
        "rows of a request that failed are used again",
        "scheduler/scheduler.py",
        "            self.cache.discard(request.table)\n",
        "            self.cache.release(request.table)\n",
    ),
    Bug(
        "preempted-keeps-pages",
        "a request that is thrown out gives its seat back, but not its pages",
        "scheduler/planner.py",
        "        self._cache.release(victim.table)\n",
        "",
    ),
    Bug(
        "preempted-runs-as-decode",
        "a request that is thrown out goes on by its newest token alone, without its rows",
        "scheduler/request.py",
        "        self._move(State.PREEMPTED)\n        self.phase = Phase.EXTEND\n",
        "        self._move(State.PREEMPTED)\n",
    ),
    Bug(
        "abort-in-prefill-leaks",
        "a request that is aborted while its prompt is computed keeps its pages",
        "scheduler/scheduler.py",
        "            self.cache.release(request.table)\n",
        '            if reason != "abort" or request.output_ids:\n'
        "                self.cache.release(request.table)\n",
    ),
    Bug(
        "lru-inverted",
        "the page that was used last is given up first",
        "kv_cache/prefix_cache.py",
        "        page, _ = self._idle.popitem(last=False)\n",
        "        page, _ = self._idle.popitem(last=True)\n",
    ),
    Bug(
        "awake-yet-idle",
        "a page that is found again may still be given up under its new holder",
        "kv_cache/cache.py",
        "        self.prefix.wake(found)\n",
        "",
    ),
    Bug(
        "flush-while-referenced",
        "a flush frees pages that requests hold",
        "kv_cache/prefix_cache.py",
        "        idle = list(self._idle)\n",
        "        idle = list(self._key_of)\n",
    ),
    Bug(
        "found-pages-counted-twice",
        "idle pages that a newcomer will use itself count as room for its other tokens",
        "kv_cache/cache.py",
        "<= self.num_available - self.prefix.count_idle(found)",
        "<= self.num_available",
    ),
    Bug(
        "newcomer-goes-first",
        "the oldest running request gives way to the youngest, so nobody advances for sure",
        "scheduler/roster.py",
        "        victim = self.running.pop()\n",
        "        victim = self.running.pop(0)\n",
    ),
)
