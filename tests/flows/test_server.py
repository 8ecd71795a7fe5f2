"""The server that a run talks to."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest

from data_contracts.errors import TransientError
from flows.server import prefect_server


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """Something that answers as a healthy server does; the test may close it."""
    answering = HTTPServer(("127.0.0.1", 0), Healthy)
    Thread(target=answering.serve_forever, daemon=True).start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{answering.server_port}/api")
    yield answering
    answering.shutdown()
    answering.server_close()


def test_a_server_that_goes_away_is_said_with_the_mend(server, tmp_path):
    with pytest.raises(TransientError, match="went away: start it again; the same command resumes"):  # noqa: SIM117
        with prefect_server(tmp_path):
            server.shutdown()
            server.server_close()
            raise httpx.ConnectError("refused")


def test_a_connection_error_of_others_stays_what_it_is(server, tmp_path):
    """As of a reward function that asks a judge."""
    with pytest.raises(httpx.ConnectError), prefect_server(tmp_path):
        raise httpx.ConnectError("refused")


def test_no_server_at_the_given_url_is_said_before_anything(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(TransientError, match="found none at http"), prefect_server(tmp_path):
        pass
