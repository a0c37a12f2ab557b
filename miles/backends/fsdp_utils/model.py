"""A Hugging Face causal language model as a policy: token ids in, log-probs and entropies out, sharded by FSDP2."""

# B sequences, T tokens, N predicted tokens, D hidden size

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from miles.backends.fsdp_utils.hf_folder import require_equal_heads, require_model_folder, stored_tensors
from miles.backends.fsdp_utils.tensor_file import StoredTensor
from miles.backends.training_utils.log_probs import token_log_probs
from miles.errors import CheckpointError

PREFIX = "hf."


class PolicyModel(nn.Module):
    """The model and its output head in one forward, so that FSDP gathers the head's weight for the log-probs."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    def forward(
        self, input_ids_BT: Tensor, positions_N: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of `targets_N`, in nats, each from the hidden state at its place in [B x T].

        Rows are padded on the right: attention is causal, so no mask is needed.
        """
        decoder = self.hf.base_model
        hidden_BTD = decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, positions_N)
        weight_VD = cast(nn.Linear, self.hf.get_output_embeddings()).weight
        return token_log_probs(hidden_ND, weight_VD, targets_N, temperature)

    @property
    def vocab_size(self) -> int:
        return int(self.hf.get_input_embeddings().num_embeddings)  # pyright: ignore[reportArgumentType]


def ties_embeddings(folder: str | Path) -> bool:
    """Whether input embedding and output head are one tensor, by the folder's config.json; CheckpointError when unreadable."""
    path = require_model_folder(folder)
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: config.json does not load: {error}\n    fix: check the folder") from error
    return bool(config.tie_word_embeddings)


def load_policy(
    folder: str | Path, *, gradient_checkpointing: bool = False
) -> tuple[PolicyModel, dict[str, StoredTensor]]:
    """Load a model folder in fp32, without remote code, and the list of tensors that the folder holds.

    Dropout is off in the result. Raises CheckpointError when the folder is missing or incomplete, when model and folder
    differ in any tensor's name or shape, and when log-probs are not a plain softmax over the head's projection.
    """
    path = require_model_folder(folder)
    tied = ties_embeddings(path)
    expected = stored_tensors(path, tied=tied)
    if tied:
        require_equal_heads(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: the model does not load: {error}\n    fix: check the folder") from error
    hf, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _require_complete(path, info)
    model = PolicyModel(hf)
    _require_same_tensors(path, expected, {name: tuple(p.shape) for name, p in hf_tensors(model).items()})
    disable_dropout(model)
    _require_plain_head(path, model)
    model.train()
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, expected


def shard(model: PolicyModel, mesh: DeviceMesh, *, bf16: bool = False) -> None:
    """Shard each decoder layer and the rest over `mesh`.

    With `bf16` the layers compute in bfloat16 with rounded weights, while the shards and the sums of gradients, over
    ranks and over micro-batches, stay fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    layers = set(model.hf._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)


def hf_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Parameters and saved buffers under the folder's names, each once: of tied ones the first name. Sharded ones are DTensors."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name.removeprefix(PREFIX)] = tensor
    return found


def disable_dropout(model: nn.Module) -> None:
    """Turn every dropout off, so that two passes over the same tokens agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


def _require_complete(path: Path, info: dict[str, Any]) -> None:
    problems = [
        f"{what}: {', '.join(sorted(map(str, info[key]))[:5])}{' ...' if len(info[key]) > 5 else ''}"
        for what, key in (
            ("missing", "missing_keys"),
            ("unexpected", "unexpected_keys"),
            ("misshapen", "mismatched_keys"),
        )
        if info.get(key)
    ]
    if problems:
        raise CheckpointError(
            f"{path}: weights and config.json do not belong together; {'; '.join(problems)}"
            "\n    fix: use the weights that were saved with this config.json"
        )


def _require_same_tensors(path: Path, stored: dict[str, StoredTensor], model: dict[str, tuple[int, ...]]) -> None:
    wrong = sorted(set(stored) ^ set(model)) or [n for n, t in stored.items() if t.shape != model[n]]
    if wrong:
        raise CheckpointError(
            f"{path}: the model's tensors are not those of the folder, first: {', '.join(wrong[:5])}"
            "\n    fix: save the model with save_pretrained; architectures whose weights are converted at load are not supported"
        )


def _require_plain_head(path: Path, model: PolicyModel) -> None:
    """Compare with the model's own logits, so that soft-capping, scaling or a bias cannot be left out in silence."""
    tokens_1T = torch.arange(6).unsqueeze(0) % model.vocab_size
    with torch.no_grad():
        logits_TV = model.hf(input_ids=tokens_1T, use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits_TV, dim=-1)[:-1].gather(1, tokens_1T[0, 1:, None]).squeeze(1)
        logprobs, _ = model(tokens_1T, torch.arange(5), tokens_1T[0, 1:], 1.0)
    worst = float((logprobs - expected).abs().max())
    if not worst <= 1e-3:
        raise CheckpointError(
            f"{path}: the log-probs of {type(model.hf).__name__} are not a softmax over its output projection "
            f"(they differ by {worst:.2g})\n    fix: use a model without soft-capping, scaling or bias at the output"
        )
