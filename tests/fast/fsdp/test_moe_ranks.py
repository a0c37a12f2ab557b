import pytest
from safetensors.torch import load_file

from miles.backends.fsdp_utils.checkpoint import SavedTrainer
from tests.fast.fsdp.moe import EXPERTS, make_moe_folder
from tests.fast.fsdp.ranks import play_all
from tests.fast.fsdp.support import largest_difference, make_config, open_worker, weights_of

SETTINGS = {
    "optimizer": {"lr": 0.1, "adam_eps": 1.0, "adam_beta1": 0.0, "clip_grad": 0.2},
    "algorithm": {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "parity": {"enabled": False},
}
"""With such a beta AdamW's first moment is the gradient, so a checkpoint holds it."""
SPLITS = [(1, 8192), (2, 30), (4, 14)]
"""Ranks and tokens in a micro-batch; experts do not divide by the last number of ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_moe_folder(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def played(model, tmp_path_factory):
    cases = [
        {
            "name": f"{ranks}",
            "ranks": ranks,
            "story": "trains",
            "settings": {**SETTINGS, "train": {"max_tokens_per_gpu": tokens}},
            "model": str(model),
        }
        for ranks, tokens in SPLITS
    ]
    return play_all(tmp_path_factory.mktemp("ranks"), cases)


def tensors_of(folder):
    with SavedTrainer(folder) as saved:
        return {name: saved.whole(name) for name in saved.shapes}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_experts_out_make_the_same_gradients_and_weights(played, ranks):
    for save in ("idle", "uneven"):
        alone, shared = tensors_of(played / "1" / save), tensors_of(played / f"{ranks}" / save)
        assert any(name.endswith("experts.gate_up_proj") and len(alone[name]) == EXPERTS for name in alone)
        assert largest_difference(shared, alone) <= 1e-5


# Case G13.
def test_what_four_ranks_saved_is_sent_and_exported_with_every_expert_once(played, model, tmp_path):
    config = make_config(model, **SETTINGS)
    with open_worker(config, tmp_path) as worker:
        worker.load(str(played / "4" / "uneven"))
        worker.export_hf(str(played / "4" / "uneven"), str(tmp_path / "exported"))
        sent = [name for name, _ in worker.hf_weights()]
        assert len(sent) == len(set(sent))
        exported = load_file(tmp_path / "exported" / "model.safetensors")
        assert largest_difference(weights_of(worker), exported) == 0
    assert set(exported) == set(load_file(model / "model.safetensors")) == set(sent)
