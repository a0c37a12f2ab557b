import http.server
import json
import threading

import pytest

from miles.config.checks_external import EXTERNAL_CHECKS
from miles.config.known import run_checks
from miles.config.plan import describe_plan
from miles.config.preflight_external import EXTERNAL_PREFLIGHT, external_engines_fit
from miles.config.resources import gpu_plan, num_engines, num_started_engines, weights_transport
from miles.config.schema import RunConfig

ADDRS = {"external": True, "external_addrs": ["127.0.0.1:30000"]}


def config(engine=None, **sections) -> RunConfig:
    sections["rollout"] = {"num_rollout": 1, **sections.get("rollout", {})}
    return RunConfig.model_validate({"engine": engine or {}, **sections})


def issues(checks, engine, **sections):
    return [(i.path, i.problem, i.fix) for i in run_checks(checks, config(engine, **sections))]


def test_servers_of_others_are_counted_and_none_is_started():
    both = config({"external": True, "external_addrs": ["a:1", "b:2"]})
    assert (num_engines(both), num_started_engines(both), weights_transport(both)) == (2, 0, "disk")
    assert gpu_plan(both).engines == ()
    assert (num_engines(config()), num_started_engines(config()), weights_transport(config())) == (1, 1, "tensor")


@pytest.mark.parametrize("address", ["host:30000", "10.0.0.1:1", "[::1]:65535", "gpu-node_7.cluster.local:8000"])
def test_addresses_are_hosts_with_ports(address):
    assert issues(EXTERNAL_CHECKS, {"external": True, "external_addrs": [address]}) == []


@pytest.mark.parametrize("address", ["host", "host:", "host:0", "host:65536", "http://host:1", "::1:80", ":80"])
def test_other_addresses_are_refused(address):
    (found,) = issues(EXTERNAL_CHECKS, {"external": True, "external_addrs": [address]})
    assert found == (
        "engine.external_addrs",
        f"{address!r} is not an address",
        "HOST:PORT, IPv6 as [HOST]:PORT, without http://",
    )


@pytest.mark.parametrize(
    ("engine", "sections", "problem", "fix"),
    [
        ({"external": True}, {}, "--rollout-external attaches to servers, and none is given", "HOST:PORT [HOST:PORT"),
        ({"external_addrs": ["a:1"]}, {}, "the run starts engines of its own", "--rollout-external as well"),
        ({"external_admin_key_env": "K"}, {}, "the run starts engines of its own", "leave out --rollout-external-adm"),
        ({"external": True, "external_addrs": ["a:1", "a:1"]}, {}, "a:1 is given twice", "give each server once"),
        (ADDRS, {"debug": {"train_only": True}}, "and the run needs none", "leave out --rollout-external"),
        (ADDRS, {"cluster": {"colocate": True}}, "the servers' memory is theirs", "leave out --colocate"),
        (
            ADDRS,
            {"cluster": {"offload_rollout": True}},
            "the servers' memory is theirs",
            "leave out --offload-rollout",
        ),
        (ADDRS, {"cluster": {"rollout_engines": 3}}, "asks for 3 engines, and 1 are given", "every address is one"),
        (ADDRS | {"sglang": {"mem_fraction_static": 0.5}}, {}, "these have been", "leave out --sglang-*"),
        (ADDRS | {"max_running_requests": 8}, {}, "these have been", "leave out --engine.max-running-requests"),
    ],
)
def test_what_servers_of_others_cannot_take_is_refused(engine, sections, problem, fix):
    (found,) = issues(EXTERNAL_CHECKS, engine, **sections)
    assert problem in found[1]
    assert fix in found[2]


def test_tensors_go_to_this_machine_only():
    checks = [check for check in EXTERNAL_PREFLIGHT if check is not external_engines_fit]
    tensor = {"weights": {"transport": "tensor"}}
    assert issues(checks, ADDRS, **tensor) == []
    (found,) = issues(checks, {"external": True, "external_addrs": ["192.0.2.7:80"]}, **tensor)
    assert found[1] == "tensor shares memory of one machine, and 192.0.2.7:80 is another"
    assert "--update-weight-transfer-mode disk" in found[2]


def test_a_key_that_is_not_in_the_environment_is_told_by_its_name(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    checks = [check for check in EXTERNAL_PREFLIGHT if check is not external_engines_fit]
    (found,) = issues(checks, {**ADDRS, "external_admin_key_env": "NO_SUCH_KEY"})
    assert found[1] == "the environment has no NO_SUCH_KEY, or an empty one"


@pytest.fixture
def sglang():
    """A server that says what stock SGLang says of itself; returns its address and the two answers."""
    model = {"model_path": "/gone", "weight_version": "default", "model_type": "qwen3"}
    server = {"tp_size": 2, "dp_size": 1, "dtype": "bfloat16", "context_length": None, "version": "0.5.17"}
    answers = {"/model_info": model, "/server_info": server}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_, **__):
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"127.0.0.1:{listening.server_port}", answers
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16"}))
    return {"hf_checkpoint": str(tmp_path)}


def test_a_server_that_fits_passes(sglang, model):
    engine = {"external": True, "external_addrs": [sglang[0]], "gpus_per_engine": 2}
    assert issues([external_engines_fit], engine, model=model) == []


def test_a_server_that_does_not_fit_is_told_with_both_values_and_the_way_out(sglang, model):
    address, answers = sglang
    answers["/model_info"]["model_type"] = "llama"
    answers["/server_info"].update(dp_size=4, dtype="float16")
    found = issues([external_engines_fit], {"external": True, "external_addrs": [address]}, model=model)
    folder = model["hf_checkpoint"]
    said = f"the server at {address}"
    assert [problem for _, problem, _ in found] == [
        f"{said} serves a model of model_type llama (/gone), and the run's has qwen3 ({folder})",
        f"{said} computes in float16, and the run expects bfloat16",
        f"{said} shares its model among 2 processes, and the run expects 1",
        f"{said} has a data-parallel size of 4, and weights are sent to one copy of the model",
    ]
    assert found[0][2] == f"start it with --model-path {folder}, or give its model as --hf-checkpoint"
    assert found[2][2] == "--rollout-num-gpus-per-engine 2"


def test_what_is_no_engine_is_told(sglang, model):
    address, answers = sglang
    del answers["/server_info"]["tp_size"]
    ((_, problem, _),) = issues([external_engines_fit], {"external": True, "external_addrs": [address]}, model=model)
    assert problem.startswith(f"what answers at {address} is neither SGLang nor Miles's torch engine")


def test_the_plan_shows_the_servers(model):
    lines = describe_plan(config({"external": True, "external_addrs": ["a:1", "b:2"]}, model=model))
    (engines,) = [line for line in lines if line.startswith("engines")]
    assert "2 servers" in engines
    assert "a:1, b:2, started by somebody else; weights go by disk" in engines
    assert any("logical CPUs     1 taken" in line for line in lines)
