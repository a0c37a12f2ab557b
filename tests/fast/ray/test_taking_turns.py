import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from miles.core.run_facts import EngineEndpoint
from miles.ray.taking_turns import TakingTurns
from miles.utils import http_utils
from miles.utils.waits import Waits
from tests.fast.ray.conftest import ROOT, TrainProcess, metrics


async def share_of_digits(args, sample, **kwargs):
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)


class RecordingTrainer:
    def __init__(self, story):
        self._story = story

    async def offload(self):
        self._story.append("trainer away")

    async def onload(self):
        self._story.append("trainer back")


@contextmanager
def engine(story, name):
    """A real server whose two memory routes tell what was asked of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            story.append(f"{name} {self.path.strip('/').partition('_')[0]} {'+'.join(body['tags'])}")
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield EngineEndpoint(url=f"http://127.0.0.1:{server.server_port}", engine_id=name, pid=0, token="t")
    server.shutdown()
    thread.join()
    server.server_close()


def story_of(act, **settings):
    """What happens to trainer and engine `e` while `act(turns, engines)` runs."""
    story = []

    async def go():
        waits = Waits(report_s=60, deadline_s=60, report=story.append)
        with engine(story, "e") as first:
            engines = [first]
            turns = TakingTurns(RecordingTrainer(story), lambda: engines, waits, **settings)
            try:
                await act(turns, engines, story)
            finally:
                await http_utils.aclose()

    asyncio.run(go())
    return story


BOTH = {"offload_train": True, "tags": ["kv_cache", "weights"]}


async def two_steps(turns, engines, story):
    async with turns.for_weight_sync():
        story.append("publish")
    async with turns.for_scoring():
        story.append("score")
    for _ in range(2):
        async with turns.for_rollout():
            story.append("rollout")
        async with turns.for_training():
            story.append("train")
        async with turns.for_weight_sync():
            story.append("publish")


def test_each_has_the_memory_when_it_works_and_nothing_is_moved_twice():
    step = [
        "rollout",
        "e release kv_cache+weights",
        "trainer back",
        "train",
        "e resume weights",
        "publish",
        "trainer away",
        "e resume kv_cache",
    ]
    start = [
        "e release kv_cache",
        "trainer back",
        "publish",
        "trainer away",
        "e resume kv_cache",
        "e release kv_cache",
        "trainer back",
        "score",
        "trainer away",
        "e resume kv_cache",
    ]
    assert story_of(two_steps, **BOTH) == [*start, *step, *step]


def test_a_trainer_that_stays_leaves_the_engines_their_turns():
    found = story_of(two_steps, offload_train=False, tags=["kv_cache"])
    step = ["rollout", "e release kv_cache", "train", "publish", "e resume kv_cache"]
    assert found == ["publish", "score", *step, *step]


def test_engines_that_stay_leave_the_trainer_its_turns():
    found = story_of(two_steps, offload_train=True, tags=[])
    step = ["rollout", "trainer back", "train", "publish", "trainer away"]
    start = ["trainer back", "publish", "trainer away", "trainer back", "score", "trainer away"]
    assert found == [*start, *step, *step]


def test_an_engine_that_was_started_again_has_all_its_memory():
    async def act(turns, engines, story):
        async with turns.for_training():
            pass
        with engine(story, "new") as other:
            engines[:] = [other]
            async with turns.for_weight_sync():
                story.append("publish")

    found = story_of(act, **BOTH)
    assert [entry for entry in found if entry.startswith("new")] == []


def test_a_run_whose_parts_take_turns_trains_as_one_whose_parts_stay(task, tmp_path):
    def trained(name, *flags):
        run = tmp_path / name
        ended = TrainProcess(
            str(ROOT / "recipes" / "quickstart-grpo.yaml"),
            *(
                "--hf-checkpoint",
                str(task / "model"),
                "--prompt-data",
                str(task / "train.jsonl"),
                "--run-dir",
                str(run),
            ),
            *(
                "--num-rollout",
                "2",
                "--rollout-batch-size",
                "4",
                "--n-samples-per-prompt",
                "4",
                "--save-interval",
                "2",
            ),
            *("--eval-interval", "null", "--torch-threads", "1", "--run.use-tensorboard", "false"),
            *("--deterministic-mode", "--custom-rm-path", f"{__name__}.share_of_digits", *flags),
        ).end()
        assert (ended.status, ended.left_behind) == (0, []), ended.err
        return [
            {k: v for k, v in row.items() if k.startswith("train/") or k == "rollout/reward"} for row in metrics(run)
        ]

    stays = trained("stays")
    assert any(row.get("train/grad_norm") for row in stays)
    assert trained("turns", "--offload-train", "--offload-rollout") == stays
