"""docs/api.md and the OpenAPI document know every field and every route."""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from minidsa.server.chat_protocol import ChatMessage, ChatRequest
from minidsa.server.messages_api.protocol import MessagesRequest
from minidsa.server.protocol import CompletionRequest, StreamOptions
from minidsa.server.responses_api.protocol import ResponsesRequest
from minidsa.server.side_protocol import TokenizeRequest
from minidsa.server.validation import IGNORED, RequestModel
from scripted_engine import serving

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
# What stands inside of backticks, `{"type": "text"}` and `thinking.budget_tokens` included.
NAMES = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", DOCS.read_text()))))
VLLM_METRICS = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total
generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total
request_success_total time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_prefill_time_seconds request_decode_time_seconds iteration_tokens_total cache_config_info
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total
"""
WITHOUT_BODY = ("/flush_cache", "/reset_prefix_cache")


@pytest.mark.parametrize(
    "model",
    [ChatRequest, CompletionRequest, TokenizeRequest, MessagesRequest, ResponsesRequest,
     StreamOptions, ChatMessage],
)  # fmt: skip
def test_every_field_is_in_the_docs(model: type[BaseModel]):
    fields = set(model.model_fields)
    if issubclass(model, RequestModel):
        fields |= {*model.neutral, *IGNORED}
    assert fields - NAMES == set()


def test_every_metric_that_dashboards_for_vllm_read_is_exported():
    """The table is made from what the server exports: see test_generated_docs.py."""
    exported = set(re.findall(r"`minidsa:(\w+)`", DOCS.read_text()))
    assert set(VLLM_METRICS.split()) - exported == set()


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "docs/api.md", "docs/clients.md"])
def test_prose_stays_within_a_hundred_columns(name):
    """Tables and code have lines as long as they need."""
    prose = re.sub(r"```.*?```", "", (DOCS.parents[1] / name).read_text(), flags=re.DOTALL)
    wide = [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert wide == []


async def test_every_route_is_in_the_docs_and_in_the_openapi_document():
    async with serving() as bed:
        document = json.loads((await bed.client.get("/openapi.json")).content)
        text = DOCS.read_text()
        for path, item in document["paths"].items():
            assert path.removeprefix("/v1").split("{")[0] in text, path
            for method, operation in item.items():
                has_body = method == "post" and path not in WITHOUT_BODY
                assert has_body == ("requestBody" in operation), path
                assert {"400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
