"""Model folders and one served engine for the tests of this room."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles.utils.process import ServerProcess
from tests.fast.torch_engine.support import Client, make_model

TOKEN = "token-of-the-tests"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }} {{ m.content }}{{ mark or '.' }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(model_folder)]
    command += ["--threads", "1", "--api-key", TOKEN, "--kv-cache-mb", "64", "--exit-on-stdin-close"]
    process = ServerProcess("torch-engine", command, tmp_path_factory.mktemp("log") / "engine.log")
    try:
        facts = process.wait_ready(120)
        yield Client(f"http://127.0.0.1:{facts['port']}", TOKEN)
    finally:
        process.stop()
