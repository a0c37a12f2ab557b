import pytest

from tests.fast.fsdp.support import make_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")
