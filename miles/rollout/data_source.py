"""Issues prompt groups in a seeded order, epoch after epoch, and takes groups back."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from miles.core.ports import DataSource
from miles.core.samples import Group, Sample
from miles.errors import DataError, HookError
from miles.rollout.prompts import PromptFormat, PromptRow, load_prompts
from miles.utils.hf import context_length, load_tokenizer

STATE_VERSION = 1


class RolloutDataSourceWithBuffer:
    """The rows of `--prompt-data` as groups of n samples; groups that came back are issued first.

    Epoch e with `--rollout-shuffle` has the order of `random.Random(rollout_seed + e)`. The position after any number
    of groups is (epoch, offset), so a resumed source goes on with exactly the groups that would have come.

    `sample.tokens` holds the prompt's ids and `sample.prompt` what the row has: with `--apply-chat-template` the
    rendered text, otherwise the row's string or messages. In supervised fine-tuning (`--loss-type sft_loss`) the
    prompts stay as the file has them and are not tokenised: the loss mask needs the whole conversation.

    Raises DataError for an unusable row or file, CheckpointError for a folder without tokenizer.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.n_samples_per_prompt: int = args.n_samples_per_prompt
        self.shuffle: bool = args.rollout_shuffle
        self.seed: int = args.rollout_seed
        is_sft = getattr(args, "loss_type", "policy_loss") == "sft_loss"
        self.file = load_prompts(
            args.prompt_data,
            PromptFormat(
                input_key=args.input_key,
                label_key=args.label_key,
                metadata_key=args.metadata_key,
                apply_chat_template=args.apply_chat_template,
                template_kwargs=args.apply_chat_template_kwargs,
                max_prompt_len=args.rollout_max_prompt_len,
                max_context_len=args.rollout_max_context_len or context_length(args.hf_checkpoint),
            ),
            None if is_sft else load_tokenizer(args.hf_checkpoint, args.chat_template_path),
        )
        self.epoch = 0
        self.offset = 0
        """Groups of this epoch already issued; less than the epoch has."""
        self.group_index = 0
        self.index = 0
        self.buffer: list[Group] = []
        self._order = self._order_of(0)
        self._buffer_filter = _load_buffer_filter(args.buffer_filter_path)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self.file.rows)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Exactly `num_samples` groups: those of the buffer first, then the next prompts, over as many epochs as needed."""
        groups = self._from_buffer(num_samples) if self.buffer else []
        while len(groups) < num_samples:
            groups.append(self._new_group(self.file.rows[self._order[self.offset]]))
            self._advance()
        return groups

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

    def metrics(self) -> dict[str, float]:
        """Prompts dropped at load for their length, groups in the buffer, and the epoch as a fraction."""
        return {
            "rollout/dropped_prompts": float(self.file.num_dropped),
            "rollout/buffered_groups": float(len(self.buffer)),
            "rollout/epoch": self.epoch + self.offset / len(self),
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready position, buffer, and what the position refers to."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "offset": self.offset,
            "group_index": self.group_index,
            "index": self.index,
            "buffer": [[sample.to_dict() for sample in group] for group in self.buffer],
            "data": self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises DataError when the state belongs to other data or another order: a position would then mean other rows.
        """
        if state.get("version") != STATE_VERSION:
            raise self._refused(f"the data source state has version {state.get('version')}, not {STATE_VERSION}")
        saved, current = dict(state["data"]), self._identity()
        for key, now in current.items():
            if key != "path" and saved.get(key) != now:
                raise self._refused(
                    f"the checkpoint was made with {saved.get('path')} ({_identity_text(saved)}) and this run reads "
                    f"{self.file.path} ({_identity_text(current)})"
                )
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self.group_index, self.index = int(state["group_index"]), int(state["index"])
        self._order = self._order_of(self.epoch)
        buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]
        if any(len(group) != self.n_samples_per_prompt for group in buffer):
            raise self._refused(
                f"the checkpoint's buffer holds groups of {len(buffer[0])} samples and --n-samples-per-prompt is "
                f"{self.n_samples_per_prompt}"
            )
        self.buffer = buffer

    def _identity(self) -> dict[str, Any]:
        """What must stay the same for a position to mean the same rows; the path is shown but may change."""
        return {
            "path": self.file.path,
            "size": self.file.size,
            "digest": self.file.digest,
            "rows": len(self),
            "lines": xxhash.xxh3_64_hexdigest(array("q", [row.line for row in self.file.rows]).tobytes()),
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
        }

    def _refused(self, problem: str) -> DataError:
        return DataError(
            self.file.path,
            problem,
            "resume with the settings and the file of the checkpoint; to train its weights on other data, start a new "
            "run with --hf-checkpoint CHECKPOINT/hf and without --load",
        )

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.file.rows)))
        if self.shuffle:
            random.Random(self.seed + epoch).shuffle(order)
        return order

    def _advance(self) -> None:
        self.offset += 1
        if self.offset == len(self.file.rows):
            self.epoch, self.offset = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)

    def _new_group(self, row: PromptRow) -> Group:
        first, n = self.index, self.n_samples_per_prompt
        group = [
            Sample(
                group_index=self.group_index,
                index=first + i,
                prompt=copy.deepcopy(row.prompt),
                tokens=row.tokens.tolist(),
                label=copy.deepcopy(row.label),
                metadata=copy.deepcopy(row.metadata),
            )
            for i in range(n)
        ]
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
            raise HookError(path, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(taken, list) or any(not isinstance(group, list) for group in taken):
            raise HookError(path, f"returned {type(taken).__name__}", "return the list of groups taken from `buffer`")
        if len(taken) > num_samples:
            raise HookError(path, f"returned {len(taken)} groups when asked for {num_samples}", "return at most those")
        if any(group is kept for group in taken for kept in self.buffer):
            raise HookError(
                path, "returned a group that is still in the buffer", "remove what you return: `buffer.pop(0)`"
            )
        return list(taken)


def _load_buffer_filter(path: str | None) -> Callable[..., Any] | None:
    if path is None:
        return None
    from miles.core.plugins import load_function

    return load_function(path)


def _identity_text(identity: Mapping[str, Any]) -> str:
    order = f"shuffled by seed {identity.get('seed')}" if identity.get("shuffle") else "in the file's order"
    rows = f"{identity.get('rows')} usable rows (hash of their lines {identity.get('lines')})"
    return f"{identity.get('size')} bytes, hash {identity.get('digest')}, {rows}, {order}"


__all__ = ["DataSource", "RolloutDataSourceWithBuffer"]
