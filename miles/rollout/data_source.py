"""Issues prompt groups in a seeded order, epoch after epoch, and takes groups back."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from miles.core.plugins import describe_error
from miles.core.ports import DataSource
from miles.core.samples import Group, Sample
from miles.errors import DataError, HookError
from miles.rollout.dataset.feed import PromptFeed, identity_text, same_data
from miles.rollout.dataset.rows import PromptFormat, PromptRow
from miles.rollout.rm_hub.labels import label_check
from miles.utils.hf import context_length, load_tokenizer

logger = logging.getLogger(__name__)

STATE_VERSION = 2
BLANK = "--disable-rollout-global-dataset"
_PLACES = 1 << 16
"""Groups whose file and line are remembered, the newest ones."""


class RolloutDataSourceWithBuffer:
    """The rows of `--prompt-data` as groups of n samples; groups that came back are issued first.

    Epoch e with `--rollout-shuffle` has the order of `random.Random(rollout_seed + e)`. A row is rendered and tokenised
    when it is drawn, and dropped then if its prompt is longer than `--rollout-max-prompt-len`. An epoch counts rows,
    dropped ones too. The position after any number of groups is (epoch, offset), so a resumed source goes on with
    exactly the groups that would have come.

    `sample.tokens` holds the prompt's ids and `sample.prompt` what the row has: with `--apply-chat-template` the
    rendered text, otherwise the row's string or messages; a prompt with images is always messages. In supervised
    fine-tuning (`--loss-type sft_loss`) the prompts stay as the file has them and are not tokenised: the loss mask needs
    the whole conversation. With `--disable-rollout-global-dataset` the samples are blank: a generate function brings the
    prompts.

    Raises DataError for an unusable row or file, CheckpointError for a folder without tokenizer.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.n_samples_per_prompt: int = args.n_samples_per_prompt
        self._feed = None if args.disable_rollout_global_dataset else _feed_of(args)
        self.group_index = 0
        self.index = 0
        self.buffer: list[Group] = []
        self._buffer_filter = _load_buffer_filter(args.buffer_filter_path)
        self._num_prompts: int | None = None
        self._places: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def __len__(self) -> int:
        """Prompts in one epoch: its rows; 0 without a dataset.

        Where the number of steps follows from it (`--num-epoch`) and prompts may be dropped, every row is tokenised to
        leave those out, so that the run ends with the epoch.
        """
        if self._feed is None:
            return 0
        if self._num_prompts is None:
            steps_follow = self.args.num_rollout is None and self.args.num_epoch is not None
            self._num_prompts = self._feed.count_fitting() if steps_follow else len(self._feed)
        return self._num_prompts

    @property
    def epoch(self) -> int:
        """Epochs that were drawn whole."""
        return self._feed.position[0] if self._feed else 0

    @property
    def offset(self) -> int:
        """Rows of this epoch already drawn; less than the epoch has."""
        return self._feed.position[1] if self._feed else 0

    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups: those of the buffer first, then the next prompts, over as many epochs as needed."""
        groups = self._from_buffer(num_samples) if self.buffer else []
        missing = num_samples - len(groups)
        try:
            rows = [None] * missing if self._feed is None else self._feed.take(missing)
        except BaseException:
            self.buffer[:0] = groups
            raise
        return groups + [self._new_group(row) for row in rows]

    def add_samples(self, groups: list[Group]) -> None:
        """Take groups back; each must have the n samples that it was issued with."""
        for group in groups:
            if len(group) != self.n_samples_per_prompt:
                raise ValueError(
                    f"a group of {len(group)} samples cannot go back: groups have {self.n_samples_per_prompt} "
                    "(--n-samples-per-prompt)"
                )
        self.buffer.extend(groups)

    def get_buffer_length(self) -> int:
        """Groups that wait in the buffer."""
        return len(self.buffer)

    def place_of(self, sample: Sample) -> tuple[str, int | None]:
        """File and line of a sample's row; the line is None for a group of long ago, or of before a resume."""
        name = self._feed.name if self._feed else BLANK
        return self._places.get(-1 if sample.group_index is None else sample.group_index, (name, None))

    def metrics(self) -> dict[str, float]:
        """Prompts dropped for their length since the run began, groups in the buffer, and the epoch as a fraction."""
        found = {"rollout/buffered_groups": float(len(self.buffer))}
        if self._feed is not None:
            epoch, offset = self._feed.position
            found["rollout/dropped_prompts"] = float(self._feed.dropped)
            found["rollout/epoch"] = epoch + offset / len(self._feed)
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready position, buffer, and what the position refers to."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "offset": self.offset,
            "streams": self._feed.state() if self._feed else [],
            "dropped": self._feed.dropped if self._feed else 0,
            "group_index": self.group_index,
            "index": self.index,
            "buffer": [[sample.to_dict() for sample in group] for group in self.buffer],
            "data": self._feed.identity() if self._feed else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises DataError when the state belongs to other data or another order: a position would then mean other rows.
        With `--accept-changed-data` the source then starts at the first row of the data as they are, in epoch 0; groups
        in the buffer and the numbers of groups go on.
        """
        if state.get("version") != STATE_VERSION:
            raise self._refused(f"the data source state has version {state.get('version')}, not {STATE_VERSION}")
        buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]
        if any(len(group) != self.n_samples_per_prompt for group in buffer):
            raise self._refused(
                f"the checkpoint's buffer holds groups of {len(buffer[0])} samples and --n-samples-per-prompt is "
                f"{self.n_samples_per_prompt}"
            )
        self._load_position(state)
        self.group_index, self.index = int(state["group_index"]), int(state["index"])
        self.buffer = buffer

    def _load_position(self, state: Mapping[str, Any]) -> None:
        saved, current = state["data"] or {}, self._feed.identity() if self._feed else {}
        if not same_data(saved, current):
            told = f"the checkpoint was made with {identity_text(saved)}, and this run reads {identity_text(current)}"
            if not self.args.accept_changed_data:
                raise self._refused(told)
            logger.warning("%s; it starts at the first row (--accept-changed-data)", told)
        if self._feed is not None:
            self._feed.dropped = int(state["dropped"])
            self._feed.seek(state["streams"] if same_data(saved, current) else None)

    def _refused(self, problem: str) -> DataError:
        return DataError(
            self._feed.name if self._feed else BLANK,
            problem,
            "resume with the settings and the files of the checkpoint; --accept-changed-data goes on with the data as "
            "they are now, from their first row; to train its weights anew on other data, start a new run with "
            "--hf-checkpoint CHECKPOINT/hf and without --load",
        )

    def _new_group(self, row: PromptRow | None) -> Group:
        first, n = self.index, self.n_samples_per_prompt
        group = [Sample(group_index=self.group_index, index=first + i) for i in range(n)]
        if row is not None:
            for sample in group:
                sample.prompt = copy.deepcopy(row.prompt)
                sample.tokens = row.tokens.tolist()
                sample.label = copy.deepcopy(row.label)
                sample.metadata = copy.deepcopy(row.metadata)
            self._places[self.group_index] = (row.path, row.line)
            if len(self._places) > _PLACES:
                self._places.popitem(last=False)
        self.group_index, self.index = self.group_index + 1, first + n
        return group

    def _from_buffer(self, num_samples: int) -> list[Group]:
        if self._buffer_filter is None:
            taken, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
            return taken
        path = self.args.buffer_filter_path
        try:
            taken = self._buffer_filter(self.args, None, self.buffer, num_samples)
        except Exception as error:
            raise HookError(path, describe_error(error), "mend this function") from error
        if not isinstance(taken, list) or any(not isinstance(group, list) for group in taken):
            raise HookError(path, f"returned {type(taken).__name__}", "return the list of groups taken from `buffer`")
        if len(taken) > num_samples:
            raise HookError(path, f"returned {len(taken)} groups when asked for {num_samples}", "return at most those")
        if any(group is kept for group in taken for kept in self.buffer):
            raise HookError(
                path, "returned a group that is still in the buffer", "remove what you return: `buffer.pop(0)`"
            )
        return list(taken)


def _feed_of(args: Any) -> PromptFeed:
    is_sft = getattr(args, "loss_type", "policy_loss") == "sft_loss"
    paths = args.prompt_data
    format = PromptFormat.of(args, args.rollout_max_context_len or context_length(args.hf_checkpoint))
    return PromptFeed(
        [paths] if isinstance(paths, str) else paths,
        args.prompt_data_weights,
        args.rollout_seed if args.rollout_shuffle else None,
        format if is_sft else format.checking(label_check(args)),
        None if is_sft else load_tokenizer(args.hf_checkpoint, args.chat_template_path),
    )


def _load_buffer_filter(path: str | None) -> Callable[..., Any] | None:
    if path is None:
        return None
    from miles.core.plugins import load_function

    return load_function(path)


__all__ = ["DataSource", "RolloutDataSourceWithBuffer"]
