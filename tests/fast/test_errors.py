import ast
import pickle
from pathlib import Path

import pytest

import miles
from miles import errors
from miles.ray.engine_hosts import EngineGoneError
from miles.rollout.inference_rollout.generate_and_reward import UnfinishedGroupError
from miles.rollout.rm_hub.remote import RemoteRewardError
from miles.rollout.rm_hub.reward_errors import RewardTimeoutError
from miles.router.workers import NoWorkerError
from miles.utils.http_utils import HttpError, TransportError

EXAMPLES = [
    errors.MilesError("went wrong"),
    errors.ConfigError([errors.Issue("rollout.seed", "is odd", "make it even"), errors.Issue("a", "b", "c")]),
    errors.HookError("my.reward", "raised KeyError", "mend it"),
    errors.DataError("rows.jsonl", "is not JSON", "mend it", line=3),
    errors.DataError("rows.jsonl", "is empty"),
    errors.CheckpointError("incomplete"),
    errors.EngineError("died", engine="engine-0", log_path="engine.log", last_lines="one\ntwo"),
    EngineGoneError("is another model", engine="engine-0"),
    errors.ClusterError("trainer-0 has ended"),
    errors.WeightSyncError("stale"),
    errors.ParityError("apart"),
    errors.TrainingError("nan"),
    errors.LedgerError("lost"),
    errors.StalledError("silent"),
    HttpError(503, "busy", "http://engine:1/generate", 2.0),
    TransportError("http://engine:1/generate", "reset", sent=True),
    RemoteRewardError("http://rewards:1", "was silent", "start it"),
    RewardTimeoutError("my.reward", "took 30 s", "make it faster"),
    UnfinishedGroupError("sample 3 was aborted"),
    NoWorkerError("no worker is healthy"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_every_error_crosses_a_process_border_with_kind_message_and_facts(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) != ""
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_a_note_crosses_too(error):
    noted = pickle.loads(pickle.dumps(error))
    noted.add_note("and the prompts could not be given back")
    assert pickle.loads(pickle.dumps(noted)).__notes__ == ["and the prompts could not be given back"]


def test_every_kind_of_error_has_an_example_here():
    bases = {}
    for file in Path(miles.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    own = {"MilesError"}
    while more := {name for name, above in bases.items() if above & own} - own:
        own |= more
    assert own == {type(error).__name__ for error in EXAMPLES}
