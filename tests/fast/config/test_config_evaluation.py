"""Evaluation in the configuration: the file of `--eval-config`, what datasets need, and runs that only evaluate."""

import base64

import pytest

from miles.config.eval_settings import eval_settings
from miles.config.load import load, read
from miles.config.plan import describe_plan
from miles.config.resources import num_engines, num_train_ranks, saves
from tests.fast.config.test_config_checks import OK, only, problems

FILE = """\
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6, custom_rm_path: my.judge}
  datasets:
    - {name: gsm, path: gsm.jsonl, temperature: 0}
    - {name: aime, path: aime.jsonl, rm_type: math, top_k: null}
    - {name: free, path: free.jsonl, n_samples_per_eval_prompt: null}
"""
EVAL = ["--eval-interval", "5"]
ONLY = ["--num-rollout", "0", "--rm-type", "math", "--eval-label-key", "label", "--eval-prompt-data", "a", "a.jsonl"]


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "eval.yaml"
        path.write_text(text)
        return str(path)

    return write


def datasets(*argv: str):
    return {s.name: s for s in eval_settings(load([*OK, *EVAL, *argv]))}


def test_the_file_lists_datasets_over_defaults_over_flags_over_the_rollout(file):
    # Case H13.
    flags = ["--eval-temperature", "0.9", "--eval-top-k", "7", "--rollout-stop", "Q:", "--eval-max-prompt-len", "9"]
    found = datasets("--eval-config", file(FILE), *flags)
    assert [(s.temperature, s.n_samples_per_eval_prompt, s.top_k) for s in found.values()] == [
        (0.0, 4, 7),
        (0.6, 4, -1),
        (0.6, 1, 7),
    ]
    assert {(s.stop, s.max_prompt_len) for s in found.values()} == {(("Q:",), 9)}
    assert [(s.rm_type, s.custom_rm_path) for s in found.values()] == [
        ("math", "my.judge"),
        ("math", None),
        ("math", "my.judge"),
    ]


def test_the_file_may_be_given_as_base64(file):
    text = "base64:" + base64.b64encode(FILE.encode()).decode()
    assert datasets("--eval-config", text) == datasets("--eval-config", file(FILE))
    assert only(*OK, *EVAL, "--eval-config", "base64:%%").startswith("--eval-config: is not base64 of UTF-8 text")
    bad = "base64:" + base64.b64encode(b"eval: [").decode()
    assert "base64 text: is not valid YAML" in "".join(problems(*OK, "--eval-config", bad))


def test_pairs_come_beside_the_datasets_of_the_file(file):
    assert list(datasets("--eval-config", file(FILE), "--eval-prompt-data", "x", "x.jsonl")) == [
        "gsm",
        "aime",
        "free",
        "x",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "eval: {defaults: {temprature: 1}, datasets: [{name: a, path: a}]}",
            "eval.defaults.temprature: no such setting -> did you mean temperature?",
        ),
        ("eval: {defaults: {name: b}, datasets: [{name: a, path: a}]}", "eval.defaults.name: no such setting"),
        ("eval: {dataset: [{name: a, path: a}]}", "eval.dataset: no such setting -> did you mean datasets?"),
        ("evals: {datasets: [{name: a, path: a}]}", "evals: no such setting -> did you mean eval?"),
        ("eval: {datasets: []}", "eval.datasets: is an empty list"),
        ("eval: {datasets: {name: a}}", "eval.datasets: is a mapping, not a list"),
        ("eval: 3", "eval: is a number, not a mapping"),
        ("eval: {defaults: 3, datasets: [{name: a, path: a}]}", "eval.defaults: is a number, not a mapping"),
    ],
)
def test_a_file_of_another_form_says_what_is_wrong_with_it(file, text, problem):
    path = file(text)
    assert any(found.startswith(f"{path}: {problem}") for found in problems(*OK, *EVAL, "--eval-config", path))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            "{name: a, path: a, tempratur: 1}",
            "eval.datasets.0.tempratur: no such setting in {file} -> did you mean temperature?",
        ),
        ("{name: a}", "eval.datasets.0.path: is missing in {file}"),
        ("{name: a, path: a, top_p: 2}", "eval.datasets.0.top_p: got 2 in {file}"),
        ("{name: a/b, path: a}", "eval.datasets.0.name: got 'a/b' in {file}"),
        ("{name: .., path: a}", "eval.datasets.0.name: got '..' in {file}"),
    ],
)
def test_settings_of_a_dataset_are_checked_like_any_other(file, entry, problem):
    path = file(f"eval: {{datasets: [{entry}]}}")
    assert only(*OK, *EVAL, "--eval-config", path).startswith(problem.format(file=path))


def test_a_missing_file_and_two_files_are_refused(file):
    assert any("nowhere.yaml: no such file" in p for p in problems(*OK, *EVAL, "--eval-config", "nowhere.yaml"))
    path = file(FILE)
    assert only(*OK, *EVAL, "--eval-config", path, path).startswith("--eval-config: takes one file, got 2")
    assert only(*OK, "--eval-confg", path).endswith("did you mean --eval-config?")


def test_every_setting_of_the_resolved_run_holds_the_datasets_of_the_file(file):
    from miles.config.dump import dump, undump

    config = load([*OK, *EVAL, "--eval-config", file(FILE)])
    assert eval_settings(undump(dump(config))) == eval_settings(config)


def dataset_issue(entry: str, *argv: str) -> str:
    return only(*argv, *EVAL, "--eval.datasets", f"{{name: a, path: a.jsonl, {entry}}}")


def test_a_dataset_that_nothing_would_judge_is_refused():
    assert dataset_issue("rm_type: null", *OK) == (
        "eval.datasets.0: dataset a unsets both rm_type and custom_rm_path, so nothing would judge it -> give it one of "
        "the two, or leave both out"
    )
    assert dataset_issue("rm_type: maths", *OK).startswith(
        "eval.datasets.0: dataset a: there is no built-in reward 'maths'"
    )
    assert dataset_issue("rm_type: remote_rm", *OK).startswith("eval.datasets.0: dataset a: remote_rm asks a server")
    sft = ["--num-rollout", "3", "--loss-type", "sft_loss", "--rollout-function-path", "my.fn"]
    sft += ["--eval-function-path", "miles.rollout.inference_rollout.InferenceRolloutFn", "--label-key", "b"]
    own = ["--eval.datasets", "{name: a, path: a, rm_type: math}", *EVAL]
    assert problems(*sft, *own) == []


def test_a_dataset_whose_reward_needs_a_label_names_its_key():
    assert dataset_issue("label_key: null", *OK) == (
        "eval.datasets.0: dataset a: math compares with a label, but none is loaded -> --eval-label-key KEY, or "
        "label_key in the dataset"
    )


def test_lengths_of_a_dataset_must_be_possible():
    assert dataset_issue("min_new_tokens: 9, max_response_len: 8", *OK) == (
        "eval.datasets.0: dataset a: responses of 9 tokens or more cannot end within 8 -> --eval-min-new-tokens 8 or less"
    )
    assert (
        dataset_issue("top_k: 0", *OK)
        == "eval.datasets.0.top_k: 0 leaves no token to sample -> top_k: -1 keeps all tokens"
    )


def test_a_name_becomes_a_folder_and_must_be_able_to():
    assert only(*OK, *EVAL, "--eval-prompt-data", "../a", "a.jsonl") == (
        "eval.prompt_data: '../a' is no name: it becomes a metric and a folder -> use letters, digits, _, -, + and ."
    )


def test_a_run_of_no_steps_evaluates_and_needs_neither_trainer_nor_prompts():
    config = read([*ONLY, "--save-interval", "1"])
    assert config.issues == ()
    assert (num_train_ranks(config.config), num_engines(config.config), saves(config.config)) == (0, 1, False)
    plan = "\n".join(describe_plan(config.config))
    assert "one evaluation of 1 dataset, no training" in plan
    assert "a from a.jsonl" in plan
    assert "each step" not in plan


def test_a_run_of_no_steps_needs_room_for_its_own_responses_only():
    context = ["--rollout-max-context-len", "64"]
    assert problems(*ONLY, *context, "--eval-max-response-len", "8") == []
    found = only(*ONLY, *context, "--eval-max-response-len", "64")
    assert "dataset a: responses of 64 tokens leave no room for a prompt in a context of 64" in found


def test_a_run_of_no_steps_must_have_something_to_evaluate():
    assert only("--num-rollout", "0", "--rm-type", "math", "--label-key", "a") == (
        "eval.prompt_data: --num-rollout 0 is given, which only evaluates, but nothing to evaluate on -> "
        "--eval-prompt-data NAME FILE.jsonl, or --num-rollout STEPS to train"
    )


def test_a_run_of_no_steps_evaluates_the_model_folder():
    assert only(*ONLY, "--load", "ckpt") == (
        "checkpoint.load: --num-rollout 0 starts no trainer, so the engines would not hold the weights of --load -> "
        "--hf-checkpoint CHECKPOINT/hf, and leave out --load"
    )
    assert only(*ONLY, "--skip-eval-before-train") == (
        "eval.before_train: --skip-eval-before-train and --num-rollout 0 leave nothing to do -> leave out "
        "--skip-eval-before-train"
    )
    assert only(*ONLY, "--debug-train-only", "--rollout-function-path", "my.fn") == (
        "eval.interval: --num-rollout 0 is given, which only evaluates, but a run that only trains has no engines to "
        "evaluate -> --num-rollout STEPS"
    )


def test_one_filter_or_several():
    one, two = "a.keep", "b.keep"
    assert load([*OK, "--dynamic-sampling-filter-path", one, two]).rollout.dynamic_sampling_filter_path == [one, two]
    assert load([*OK, "--dynamic-sampling-filter-path", one]).rollout.dynamic_sampling_filter_path == [one]
    assert load(OK).rollout.dynamic_sampling_filter_path == []


def test_a_recipe_may_name_one_filter_as_text_or_none_as_null(file):
    path = file("rollout: {dynamic_sampling_filter_path: a.keep}\n")
    assert load([path, *OK]).rollout.dynamic_sampling_filter_path == ["a.keep"]
    path = file("rollout: {dynamic_sampling_filter_path: null}\n")
    assert load([path, *OK]).rollout.dynamic_sampling_filter_path == []


def test_hooks_of_datasets_are_checked_at_start(monkeypatch):
    from miles.core.plugins import load_hooks
    from miles.errors import ConfigError

    entry = "{name: a, path: a.jsonl, custom_rm_path: os.path.nothing, custom_generate_function_path: os.path.join}"
    with pytest.raises(ConfigError) as caught:
        load_hooks(load([*OK, *EVAL, "--eval.datasets", entry, "--rollout-function-path", "os.path.x"]))
    paths = [issue.path for issue in caught.value.issues]
    assert any(p.startswith("eval.datasets.0.custom_rm_path os.path.nothing") for p in paths)
    assert any(p.startswith("eval.datasets.0.custom_generate_function_path os.path.join") for p in paths)


def test_a_dataset_name_that_is_no_folder_name_is_told_what_is_wanted():
    (found,) = problems(*OK, "--eval-interval", "1", "--eval.datasets", "{name: a/b, path: a.jsonl}")
    assert "got 'a/b'" in found
    assert "give text, as in ^[A-Za-z0-9_]" in found
