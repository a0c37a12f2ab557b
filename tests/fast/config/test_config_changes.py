from miles.config.changes import changed_settings
from miles.config.schema import RunConfig

START = {
    "optimizer": {"lr": 1e-3, "lr_decay_style": "linear"},
    "rollout": {"num_rollout": 100, "temperature": 1.0},
    "data": {"prompt_data": "a.jsonl"},
    "custom": {"alpha": 1, "same": [1, 2]},
}


def changes(*, start=START, **sections):
    """What is told when a run that was started with `start` is resumed with some sections changed."""
    saved = RunConfig.model_validate(start).model_dump(mode="json")
    merged = {key: {**start.get(key, {}), **sections.get(key, {})} for key in {*start, *sections}}
    found = changed_settings(saved, RunConfig.model_validate(merged))
    assert all(line.startswith("changed since the checkpoint: ") for line in found)
    return [line.removeprefix("changed since the checkpoint: ") for line in found]


def test_the_same_settings_are_not_told():
    assert changes() == []


def test_settings_that_shape_training_are_told_one_a_line_with_both_values():
    found = changes(
        optimizer={"lr": 2e-3},
        rollout={"temperature": 0.7, "n_samples_per_prompt": 4},
        data={"prompt_data": "b.jsonl"},
        algorithm={"rewards_normalization": False, "eps_clip_high": 0.3},
        train={"global_batch_size": 64},
        model={"hf_checkpoint": "models/other"},
        engine={"dtype": "bfloat16"},
        run={"deterministic": True},
    )
    assert found == [
        "--deterministic-mode is true, was false",
        '--hf-checkpoint is "models/other", was ""',
        '--prompt-data is ["b.jsonl"], was ["a.jsonl"]',
        "--n-samples-per-prompt is 4, was 8",
        "--rollout-temperature is 0.7, was 1.0",
        '--sglang-dtype is "bfloat16", was "auto"',
        "--algorithm.rewards-normalization is false, was true",
        "--eps-clip-high is 0.3, was unset",
        "--global-batch-size is 64, was unset",
        "--lr is 0.002, was 0.001",
    ]


def test_settings_that_change_time_or_place_alone_are_not_told():
    assert not changes(
        run={"dir": "elsewhere", "name": "b"},
        cluster={"num_cpus": 2, "threads": 1},
        train={"max_tokens_per_gpu": 64},
        reward={"num_workers": 3},
        eval={"interval": 3},
        checkpoint={"save_interval": 3},
    )


def test_a_longer_run_is_told_only_when_the_learning_rate_decays_to_its_end():
    told = "--num-rollout is 200, was 100; the learning rate now decays to the new end"
    assert changes(rollout={"num_rollout": 200}) == [told]
    constant = {**START, "optimizer": {"lr": 1e-3}}
    assert changes(start=constant, rollout={"num_rollout": 200}) == []
    fixed = {**START, "optimizer": {"lr_decay_style": "linear", "lr_decay_iters": 50}}
    assert changes(start=fixed, rollout={"num_rollout": 200}) == []


def test_values_of_the_users_own_section_are_told_by_name():
    found = changes(custom={"alpha": 2, "beta": {"x": "y" * 200}})
    assert found[0] == "custom.alpha is 2, was 1"
    assert found[1].startswith('custom.beta is {"x": "yyy')
    assert found[1].endswith("..., was unset")
    assert len(found) == 2


def test_a_setting_that_the_checkpoint_does_not_know_had_its_default():
    saved = RunConfig().model_dump(mode="json")
    del saved["optimizer"]["clip_grad"], saved["reward"]
    assert changed_settings(saved, RunConfig()) == []
    clipped = RunConfig.model_validate({"optimizer": {"clip_grad": 0.5}})
    assert changed_settings(saved, clipped) == ["changed since the checkpoint: --clip-grad is 0.5, was 1.0"]
