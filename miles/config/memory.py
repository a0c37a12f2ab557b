"""What trainer and engines need of a GPU's memory, phase by phase, computed from sizes alone before anything is loaded."""

# P parameters, T tokens of a micro-batch, V vocabulary. Everything in bytes.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.config.model_size import ModelSize
from miles.config.sections.train import Recompute

GIB = 2**30
FP32 = 4
Phase = Literal["start", "rollout", "training", "publish"]
Parts = dict[str, int]
"""Bytes of each part, by its name in the table."""

TRAINER_OWN = GIB
"""What CUDA, its libraries and the allocator's gaps take of a trainer's GPU; an assumption."""
ENGINE_OWN = 2 * GIB
"""What an engine keeps without weights and KV: CUDA, its libraries and captured graphs. 1.8 GiB were seen."""
UNIT_PARAMETERS = 50_000_000
"""Parameters that the trainer gathers at once at least: as `fsdp_utils.model` has it."""
HEAD_CHUNK = 1 << 29
"""Logits of a chunk of the output head, in the type of the weights: as `training_utils.fused_head` has it."""
PLAIN_CHUNK_BYTES = 10 << 26
"""A chunk of the head in fp32 and what is made of it: as `training_utils.log_probs` has it on a GPU."""
KEPT_LOGITS = 1 / 16
"""Share of a GPU for logits that wait for the backward pass: as the trainer's worker has it."""
BACKWARD_OF_LAYER = 0.5
"""Gradients of a layer's activations that exist at a time, as a share of the activations; an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerNeeds:
    """What the memory of one trainer rank depends on."""

    policy: ModelSize
    reference: ModelSize | None = None
    critic: ModelSize | None = None
    ranks: int = 1
    bf16: bool = True
    compiled: bool = True
    recompute: Recompute = "none"
    tokens: int = 8192
    """Tokens of the largest micro-batch."""
    longest: int = 1
    """Tokens of the longest sequence, below which `tokens` cannot go."""
    several: bool = True
    """Whether an optimizer step has more than one micro-batch, so that gradients exist when the next one is computed."""
    whole_logits: bool = False
    """Whether the loss is given logits of all tokens."""
    cpu_offload: bool = False
    """Whether weights, gradients and moments are in the CPU's memory."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is computed with."""
        return 2 if self.bf16 else FP32

    @property
    def keeps_gathered(self) -> bool:
        """Whether whole weights stay from the forward to the backward pass."""
        return self.ranks == 1 and self.recompute != "full" and not self.cpu_offload


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What the memory of an engine on one GPU depends on."""

    model: ModelSize
    itemsize: int = 2
    tp: int = 1
    fraction: float | None = None
    """`--sglang-mem-fraction-static`; None takes SGLang's own."""
    max_running_requests: int = 256
    prefill_tokens: int | None = None
    """`--sglang-chunked-prefill-size`."""
    saves_memory: bool = False
    """Whether it can give memory up: SGLang then chooses a smaller fraction."""
    longest: int = 1
    """Tokens of the longest request."""

    @property
    def weights(self) -> int:
        """Weights of one GPU."""
        return self.model.parameters * self.itemsize // self.tp

    @property
    def kv_per_token(self) -> int:
        """Keys and values of a token on one GPU; ranks beyond the number of KV heads hold copies."""
        model = self.model
        return 2 * model.layers * max(1, model.kv_heads // self.tp) * model.head_dim * self.itemsize

    def static(self, total: int) -> int:
        """Bytes that it takes for weights and KV of a GPU of `total` bytes which it finds empty."""
        if self.fraction is not None:
            return int(total * self.fraction)
        return int(total - self._reserve(total)) - (0 if self.saves_memory else ENGINE_OWN)

    def _reserve(self, total: int) -> float:
        """What SGLang 0.5.17 leaves free where it is not told a fraction, as its `server_args.py` computes it."""
        mib, slack = total / 2**20, 512 + self.tp / 8 * 1024
        if not self.saves_memory:  # it measures what is left after the graphs are captured
            return slack * 2**20
        steps = ((35, 2048), (60, 4096), (160, 8192))
        prefill = self.prefill_tokens or next((size for gib, size in steps if mib < gib * 1024), 16384)
        reserve = slack + 1.5 * max(prefill, 2048) + 2 * self.max_running_requests
        return max(reserve, 10 * 1024 if mib > 60 * 1024 else 0) * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run on GPUs starts, as far as memory depends on it."""

    trainer: TrainerNeeds | None
    engine: EngineNeeds | None
    engines: int = 1
    shares: bool = False
    """Whether engines begin on the first trainer's GPU."""
    offloads_train: bool = False
    given_up: frozenset[str] = frozenset()
    """What engines give up while the trainer works: `kv_cache`, `weight`."""
    bucket_bytes: int = 512 * 2**20

    @property
    def ranks(self) -> int:
        """Trainer ranks."""
        return self.trainer.ranks if self.trainer else 0

    @property
    def engine_gpus(self) -> int:
        """GPUs that have an engine."""
        return self.engines * self.engine.tp if self.engine else 0

    @property
    def wanted_gpus(self) -> int:
        """GPUs that the run takes."""
        return max(self.ranks, self.engine_gpus) if self.shares else self.ranks + self.engine_gpus


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes of each part in each phase, on each of the GPUs `first` to `last` of the run."""

    first: int
    last: int
    phases: dict[Phase, Parts]

    def total(self, phase: Phase) -> int:
        """All parts of a phase."""
        return sum(self.phases[phase].values())


def predict(needs: Needs, total: int) -> list[Prediction]:
    """One prediction for each kind of GPU (with trainer and engine, or one of them), of `total` bytes each."""
    trainer, engine, ranks, engine_gpus = needs.trainer, needs.engine, needs.ranks, needs.engine_gpus
    if not needs.shares:
        kinds = [(0, ranks, True, False), (ranks, ranks + engine_gpus, False, True)]
    else:
        both = min(ranks, engine_gpus)
        kinds = [(0, both, True, True), (both, ranks, True, False), (both, engine_gpus, False, True)]
    found: list[Prediction] = []
    for first, end, trains, serves in kinds:
        if end > first:
            parts: dict[Phase, Parts] = {"start": {}, "rollout": {}, "training": {}, "publish": {}}
            for phase in parts:
                if trains and trainer:
                    parts[phase] |= _of_trainer(needs, trainer, phase, total)
                if serves and engine:
                    parts[phase] |= _of_engine(needs, engine, phase, total)
            found.append(Prediction(first, end - 1, parts))
    return found


# ---- the trainer


def held(trainer: TrainerNeeds, *, gradients: bool) -> Parts:
    """What a rank holds on its device between passes: its shard of weights, moments and, if asked for, gradients, in fp32."""
    if trainer.cpu_offload:
        return {}
    policy, critic, ranks = trainer.policy.parameters, trainer.critic, trainer.ranks
    trained = policy + (critic.parameters if critic else 0)
    parts = {"weights": FP32 * policy // ranks, "optimizer": 2 * FP32 * trained // ranks}
    if critic:
        parts["critic"] = FP32 * critic.parameters // ranks
    if trainer.reference:
        parts["reference"] = FP32 * trainer.reference.parameters // ranks
    if gradients:
        parts["gradients"] = FP32 * trained // ranks
    return parts


def training_peak(trainer: TrainerNeeds, total: int) -> Parts:
    """The largest of three moments of a step: the head's backward pass, a recomputed layer's, the end of the backward pass."""
    model, size = trainer.policy, trainer.itemsize
    kept, whole = _activations(trainer)
    head, head_gradient = _head(trainer, total)
    gathered, gradients = _gathered(trainer), trainer.several
    at_head = held(trainer, gradients=gradients) | {
        "gathered": gathered,
        "activations": kept * trainer.tokens * model.layers,
        "output head": head + head_gradient,
    }
    moments = [at_head]
    if trainer.recompute != "none":
        layer = int(whole * (1 + BACKWARD_OF_LAYER)) * trainer.tokens
        in_layer = at_head | {
            "activations": kept * trainer.tokens * model.layers + layer,
            "output head": head_gradient,
        }
        moments.append(in_layer)
    # Copies on a rank alone keep their gradients until the backward pass ends; FSDP reduces them unit by unit.
    unsummed = size * model.parameters if trainer.keeps_gathered else (size + FP32) * max(model.root, _unit(model))
    at_end = held(trainer, gradients=True) | {
        "gathered": gathered + unsummed,
        "output head": head_gradient,
    }
    moments.append(at_end)
    return max(moments, key=lambda parts: sum(parts.values()))


def _of_trainer(needs: Needs, trainer: TrainerNeeds, phase: Phase, total: int) -> Parts:
    own = {"CUDA": TRAINER_OWN}
    if phase == "training":
        parts = training_peak(trainer, total) | own
    elif phase == "rollout" and needs.offloads_train:
        parts = own
    elif phase == "rollout":
        parts = held(trainer, gradients=False) | own
    elif phase == "publish":
        parts = held(trainer, gradients=False) | {"buckets": _sent(needs, trainer)} | own
    else:
        # A trainer that compiles has gradients once already, for a moment.
        after = held(trainer, gradients=trainer.compiled) | {"buckets": _sent(needs, trainer)}
        if trainer.compiled and trainer.keeps_gathered:
            after["gathered"] = 2 * trainer.itemsize * trainer.policy.parameters
        parts = max(_loading(trainer), after, key=lambda parts: sum(parts.values())) | own
    return {f"trainer: {name}": number for name, number in parts.items()}


def _loading(trainer: TrainerNeeds) -> Parts:
    """Each rank has a model whole in fp32 before it shards it: the policy first, the reference and the critic after it."""
    sharded = held(trainer, gradients=False)
    beside = {"weights": sharded["weights"]} if sharded and trainer.ranks > 1 else {}
    moments = [{"whole model": FP32 * trainer.policy.parameters} | beside]
    others = (model for model in (trainer.reference, trainer.critic) if model)
    moments += [sharded | {"whole model": FP32 * model.parameters} for model in others]
    return max(moments, key=lambda parts: sum(parts.values()))


def _unit(model: ModelSize) -> int:
    """Parameters that are gathered at once."""
    return 0 if not model.layer else model.layer * -(-UNIT_PARAMETERS // model.layer)


def _gathered(trainer: TrainerNeeds) -> int:
    """Whole weights in the type of the computation: all of them, or those outside the layers, one unit and the next."""
    model = trainer.policy
    if trainer.keeps_gathered:
        return trainer.itemsize * model.parameters
    return trainer.itemsize * min(model.parameters, model.root + 2 * _unit(model))


def _activations(trainer: TrainerNeeds) -> tuple[int, int]:
    """Bytes a token and layer that wait for the backward pass; and all that a layer makes, which is as much without recomputation.

    A compiled layer keeps: two inputs, two norms' outputs, queries and keys before (where they are normalised) and after
    rotation, values, attention's output, and three products of the MLP. An eager one keeps the insides of norms too.
    """
    model, size = trainer.policy, trainer.itemsize
    rotated = model.query + model.key
    numbers = 4 * model.hidden + rotated * (2 if model.norms_heads else 1) + model.key + model.query
    numbers += model.mlp
    whole = numbers * size + model.heads * FP32
    if not trainer.compiled:
        normed = 2 * model.hidden + (rotated if model.norms_heads else 0)
        whole += normed * (size + (FP32 if trainer.bf16 else 0)) + model.mlp // 3 * size
    if trainer.recompute == "full":
        return model.hidden * size, whole
    if trainer.recompute == "selective":
        return (model.hidden + rotated + model.key + model.query) * size + model.heads * FP32, whole
    return whole, whole


def _head(trainer: TrainerNeeds, total: int) -> tuple[int, int]:
    """Logits that exist at a time; and the gradient of the head's weight, as a sum in fp32 and in the weights' type."""
    model, size = trainer.policy, trainer.itemsize
    gradient = model.head * (FP32 + (size if trainer.bf16 else 0))
    all_logits = trainer.tokens * model.vocabulary
    if trainer.whole_logits:
        return all_logits * (size + 2 * FP32) + PLAIN_CHUNK_BYTES, gradient
    chunk = min(all_logits, HEAD_CHUNK) * size
    kept = 0 if trainer.recompute == "full" else min(all_logits * size, int(total * KEPT_LOGITS))
    return kept if kept >= all_logits * size else kept + chunk, gradient


def _sent(needs: Needs, trainer: TrainerNeeds) -> int:
    """A bucket as its tensors and end to end; and the largest tensor in fp32, where it comes from several ranks or the CPU."""
    if needs.engine is None:
        return 0
    largest, size = max(trainer.policy.tensors, default=0), needs.engine.itemsize
    return 2 * max(needs.bucket_bytes, largest * size) + (
        largest * FP32 if trainer.ranks > 1 or trainer.cpu_offload else 0
    )


# ---- engines


def _of_engine(needs: Needs, engine: EngineNeeds, phase: Phase, total: int) -> Parts:
    parts = {"weights": engine.weights, "KV": max(0, engine.static(total) - engine.weights)}
    away = {"weights" if name == "weight" else "KV" for name in needs.given_up}
    if phase == "training":
        parts = {name: number for name, number in parts.items() if name not in away}
    elif phase == "publish":
        parts = {name: number for name, number in parts.items() if name not in away - {"weights"}}
    parts["CUDA, graphs"] = ENGINE_OWN
    return {f"engine: {name}": number for name, number in parts.items()}


def on_the_host(trainer: TrainerNeeds) -> int:
    """Host memory, over all ranks, of what leaves the GPUs while engines generate, or with `cpu_offload` is always there.

    A pinned block is as large as the next power of two of bytes: that is how torch rounds them.
    """
    if trainer.cpu_offload:
        # Weights, and gradients of one micro-batch and the sum of others; moments are not pinned.
        trained = 3 if trainer.several else 2
        moments = sum(2 * FP32 * model.parameters for model in (trainer.policy, trainer.critic) if model)
    else:
        trained, moments = 3, 0  # weights and two moments
    models = [(trainer.policy, trained), (trainer.reference, 1), (trainer.critic, trained)]
    shards = [(-(-n // trainer.ranks), copies) for model, copies in models if model for n in model.tensors]
    return moments + trainer.ranks * sum(copies * (1 << max(0, FP32 * n - 1).bit_length()) for n, copies in shards)
