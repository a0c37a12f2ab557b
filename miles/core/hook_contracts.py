"""The table of hooks: every setting that names a user's function, how that is called, and where.

The check at start-up, `miles hooks` and `miles hooks check` read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["data", "rollout", "reward", "filter", "evaluation", "conversion", "metrics", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One way to call a hook: what is passed by position, and what by keyword."""

    name: str
    positional: tuple[str, ...]
    keyword: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"fn({', '.join([*self.positional, *(f'{k}=...' for k in self.keyword)])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """What a class that serves as a hook must have."""

    constructor: Call
    required: tuple[tuple[str, Call], ...]
    one_of: tuple[tuple[str, ...], ...] = ()
    """Groups of methods of which one must be there completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a hook is and how it is called. A function must accept one of `calls`, a class must have `methods`."""

    path: str
    """The setting that names the hook."""
    kind: Kind
    example: str
    """A signature that fits, shown as the fix."""
    called: str
    """Where and when it is called, and what becomes of what it returns."""
    calls: tuple[Call, ...] = ()
    methods: Methods | None = None
    must_be_async: bool = False
    """Whether a plain function, which would hold up every other request while it waits, is refused."""


_INPUT = Call(name="input", positional=("input",))
_SAMPLES = Call(name="samples", positional=("args", "samples"))
_TIS_NAMES = (
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
    "parallel_state",
    "max_seq_lens",
)
_REDUCER_NAMES = ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")


def _rollout_contract(path: str, kind: Kind, called: str) -> Contract:
    legacy = Call(name="legacy", positional=("args", "rollout_id", "data_source"), keyword=("evaluation",))
    return Contract(
        path=path,
        kind=kind,
        example="class Rollout: def __init__(self, input): ...; async def __call__(self, input): ...  "
        "or  def fn(args, rollout_id, data_source, evaluation=False)",
        called=called,
        calls=(legacy,),
        methods=Methods(constructor=_INPUT, required=(("__call__", _INPUT),)),
    )


GROUP_REWARD = "--custom-rm-path with --group-rm"

HOOKS: dict[str, Contract] = {
    "--data-source-path": Contract(
        path="data.source_path",
        kind="data",
        example="class Source: def __init__(self, args), get_samples(self, num_samples) -> list[list[Sample]], "
        "add_samples(self, samples), state_dict(self), load_state_dict(self, state)",
        called="made once by the rollout manager; asked for prompt groups, given back what was not used",
        methods=Methods(
            constructor=Call(name="args", positional=("args",)),
            required=(
                ("get_samples", Call(name="get_samples", positional=("num_samples",))),
                ("add_samples", Call(name="add_samples", positional=("samples",))),
            ),
            one_of=(("state_dict", "load_state_dict"), ("save", "load")),
        ),
    ),
    "--buffer-filter-path": Contract(
        path="data.buffer_filter_path",
        kind="data",
        example="def fn(args, rollout_id, buffer, num_samples) -> list[list[Sample]]",
        called="by the data source when groups came back: takes what is issued next out of `buffer`",
        calls=(Call(name="buffer", positional=("args", "rollout_id", "buffer", "num_samples")),),
    ),
    "--rollout-function-path": _rollout_contract(
        "rollout.function_path", "rollout", "by the rollout manager, once a step: collects the training batch"
    ),
    "--custom-generate-function-path": Contract(
        path="rollout.custom_generate_function_path",
        kind="rollout",
        example="async def fn(input) -> GenerateFnOutput  or  async def fn(args, sample, sampling_params) -> Sample",
        called="for each sample, many at the same time: fills in tokens, response and status",
        calls=(
            _INPUT,
            Call(name="legacy_evaluation", positional=("args", "sample", "sampling_params"), keyword=("evaluation",)),
            Call(name="legacy", positional=("args", "sample", "sampling_params")),
        ),
        methods=Methods(constructor=Call(name="empty", positional=()), required=(("__call__", _INPUT),)),
        must_be_async=True,
    ),
    "--rollout-sample-hook-path": Contract(
        path="rollout.sample_hook_path",
        kind="rollout",
        example="def fn(args, sample, *, rollout_id, evaluation) -> None",
        called="for each finished sample, before its reward; several are called in the order given",
        calls=(Call(name="sample", positional=("args", "sample"), keyword=("rollout_id", "evaluation")),),
    ),
    "--custom-rm-path": Contract(
        path="reward.custom_rm_path",
        kind="reward",
        example="async def fn(args, sample, **kwargs) -> float",
        called="for each finished sample, in training and evaluation",
        calls=(Call(name="sample", positional=("args", "sample")),),
    ),
    GROUP_REWARD: Contract(
        path="reward.custom_rm_path",
        kind="reward",
        example="async def fn(args, samples, **kwargs) -> list[float]",
        called="for each finished group, in training and evaluation",
        calls=(Call(name="group", positional=("args", "samples")),),
    ),
    "--dynamic-sampling-filter-path": Contract(
        path="rollout.dynamic_sampling_filter_path",
        kind="filter",
        example="def fn(args, group, **kwargs) -> DynamicFilterOutput | bool",
        called="for each finished group, after its rewards: keeps or drops it",
        calls=(Call(name="group", positional=("args", "group")),),
    ),
    "--rollout-sample-filter-path": Contract(
        path="rollout.sample_filter_path",
        kind="filter",
        example="def fn(args, groups) -> None",
        called="once a step on the collected batch: may set `remove_sample`",
        calls=(Call(name="groups", positional=("args", "groups")),),
    ),
    "--rollout-all-samples-process-path": Contract(
        path="rollout.all_samples_process_path",
        kind="filter",
        example="def fn(args, all_groups, data_source) -> None",
        called="once a step, after collection: sees every finished group, dropped ones too",
        calls=(Call(name="all_groups", positional=("args", "all_groups", "data_source")),),
    ),
    "--eval-function-path": _rollout_contract(
        "rollout.eval_function_path", "evaluation", "by the rollout manager, in place of the rollout function"
    ),
    "--custom-reward-post-process-path": Contract(
        path="reward.custom_post_process_path",
        kind="conversion",
        example="def fn(args, samples) -> tuple[list[float], list[float]]",
        called="once a step, in place of the group normalisation: gives raw and normalised rewards",
        calls=(_SAMPLES,),
    ),
    "--custom-convert-samples-to-train-data-path": Contract(
        path="reward.custom_convert_samples_path",
        kind="conversion",
        example="def fn(args, samples) -> dict[str, list | Column]",
        called="once a step, in place of the conversion: gives the columns of the train batch",
        calls=(_SAMPLES,),
    ),
    "--custom-rollout-log-function-path": Contract(
        path="rollout.custom_log_function_path",
        kind="metrics",
        example="def fn(rollout_id, args, samples, extra_metrics, rollout_time) -> bool",
        called="once a step, before the metrics of the rollout are made: True leaves them out",
        calls=(Call(name="log", positional=("rollout_id", "args", "samples", "extra_metrics", "rollout_time")),),
    ),
    "--custom-eval-rollout-log-function-path": Contract(
        path="eval.custom_log_function_path",
        kind="metrics",
        example="def fn(rollout_id, args, data, extra_metrics) -> bool",
        called="after each evaluation, before its metrics are reported: True leaves them out",
        calls=(Call(name="log", positional=("rollout_id", "args", "data", "extra_metrics")),),
    ),
    "--rollout-data-postprocess-path": Contract(
        path="algorithm.data_postprocess_path",
        kind="loss",
        example="def fn(args, rollout_data) -> None",
        called="by every trainer rank, once a step, before the advantages: may set `rewards` and clear `loss_masks`",
        calls=(Call(name="rollout_data", positional=("args", "rollout_data")),),
    ),
    "--custom-advantage-function-path": Contract(
        path="algorithm.custom_advantage_function_path",
        kind="loss",
        example="def fn(args, rollout_data) -> None",
        called="by every trainer rank, once a step: sets `advantages`",
        calls=(Call(name="rollout_data", positional=("args", "rollout_data")),),
    ),
    "--custom-loss-function-path": Contract(
        path="algorithm.custom_loss_function_path",
        kind="loss",
        example="def fn(args, batch, logits, reducer) -> tuple[Tensor, dict[str, Tensor]]",
        called="by every trainer rank, for each micro-batch",
        calls=(Call(name="loss", positional=("args", "batch", "logits", "reducer")),),
    ),
    "--custom-pg-loss-reducer-function-path": Contract(
        path="algorithm.custom_pg_loss_reducer_function_path",
        kind="loss",
        example="def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> "
        "Callable[[Tensor], Tensor]",
        called="by every trainer rank, for each micro-batch",
        calls=(Call(name="reducer", positional=_REDUCER_NAMES),),
    ),
    "--custom-tis-function-path": Contract(
        path="correction.custom_tis_function_path",
        kind="loss",
        example="def fn(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs) -> "
        "tuple[Tensor, list[Tensor] | None, dict[str, Tensor]]",
        called="by every trainer rank, for each micro-batch",
        calls=(Call(name="terms", positional=(), keyword=_TIS_NAMES),),
    ),
}
"""Every hook of the configuration, by the flag that names it."""
