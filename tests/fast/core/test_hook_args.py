import copy
import json
import pickle

import pytest

from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.errors import ConfigError


def make(**sections):
    facts = RunFacts(run_dir="runs/a", start_rollout_id=3, router_url="http://127.0.0.1:1", sglang_router_port=1)
    return HookArgs(RunConfig.model_validate(sections), facts)


def test_every_setting_has_its_flags_name():
    args = make(rollout={"batch_size": 4, "temperature": 0.7}, reward={"reward_key": "score"})
    assert args.rollout_batch_size == 4
    assert args.rollout_temperature == 0.7
    assert args.reward_key == "score"
    assert args.hf_checkpoint == ""
    for leaf in leaves(RunConfig):
        assert hasattr(args, leaf.attribute), leaf.path


def test_facts_and_custom_keys_stand_beside_the_settings():
    args = make(custom={"tool_url": "http://127.0.0.1:7", "limits": {"turns": 3}})
    assert (args.run_dir, args.start_rollout_id, args.router_url) == ("runs/a", 3, "http://127.0.0.1:1")
    assert (args.tool_url, args.limits) == ("http://127.0.0.1:7", {"turns": 3})
    assert args.config.custom["tool_url"] == args.tool_url
    assert args.facts.run_dir == "runs/a"


def test_switches_that_turn_something_off_have_both_names():
    args = make(algorithm={"grpo_std_normalization": False})
    assert args.disable_grpo_std_normalization is True
    assert args.grpo_std_normalization is False
    assert args.disable_rewards_normalization is False
    assert args.rewards_normalization is True


def test_settings_that_follow_from_others_have_their_value():
    args = make(
        rollout={"batch_size": 4, "n_samples_per_prompt": 6},
        algorithm={"eps_clip": 0.1},
        reward={"reward_key": "score"},
        train={"num_steps_per_rollout": 3},
    )
    assert args.eps_clip_high == 0.1
    assert args.eval_reward_key == "score"
    assert args.over_sampling_batch_size == 4
    assert (args.global_batch_size, args.num_steps_per_rollout) == (8, 3)


def test_settings_that_were_given_are_kept():
    args = make(
        rollout={"batch_size": 4, "n_samples_per_prompt": 6, "over_sampling_batch_size": 9},
        algorithm={"eps_clip_high": 0.28},
        reward={"reward_key": "score", "eval_reward_key": "acc"},
        train={"global_batch_size": 12},
    )
    assert args.eps_clip_high == 0.28
    assert args.eval_reward_key == "acc"
    assert args.over_sampling_batch_size == 9
    assert (args.global_batch_size, args.num_steps_per_rollout) == (12, 2)


def test_an_unknown_name_says_which_is_near():
    args = make()
    with pytest.raises(AttributeError, match=r"args has no 'rollout_batchsize' \(did you mean rollout_batch_size\?\)"):
        _ = args.rollout_batchsize
    with pytest.raises(AttributeError, match=r"args has no 'zzqqxx'; .* --custom-config-path FILE.yaml"):
        _ = args.zzqqxx
    assert getattr(args, "zzqqxx", 7) == 7
    assert "rollout_batch_size" in args
    assert "zzqqxx" not in args


def test_nothing_can_be_changed():
    args = make(custom={"limits": {"turns": 3}}, rollout={"stop": ["END"]})
    with pytest.raises(AttributeError, match=r"args\.lr cannot be set; .*--custom-config-path.*sample\.metadata"):
        args.lr = 1.0
    with pytest.raises(AttributeError, match="read-only"):
        args.mine = 1
    with pytest.raises(AttributeError, match="read-only"):
        del args.lr
    args.limits["turns"] = 99
    args.rollout_stop.append("STOP")
    vars(args)["lr"] = 5
    assert (args.limits, args.rollout_stop, args.lr) == ({"turns": 3}, ["END"], 1e-6)


def test_it_travels_between_processes():
    args = make(custom={"limits": {"turns": 3}})
    for twin in (pickle.loads(pickle.dumps(args)), copy.copy(args), copy.deepcopy(args)):
        assert twin.to_dict() == args.to_dict()
        assert twin.facts == args.facts
        assert twin.config == args.config


def test_it_shows_all_its_values():
    args = make(custom={"depth": 2})
    assert vars(args) == args.to_dict()
    assert json.loads(json.dumps(vars(args)))["depth"] == 2
    assert "depth=2" in repr(args)
    assert {"depth", "rollout_batch_size", "to_dict"} <= set(dir(args))


@pytest.mark.parametrize("name", ["rollout_batch_size", "run_dir", "to_dict"])
def test_a_custom_key_may_not_hide_a_name(name):
    with pytest.raises(ConfigError, match=f"custom.{name}: is a name that args has already\n    fix: rename the key"):
        make(custom={name: 1})
