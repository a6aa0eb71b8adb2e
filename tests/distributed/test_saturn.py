"""CLUSTER=saturn: the real dask-saturn, and an HTTP server that answers as Saturn Cloud does."""

import gc
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from processes import separate_cluster

import ddp_common as ddp

pytest.importorskip("dask_saturn", reason="needs dask-saturn (pip install -e '.[saturn]')")


@pytest.fixture
def saturn(tmp_path, monkeypatch):
    """What the service is asked for: (path, content), the oldest first."""
    asked = []

    class Service(BaseHTTPRequestHandler):
        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("api/dask_clusters")[2]
            asked.append((path, json.loads(body or b"{}")))
            answers = {
                "/info": {"server_options": {"size": [{"name": "tiny", "display": "1 core"}]}},
                "": {"id": "one", "status": "ready"},
                "/one/info": {"dashboard_link": "http://here", "scheduler_address": address},
            }
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(path, {"status": "running"})).encode())

        def log_message(self, *_):
            pass

    with (
        separate_cluster(tmp_path) as (_, address),
        HTTPServer(("127.0.0.1", 0), Service) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("SATURN_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("SATURN_TOKEN", "a-token")
        monkeypatch.setenv("SATURN_IS_INTERNAL", "true")
        yield asked
        gc.collect()  # dask-saturn asks once more, of a cluster that was refused
        server.shutdown()


def test_the_profile_of_saturn_trains_and_its_cluster_is_closed(saturn, monkeypatch):
    monkeypatch.setenv("OPTIONS", "worker_size=tiny scheduler_size=tiny")
    with ddp.connect("saturn", workers=2) as client:
        assert ddp.launch(client, ddp.world_size).result == 2
    (wanted,) = [content for path, content in saturn if path == ""]
    assert wanted["n_workers"] == 2 and wanted["worker_size"] == "tiny"
    assert ("/one/close", {}) in saturn


def test_what_saturn_refuses_is_one_error(saturn, monkeypatch):
    monkeypatch.setenv("OPTIONS", "worker_size=huge")
    with pytest.raises(ddp.Error, match="huge is not a valid option"):
        ddp.connect("saturn")
    monkeypatch.delenv("SATURN_TOKEN")
    with pytest.raises(ddp.Error, match="SATURN_TOKEN"):
        ddp.connect("saturn")
