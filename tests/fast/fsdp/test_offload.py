import pytest
import torch

from miles.backends.fsdp_utils.offload import Waiting
from miles.errors import TrainingError
from tests.fast.fsdp.support import (
    largest_difference,
    make_batch,
    make_config,
    make_samples,
    open_worker,
    weights_of,
)


def test_memory_goes_and_comes_back_bit_by_bit_under_every_view():
    whole = torch.randn(6, 4)
    views, kept = [whole[1:3], whole.view(-1)], whole.clone()
    waiting = Waiting()
    waiting.out([whole, views[0]])
    assert whole.untyped_storage().nbytes() == 0
    assert waiting.is_out
    waiting.out([whole])
    waiting.back()
    assert not waiting.is_out
    assert torch.equal(whole, kept)
    assert torch.equal(views[0], kept[1:3])
    waiting.back()
    assert torch.equal(views[1], kept.view(-1))


@pytest.mark.parametrize("algorithm", [{}, {"advantage_estimator": "ppo"}, {"use_kl_loss": True}])
def test_a_trainer_that_waited_goes_on_in_the_same_bits(model_folder, tmp_path, algorithm):
    ends = []
    for waits in (False, True):
        config = make_config(model_folder, algorithm=dict(algorithm), parity={"enabled": False})
        with open_worker(config, tmp_path) as worker:
            for step in range(3):
                if waits:
                    worker.offload("optimizer")
                    worker.offload()
                    worker.onload("weights")
                    weights_of(worker)
                    worker.onload()
                metrics = worker.train(make_batch(make_samples(seed=step)), step)
            ends.append((weights_of(worker), metrics["train/grad_norm"]))
    assert largest_difference(ends[0][0], ends[1][0]) == 0
    assert ends[0][1] == ends[1][1]


def test_what_needs_a_part_that_waits_says_so(model_folder, tmp_path):
    with open_worker(make_config(model_folder, parity={"enabled": False}), tmp_path) as worker:
        worker.offload("optimizer")
        worker.score([[1, 2, 3]], 1.0)
        with pytest.raises(TrainingError, match=r"optimizer are in the CPU's memory\n    fix: call onload"):
            worker.train(make_batch(make_samples()), 0)
        with pytest.raises(TrainingError, match="optimizer are"):
            worker.save(str(tmp_path / "saved"))
        worker.offload("weights")
        with pytest.raises(TrainingError, match="weights are"):
            next(worker.hf_weights())
