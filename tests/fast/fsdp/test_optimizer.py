import torch
from torch.distributed.tensor import DTensor, Shard

from miles.backends.fsdp_utils.optimizer import ShardedAdamW
from miles.config.schema import OptimizerConfig
from tests.fast.fsdp.support import make_config, open_worker


def test_the_norm_of_many_numbers_is_exact(model_folder, tmp_path):
    rows, columns, value = 50_000, 1_000, 0.1
    with open_worker(make_config(model_folder), tmp_path) as worker:  # its process group
        weight = torch.nn.Parameter(
            DTensor.from_local(torch.zeros(rows, columns), worker._ranks.mesh, [Shard(0)], run_check=False)
        )
        optimizer = ShardedAdamW({"weight": weight}, OptimizerConfig(clip_grad=0.0))
        weight.grad = DTensor.from_local(
            torch.full((rows, columns), value), worker._ranks.mesh, [Shard(0)], run_check=False
        )
        expected = float(torch.tensor(value)) * (rows * columns) ** 0.5
        assert abs(optimizer.clip() / expected - 1) < 1e-6
