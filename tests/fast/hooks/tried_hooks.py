"""Hooks with one fault each, for the contract tests to find, and a few that are right."""

import random
import sys
import time

from miles.core.samples import Sample
from miles.rollout.filter_hub.base_types import DynamicFilterOutput


# ---- rewards
async def right(args, sample, **kwargs):
    return float(sample.response == sample.label)


def plain(args, sample):
    return len(sample.response) % 2


def with_own_setting(args, sample):
    return -args.length_penalty * sample.response_length


def refuses_without_label(args, sample):
    if sample.label is None:
        raise ValueError("this reward needs a label")
    return 1.0


def fails_without_label(args, sample):
    return float(sample.label.strip() == sample.response)


def fails_on_empty(args, sample):
    return float(sample.response[0] == "4")


def gives_none(args, sample):
    return None


def gives_text(args, sample):
    return "1.0"


def gives_nan(args, sample):
    return float("nan")


def gives_object(args, sample):
    return {"score": 1.0}


def strips_response(args, sample):
    sample.response = sample.response.strip()
    return 1.0


def masks(args, sample):
    sample.loss_mask = [0] * sample.response_length
    return 1.0


def sets_args(args, sample):
    args.my_count = 1
    return 1.0


def keeps_a_lambda(args, sample):
    sample.metadata["judge"] = lambda: 1
    return 1.0


def moody(args, sample):
    return random.random()


async def blocks(args, sample, **kwargs):
    time.sleep(0.15)
    return 1.0


def sleeps(args, sample):
    time.sleep(0.4)
    return 1.0


def ends_the_process(args, sample):
    print("goodbye")
    sys.stdout.flush()
    import os

    os._exit(3)


async def never_comes_back(args, sample):
    while True:
        pass


class Judge:
    async def __call__(self, args, sample):
        return 0.5


judge = Judge()


# ---- group rewards
def ranks(args, samples, **kwargs):
    return [float(i) for i, _ in enumerate(samples)]


def one_too_few(args, samples):
    return [1.0] * (len(samples) - 1)


def one_for_all(args, samples):
    return 1.0


def sorts(args, samples):
    samples.sort(key=lambda s: -s.index)
    return [1.0] * len(samples)


def fails_for_one(args, samples):
    return [1.0 / (len(samples) - 1)] * len(samples)


# ---- before the reward
def trims(args, sample, *, rollout_id, evaluation):
    sample.metadata["step"] = rollout_id


def cuts_tokens(args, sample, *, rollout_id, evaluation):
    sample.rollout_log_probs = sample.rollout_log_probs[:-1]


def renames(args, sample, *, rollout_id, evaluation):
    sample.index = 0


# ---- filters
def keeps_mixed(args, group, **kwargs):
    return DynamicFilterOutput(keep=len({s.reward for s in group}) > 1, reason="all_the_same")


def says_nothing(args, group):
    return None


def clears_rewards(args, group):
    for sample in group:
        sample.reward = 0.0
    return True


def removes_wrong(args, groups):
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.reward == 0


def returns_groups(args, groups):
    return groups


def drops_a_group(args, groups):
    groups.pop()


def looks(args, all_groups, data_source):
    assert len(data_source) == len(all_groups)


def changes_finished(args, all_groups, data_source):
    all_groups[0][0].tokens = []


# ---- data
def oldest(args, rollout_id, buffer, num_samples):
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]


def leaves_them(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def too_many(args, rollout_id, buffer, num_samples):
    taken, buffer[:] = list(buffer), []
    return taken


class Source:
    def __init__(self, args):
        self.args, self.position, self.buffer = args, 0, []

    def get_samples(self, num_samples):
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples:
            self.position += 1
            n = self.args.n_samples_per_prompt
            groups.append([Sample(prompt=f"{self.position}+1=", label=str(self.position + 1)) for _ in range(n)])
        return groups

    def add_samples(self, samples):
        self.buffer += samples

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Forgetful(Source):
    def load_state_dict(self, state):
        pass


class Short(Source):
    def get_samples(self, num_samples):
        return super().get_samples(num_samples - 1)


class Same(Source):
    def get_samples(self, num_samples):
        return [[g[0]] * len(g) for g in super().get_samples(num_samples)]


class Awaited(Source):
    async def get_samples(self, num_samples):
        return super().get_samples(num_samples)


class Unjson(Source):
    def state_dict(self):
        return {"position": {1, 2}}


class Misnumbered(Source):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.group_index = 7
        return groups


# ---- conversion
def doubles(args, samples):
    raw = [s.reward for s in samples]
    return raw, [2 * r for r in raw]


def raw_only(args, samples):
    return [s.reward for s in samples]


def divides(args, samples):
    return [0.0] * len(samples), [float("nan")] * len(samples)


def columns(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "loss_masks": [[1] * s.response_length for s in samples],
        "rewards": [s.reward for s in samples],
    }


def without_mask(args, samples):
    return {"tokens": [s.tokens for s in samples], "rewards": [s.reward for s in samples]}


# ---- metrics
def counts(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics["mine/samples"] = len(samples)
    return True


def logs_text(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics["mine/name"] = "run"


def returns_metrics(rollout_id, args, data, extra_metrics):
    return {"mine": 1}


def reads_results(rollout_id, args, data, extra_metrics):
    extra_metrics["mine/best"] = max(data["heldout"]["rewards"])


# ---- generation
async def forgets_status(args, sample, sampling_params):
    sample.append_response([5], [-1.0], "x", "1")
    return sample


async def forgets_log_probs(args, sample, sampling_params):
    sample.tokens = [*sample.tokens, 5]
    sample.response, sample.response_length = "x", 1
    sample.status = Sample.Status.COMPLETED
    return sample


async def trains_on_nothing(args, sample, sampling_params):
    sample.append_response([5], [-1.0], "x", "1")
    sample.loss_mask = [0]
    sample.status = Sample.Status.TRUNCATED
    return sample
