"""Clients that leave: their pages are free at once, whatever their requests were at."""

import random

from scheduler_fakes import Driver, expected, submit

NUM_STREAMS = 1000
AT_ONCE = 24


def test_sch_22_a_thousand_streams_end_at_a_random_token():
    """Every page that only the gone request held can be handed out before the next step."""
    rng = random.Random(22)
    driver = Driver(pages=48, page_size=4, budget=32, seats=12, queue=AT_ONCE)
    leave_at: dict[str, int] = {}
    begun = 0
    while begun < NUM_STREAMS or driver.scheduler.has_work:
        while begun < NUM_STREAMS and len(leave_at) < AT_ONCE:
            name = f"r{begun}"
            begun += 1
            leave_at[name] = rng.randrange(0, 12)
            driver.add(submit(name, [rng.randrange(512) for _ in range(rng.randrange(1, 20))], 40))
        driver.step()
        for name, count in list(leave_at.items()):
            if len(driver.ids[name]) >= count:
                del leave_at[name]
                driver.abort(name)
                held = {page for r in driver.scheduler.running for page in r.table.pages}
                assert driver.scheduler.stats().num_free_pages == 48 - len(held)
    assert [end.finish_reason for end in driver.ends.values()] == ["abort"] * NUM_STREAMS
    assert driver.scheduler.stats().num_free_pages == 48
    # Nobody's leaving was seen by the one who comes next.
    driver.add(submit("last", [1, 2, 3], 20))
    driver.run()
    assert driver.ids["last"] == expected([1, 2, 3], 20)
