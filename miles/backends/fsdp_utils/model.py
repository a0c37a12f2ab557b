"""A Hugging Face causal language model as a policy: token ids in, log-probs and entropies out, sharded by FSDP2."""

# T tokens of a pack, N predicted tokens, D hidden size, V vocabulary

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from miles.backends.fsdp_utils.adaptations.adaptation import Shapes
from miles.backends.fsdp_utils.adaptations.fitness import require_attention_only, require_layers
from miles.backends.fsdp_utils.adaptations.registry import adaptation_of
from miles.backends.fsdp_utils.hf_folder import require_equal_heads, require_model_folder, stored_tensors
from miles.backends.fsdp_utils.layers import decoder_layers
from miles.backends.fsdp_utils.packed_attention import take_rows, use_packed_attention
from miles.backends.fsdp_utils.tensor_file import StoredTensor
from miles.backends.fsdp_utils.whole_copies import WholeCopies
from miles.backends.training_utils.log_probs import Entropy, TargetLogProb, linear_log_softmax
from miles.backends.training_utils.packing import FlatBatch, MicroBatch
from miles.backends.training_utils.schedule import SequenceFlops
from miles.config.schema import RunConfig
from miles.errors import CheckpointError, TrainingError
from miles.utils.expert_weights import Place

PREFIX = "hf."
CPU = torch.device("cpu")
UNIT_PARAMETERS = 50_000_000
"""Parameters at least that ranks gather at once: below it a GPU waits for the CPU that asks for the next."""


class DecoderModel(nn.Module):
    """A Hugging Face model, and what is made of its hidden states, as one module to shard."""

    copies: WholeCopies | None = None
    """What passes compute with, where FSDP does not gather it."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def vocab_size(self) -> int:
        """Token ids that it knows."""
        return int(self.hf.get_input_embeddings().num_embeddings)  # pyright: ignore[reportArgumentType]

    @property
    def flops(self) -> SequenceFlops:
        """What a sequence costs: every matrix but the input embedding, of experts those used, and attention of all layers."""
        config = self.hf.config.get_text_config()
        embedding = cast(nn.Embedding, self.hf.get_input_embeddings()).weight.shape.numel()
        used = adaptation_of(self.hf.config.model_type).experts_used(config)
        matrices = sum(p.shape.numel() * (used if p.ndim == 3 else 1.0) for p in self.parameters() if p.ndim > 1)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * size
        return SequenceFlops(2.0 * (matrices - embedding), 2.0 * config.num_hidden_layers * width)


class PolicyModel(DecoderModel):
    """The model and its output head in one forward, so that FSDP gathers the head's weight for the log-probs."""

    kept_logit_bytes = 0
    """Logits that may be kept from the forward to the backward pass; those beyond it are computed again."""

    def forward(
        self, part: MicroBatch, temperature: float, *, entropy: bool = False, logits: bool = False
    ) -> tuple[Tensor, ...]:
        """Log-probs of the predicted tokens, in nats; then entropies, and whole fp32 logits over the temperature, if asked for.

        Shapes [N], [N] and [N, V]; all carry gradients. Whole logits are what the chunks of `log_probs` avoid: they are for
        losses that cannot do without.
        """
        decoder = self.hf.base_model
        hidden_TD = decoder(
            input_ids=part.input_ids_T.unsqueeze(0),
            position_ids=part.position_ids_T.unsqueeze(0),
            sequence_layout=part.layout,
            use_cache=False,
        ).last_hidden_state[0]
        hidden_ND = take_rows(hidden_TD, part.positions_N)
        weight_VD = cast(nn.Linear, self.hf.get_output_embeddings()).weight
        heads = (TargetLogProb(part.targets_N), *((Entropy(),) if entropy else ()))
        found = linear_log_softmax(hidden_ND, weight_VD, heads, temperature, kept_bytes=self.kept_logit_bytes)
        return (*found, (hidden_ND @ weight_VD.T).float() / temperature) if logits else found

    @property
    def flops(self) -> SequenceFlops:
        """What a sequence costs, the output head included, also one that shares its matrix with the input embedding."""
        cost = super().flops
        embedding = cast(nn.Embedding, self.hf.get_input_embeddings()).weight.shape.numel()
        return (
            cost + SequenceFlops(2.0 * embedding, 0.0)
            if self.hf.config.get_text_config().tie_word_embeddings
            else cost
        )


def ties_embeddings(folder: str | Path) -> bool:
    """Whether input embedding and output head are one tensor, by the folder's config.json; CheckpointError when unreadable."""
    return bool(_read_config(require_model_folder(folder)).tie_word_embeddings)


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(str(path), local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: config.json does not load: {error}\n    fix: check the folder") from error


def load_policy(folder: str | Path, device: torch.device = CPU) -> tuple[PolicyModel, dict[str, StoredTensor]]:
    """Load a model folder in fp32 to `device`, without remote code, and the list of tensors that the folder holds.

    Dropout is off in the result, and attention is that of packed sequences. Raises CheckpointError when the folder is
    missing or incomplete, when model and folder differ in any tensor's name or shape, and when log-probs of packed
    sequences are not a plain softmax over the head's projection of each sequence alone.
    """
    path = require_model_folder(folder)
    config = _read_config(path)
    require_attention_only(path, config)
    tied = bool(config.tie_word_embeddings)
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
            **adaptation_of(config.model_type).load_options,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: the model does not load: {error}\n    fix: check the folder") from error
    hf, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _require_complete(path, info)
    require_layers(path, hf)
    model = PolicyModel(hf)
    model.to(device)
    places = folder_places(hf, {name: tuple(tensor.shape) for name, tensor in hf_tensors(model).items()})
    _require_same_tensors(path, expected, {name: place.shape for name, place in places.items()})
    disable_dropout(model)
    _pack_attention(path, model, device)
    model.train()
    return model, expected


def shard(
    model: DecoderModel,
    mesh: DeviceMesh,
    *,
    bf16: bool = False,
    keeps_gathered: bool = False,
    cpu_offload: bool = False,
) -> None:
    """Shard the decoder layers, in units that are gathered together, and the rest over `mesh`.

    With `bf16` the layers compute in bfloat16 with rounded weights, while the shards and the sums of gradients, over
    ranks and over micro-batches, stay fp32. With `keeps_gathered`, and on a mesh of one rank, whole weights stay from the
    forward to the backward pass; after a forward pass alone, `release_gathered` gives them up. With `cpu_offload` shards
    and their gradients are in the CPU's memory, and what is gathered of them is on the mesh's device.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    if keeps_gathered and mesh.size() == 1:
        model.copies = WholeCopies(model, mesh, dtype)
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype if bf16 else None, reduce_dtype=torch.float32)
    on_gpu = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy()
    for unit in (*gathered_together(decoder_layers(model.hf)), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload)


def sharding_of(config: RunConfig) -> dict[str, bool]:
    """The settings of `shard` that all roles of a run share."""
    return {"bf16": config.train.bf16, "cpu_offload": config.train.cpu_offload}


def gathered_together(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Neighbours in units of at least `UNIT_PARAMETERS`, the last as it comes: each unit costs the CPU as much as a large one."""
    units: list[list[nn.Module]] = []
    size = UNIT_PARAMETERS
    for layer in layers:
        if size >= UNIT_PARAMETERS:
            units.append([])
            size = 0
        units[-1].append(layer)
        size += sum(parameter.numel() for parameter in layer.parameters())
    return units


def keep_gathered_after_backward(model: DecoderModel, *, keeps: bool) -> None:
    """Whether backward passes leave copies in place for a micro-batch that follows; FSDP gathers weights for each anew."""
    if model.copies is not None:
        model.copies.keeps_after_backward = keeps


def release_gathered(model: DecoderModel) -> None:
    """Give up the whole weights that a forward pass left; the next one gathers them anew."""
    if model.copies is not None:
        model.copies.release()
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def hf_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Parameters and saved buffers by the module's names, each once: of tied ones the first name. Sharded ones are DTensors.

    `folder_places` says where the folder's tensors lie in them.
    """
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name.removeprefix(PREFIX)] = tensor
    return found


def folder_places(hf: PreTrainedModel, shapes: Shapes) -> dict[str, Place]:
    """The folder's tensors by name, and where each lies in the tensors of `hf_tensors`, whose names and whole shapes are given."""
    return adaptation_of(hf.config.model_type).places(shapes)


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


def _pack_attention(path: Path, model: PolicyModel, device: torch.device) -> None:
    """Switch to packed attention, and compare a pack with the model's own logits of each of its sequences.

    So neither layers that look across borders nor soft-capping, scaling or a bias at the output are left out in silence.
    """
    tokens = torch.arange(23, device=device) * 7 % model.vocab_size
    sequences = [tokens[:14], tokens[14:20], tokens[20:]]
    expected: list[Tensor] = []
    with torch.no_grad():
        for sequence_T in sequences:
            logits_TV = model.hf(input_ids=sequence_T.unsqueeze(0), use_cache=False).logits[0].float()
            log_p_TV = torch.log_softmax(logits_TV, dim=-1)
            expected.append(log_p_TV[:-1].gather(1, sequence_T[1:, None]).squeeze(1))
        use_packed_attention(model.hf)
        packed = FlatBatch.from_sequences([s.tolist() for s in sequences])
        try:
            (logprobs_N,) = model(packed.micro_batch(np.arange(len(sequences))).to(device), 1.0)
        except (TrainingError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    worst = float((logprobs_N - torch.cat(expected)).abs().max())
    if not worst <= 1e-3:
        raise CheckpointError(
            f"{path}: the log-probs of {type(model.hf).__name__} on packed sequences are not a softmax over its output "
            f"projection of each sequence alone (they differ by {worst:.2g})\n    fix: use a model without soft-capping, "
            "scaling or bias at the output, and whose layers mix tokens by attention only"
        )
