import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Tests here bound processor time, and a collection of all that earlier tests have left takes half a second of it."""
    gc.freeze()
    yield
    gc.unfreeze()
