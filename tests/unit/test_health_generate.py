"""GET /health_generate: a token through the engine, or 503 within a limit."""

import asyncio

from minidsa.scheduler.messages import EngineStats, Outputs, RequestOutput
from patience import PATIENCE, until
from scripted_engine import server_config, serving

PATH = "/health_generate"


async def test_a_token_is_computed_and_leaves_nothing_behind():
    async with serving() as bed:
        answer = await bed.client.get(PATH)
        assert (answer.status_code, answer.content) == (200, b"")
        (submit,) = bed.engine.submits
        assert submit.params.max_tokens == 1 and not submit.handling.uses_cache
        assert bed.service.client.num_open == 0


async def test_an_engine_that_does_not_answer_in_time_is_told_to_forget_it():
    async with serving(config=server_config(heartbeat_seconds=0.5)) as bed:
        # The engine stays alive, however slow the machine is: only the token does not come.
        bed.service.client._heartbeat_seconds = PATIENCE
        bed.engine.held = True
        answer = await bed.client.get(PATH)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "service_unavailable"
        assert bed.engine.aborts == [bed.engine.submits[0].request_id]


async def test_a_failing_engine_and_a_dead_one_are_told():
    async with serving(lambda submit: ()) as bed:
        asking = asyncio.create_task(bed.client.get(PATH))
        await until(lambda: bed.engine.num_running)
        name = bed.engine.submits[0].request_id
        output = RequestOutput(name, [], "error", error="x", error_kind="internal")
        bed.engine.emit(Outputs([output], EngineStats()))
        assert (await asking).status_code == 500
        bed.engine.die()
        await bed.service.client.dead.wait()
        assert (await bed.client.get(PATH)).status_code == 503
