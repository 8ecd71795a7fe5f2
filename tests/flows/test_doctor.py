import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from flows import doctor
from flows.analytics import ANALYTICS_OFF, analytics_left_on, switch_analytics_off
from flows.doctor import Check, checks, print_checks
from tests.tiny import make_tiny_model


@pytest.fixture
def server():
    """A server that answers /api/health, as Prefect's does; yields its API URL."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/api"
        listening.shutdown()
        thread.join()


def test_every_finding_is_ok_or_has_a_mend(tmp_path):
    found = checks(tmp_path)
    assert [check.name for check in found] == [
        "python",
        "packages",
        "device",
        "memory",
        "disk",
        "artifact root",
        "model",
        "prefect server",
        "sandbox",
        "vllm",
        "analytics",
    ]
    assert all((check.status == "ok") == (check.mend is None) for check in found)
    json.dumps([check.to_json() for check in found])


def test_this_machine_can_run(tmp_path):
    assert [check for check in checks(tmp_path) if check.status == "fail"] == []
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


def test_old_python_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 9, "final", 0))
    check = doctor.check_python(tmp_path, "")
    assert (check.status, check.found) == ("fail", "3.10.9")


def test_a_wrong_package_is_named_with_what_to_install(tmp_path, monkeypatch):
    wanted = ["pytest>=1", "pyyaml>=999", "not-there-at-all>=2", "vllm>=1; extra == 'vllm'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: wanted)
    check = doctor.check_packages(tmp_path, "")
    assert check.status == "fail"
    assert "not-there-at-all missing" in check.found
    assert check.mend == "pip install 'pyyaml>=999' 'not-there-at-all>=2'"


def test_device_says_what_auto_means(tmp_path):
    check = doctor.check_device(tmp_path, "")
    assert check.found.startswith(("cpu: ", "cuda: "))
    assert check.found.endswith(("dtype auto is float32", "dtype auto is bfloat16"))


def test_little_memory_or_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "MEMORY_WANTED_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "DISK_WANTED_BYTES", 1 << 60)
    for check in (doctor.check_memory(tmp_path, ""), doctor.check_disk(tmp_path / "not" / "yet", "")):
        assert check.status == "warn"


def test_a_root_that_cannot_be_written_fails(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("x")
    check = doctor.check_root(in_the_way, "")
    assert check.status == "fail"
    assert "RFT_HOME" in check.mend


def test_a_root_that_is_not_there_yet_is_fine(tmp_path):
    assert doctor.check_root(tmp_path / "a" / "b", "") == Check(
        "artifact root", "ok", f"{tmp_path / 'a' / 'b'} can be made"
    )


def test_model_present_and_absent(tmp_path):
    assert doctor.check_model(tmp_path, "smollm2-135m").mend == "rft fetch-model smollm2-135m"
    make_tiny_model(tmp_path / "models" / "tiny")
    assert doctor.check_model(tmp_path, "tiny").status == "ok"


def test_a_server_that_answers(tmp_path, monkeypatch, server):
    monkeypatch.setenv("PREFECT_API_URL", server)
    assert doctor.check_prefect_server(tmp_path, "") == Check("prefect server", "ok", f"{server} answers")


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://127.0.0.1:9/api", "refused"), ("nonsense", "unknown url type"), ("{server}/elsewhere", "HTTP 404")],
)
def test_a_server_that_does_not_answer(tmp_path, monkeypatch, server, url, reason):
    monkeypatch.setenv("PREFECT_API_URL", url.format(server=server))
    check = doctor.check_prefect_server(tmp_path, "")
    assert check.status == "fail"
    assert reason in check.found
    assert "unset" in check.mend


def test_without_a_url_a_run_starts_its_own_server(tmp_path):
    assert doctor.check_prefect_server(tmp_path, "").found.startswith("embedded")


def test_sandbox_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.check_sandbox(tmp_path, "")
    assert check.status == "warn"
    assert "bubblewrap" in check.mend


def test_sandbox_that_does_not_work(tmp_path, monkeypatch):
    bubblewrap = tmp_path / "bwrap"
    bubblewrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    bubblewrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.check_sandbox(tmp_path, "")
    assert check.status == "warn"
    assert "No permissions" in check.found


def test_analytics_are_off_unless_asked_for(tmp_path, monkeypatch):
    for name in ANALYTICS_OFF:
        monkeypatch.delenv(name, raising=False)
    assert analytics_left_on() == []
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    monkeypatch.setenv("GX_ANALYTICS_ENABLED", "True")
    assert analytics_left_on() == ["DO_NOT_TRACK=0", "GX_ANALYTICS_ENABLED=True"]
    assert doctor.check_analytics(tmp_path, "").mend == "unset DO_NOT_TRACK GX_ANALYTICS_ENABLED"
    switch_analytics_off()  # leaves what somebody set
    assert analytics_left_on() == ["DO_NOT_TRACK=0", "GX_ANALYTICS_ENABLED=True"]


def test_printing_shows_every_mend():
    out = io.StringIO()
    print_checks(
        [Check("disk", "ok", "9 GiB [free]"), Check("model", "warn", "absent", "rft fetch-model m")], Console(file=out)
    )
    assert out.getvalue().splitlines() == [
        "ok   disk            9 GiB [free]",
        "warn model           absent",
        " " * 21 + "-> rft fetch-model m",
    ]
