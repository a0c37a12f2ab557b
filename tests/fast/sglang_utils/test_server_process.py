import json
import logging
import os
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn

from miles.backends.sglang_utils.serve import keep_out_of_logs, prepare_environment, reserved_port, warm_up


def test_a_reserved_port_is_given_to_nobody_else_and_a_server_can_take_it():
    with reserved_port("127.0.0.1") as port:
        others = []
        for _ in range(200):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            others.append(other)
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        listening = uvicorn.Config(app=lambda: None, host="127.0.0.1", port=port).bind_socket()
        listening.listen()
        assert listening.getsockname()[1] == port
        listening.close()


def test_a_token_does_not_reach_the_log(caplog):
    factory = logging.getLogRecordFactory()
    try:
        keep_out_of_logs("s3cret")
        logging.getLogger("sglang").warning("args=%s", {"admin_api_key": "s3cret", "port": 1})
        logging.getLogger("sglang").warning("100%% of %s", "memory")
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == ["args={'admin_api_key': '***', 'port': 1}", "100% of memory"]


@pytest.fixture
def environment(monkeypatch):
    for name in ("FLASHINFER_WORKSPACE_BASE", "TVM_FFI_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_compiled_kernels_are_kept_where_the_run_says_unless_the_user_says_otherwise(environment):
    environment.setenv("TRITON_CACHE_DIR", "/elsewhere")
    environment.setattr(os, "environ", dict(os.environ))
    prepare_environment(Path("/caches"))
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == "/caches"
    assert os.environ["TVM_FFI_CACHE_DIR"] == "/caches/tvm-ffi"
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


@contextmanager
def server_that_answers(status, after_s=0.0):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"the reason")

        def log_message(self, *_):
            pass

    asked = []
    with reserved_port("127.0.0.1") as port:
        started = []

        def serve():
            time.sleep(after_s)
            started.append(ThreadingHTTPServer(("127.0.0.1", port), Handler))
            started[0].serve_forever()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield port, asked
        started[0].shutdown()
        thread.join()
        started[0].server_close()


def test_the_first_request_waits_until_the_server_listens():
    with server_that_answers(200, after_s=0.3) as (port, asked):
        warm_up("127.0.0.1", port)
    assert asked == [
        ("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}})
    ]


def test_a_first_request_that_fails_says_why():
    with server_that_answers(500) as (port, _), pytest.raises(ValueError, match="status 500, the reason"):
        warm_up("127.0.0.1", port)
