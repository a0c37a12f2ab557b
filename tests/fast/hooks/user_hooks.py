"""Five hooks as people wrote them for the documented signatures, with the imports that they used."""

import random

from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.sglang_rollout import GenerateState
from miles.utils.http_utils import post
from miles.utils.types import Sample


async def length_reward(args, sample: Sample, **kwargs) -> float:
    if sample.label is not None and sample.response.strip() == sample.label:
        return 1.0
    return 0.5 if sample.response_length < args.rollout_max_response_len else 0


async def best_of_group(args, samples: list[Sample], **kwargs) -> list[float]:
    longest = max(sample.response_length for sample in samples)
    return [float(sample.response_length == longest) for sample in samples]


async def two_turns(args, sample: Sample, sampling_params) -> Sample:
    """Asks the model, puts a calculator's answer after it, and asks again."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_ids, loss_mask, log_probs, response = [], [], [], ""
    for turn in range(2):
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        entries = output["meta_info"]["output_token_logprobs"]
        response_ids += [item[1] for item in entries]
        log_probs += [item[0] for item in entries]
        loss_mask += [1] * len(entries)
        response += output["text"]
        if output["meta_info"]["finish_reason"]["type"] == "length" or turn == 1:
            break
        observation = state.tokenizer("=?", add_special_tokens=False)["input_ids"]
        response_ids += observation
        log_probs += [0.0] * len(observation)
        loss_mask += [0] * len(observation)
        response += "=?"
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


def keep_mixed(args, samples: list[Sample], **kwargs) -> DynamicFilterOutput:
    rewards = {sample.get_reward_value(args.reward_key) for sample in samples}
    return DynamicFilterOutput(keep=len(rewards) > 1, reason=None if len(rewards) > 1 else "all_the_same")


class SumSource:
    """Makes sums as it goes, without a file."""

    def __init__(self, args):
        self.args = args
        self.random = random.Random(args.rollout_seed)
        self.buffer = []
        self.issued = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = self.buffer[:num_samples]
        self.buffer = self.buffer[num_samples:]
        while len(groups) < num_samples:
            a, b = self.random.randint(0, 9), self.random.randint(0, 9)
            groups.append(
                [Sample(prompt=f"{a}+{b}=", label=str(a + b)) for _ in range(self.args.n_samples_per_prompt)]
            )
            self.issued += 1
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.buffer += samples

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass
