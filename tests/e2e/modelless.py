"""`minidsa serve` over an engine that computes no model: a server's whole life without torch.

Importing torch takes most of a start, and how processes end does not depend on what they compute.
"""

from unittest import mock

from minidsa.scheduler import process
from minidsa.server.cli import main
from scheduler_fakes import FakeTarget, Plan

VOCAB = 4096
"""The vocabulary of a random checkpoint."""

if __name__ == "__main__":
    with mock.patch.object(process, "_serve", FakeTarget(Plan(delay=0.01), vocab_size=VOCAB)):
        main()
