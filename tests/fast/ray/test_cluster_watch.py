import asyncio

import pytest
from ray.exceptions import RayError

from miles.errors import ClusterError
from miles.ray.cluster import Cluster


class WatchedCluster(Cluster):
    """The watch without a cluster: `died` says which essential process has ended."""

    def __init__(self):
        self.died = None

    def lost(self):
        return self.died


def end_of(act):
    """What comes out of a watched block that runs `act(cluster)`."""

    async def go():
        cluster = WatchedCluster()
        async with cluster.watched():
            await act(cluster)
        return "went on"

    return asyncio.run(go())


async def ray_tells_first(cluster):
    cluster.died = ClusterError("the rollout manager has ended")
    raise RayError("an actor died")


async def watch_tells_first(cluster):
    cluster.died = ClusterError("the rollout manager has ended")
    await asyncio.sleep(30)


@pytest.mark.parametrize("act", [ray_tells_first, watch_tells_first])
def test_the_death_of_an_essential_process_is_the_error_whoever_tells_it_first(act):
    with pytest.raises(ClusterError, match="the rollout manager has ended"):
        end_of(act)


def test_another_error_stays_what_it_is():
    async def act(cluster):
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        end_of(act)


def test_a_block_that_ends_leaves_the_task_uncancelled():
    async def act(cluster):
        await asyncio.sleep(0)

    assert end_of(act) == "went on"
