"""The Grafana dashboard asks for nothing that the server does not export."""

import json
import re
from pathlib import Path

import msgspec

from minidsa.scheduler.messages import DraftStats, EngineStats, SelectionStats
from minidsa.server.metrics import Metrics

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "minidsa.json"


def test_every_metric_and_label_of_the_dashboard_exists():
    stats = msgspec.structs.replace(EngineStats(), drafts=DraftStats(1, 1, 1, [1], 1))
    stats = msgspec.structs.replace(stats, selection=SelectionStats(1, 1.0, 1, 1))
    metrics = Metrics("tiny", lambda: stats)
    metrics.describe_cache(page_size=16, num_pages=9, dtype="fp8", prefix_reuse=True)
    metrics.count_http("/health", 200)
    text = metrics.render().decode()
    exported = set(re.findall(r"^(minidsa:\w+)", text, re.MULTILINE))
    board = json.loads(FILE.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"minidsa:\w+", target["expr"])
    }
    (models,) = (each for each in board["templating"]["list"] if each["name"] == "model")
    asked |= set(re.findall(r"minidsa:\w+", models["query"]))
    assert len(asked) >= 15 and asked - exported == set()
    for target in (target for panel in board["panels"] for target in panel["targets"]):
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert f'{label}="' in text


def test_panels_have_titles_of_their_own():
    titles = [panel["title"] for panel in json.loads(FILE.read_text())["panels"]]
    assert len(set(titles)) == len(titles) > 0
