"""The port of a server: taken from the first moment, and told at once to whoever comes second."""

import pytest

from minidsa.server.serving import StartFailed, bind, listen


def test_ops_16_a_port_is_taken_while_its_server_still_loads():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1 port {port}: "):
            bind("127.0.0.1", port)
        listen(first)
        with pytest.raises(StartFailed, match="in use"):
            bind("127.0.0.1", port)


def test_a_port_with_connections_of_an_earlier_run_can_be_had_again():
    import socket

    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        listen(first)
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = first.accept()
        # Who closes first keeps the port in TIME_WAIT.
        accepted.close()
        client.close()
    with bind("127.0.0.1", port) as second:
        listen(second)
