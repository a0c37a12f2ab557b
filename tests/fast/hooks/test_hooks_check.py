import io
import json
import subprocess
import sys

import pytest

from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.hook_contracts import GROUP_REWARD, HOOKS
from miles.core.run_facts import RunFacts
from miles.hooks import main as verb
from miles.hooks import trial
from miles.hooks.child import run_tests
from miles.hooks.findings import Report
from miles.hooks.options import read_check
from miles.hooks.samples import groups, made_up_prompts
from miles.hooks.trials import TRIALS
from miles.rollout.saved_samples import save_groups
from tests.fast.rollout.support import make_args, make_model_folder

HERE = "tests.fast.hooks.tried_hooks"
USERS = "tests.fast.hooks.user_hooks"
REWARD = "--custom-rm-path"


def tried(name, flag, timeout_s=20.0, samples=None, **sections):
    """Test and verdict, with what was found, of every test of a function."""
    config = RunConfig.model_validate(sections)
    file = io.StringIO()
    path = name if "." in name else f"{HERE}.{name}"
    task = {"path": path, "flag": flag, "samples": samples, "timeout_s": timeout_s}
    run_tests(task, config, Report(file))
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert rows[-1] == {"end": True}
    return [row["finding"] for row in rows if "finding" in row]


def to_mend(*args, **kwargs):
    return [f for f in tried(*args, **kwargs) if f["verdict"] == "FAILS"]


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("right", REWARD),
        ("plain", REWARD),
        ("judge", REWARD),
        ("refuses_without_label", REWARD),
        (f"{USERS}.length_reward", REWARD),
        ("ranks", GROUP_REWARD),
        (f"{USERS}.best_of_group", GROUP_REWARD),
        ("trims", "--rollout-sample-hook-path"),
        ("keeps_mixed", "--dynamic-sampling-filter-path"),
        (f"{USERS}.keep_mixed", "--dynamic-sampling-filter-path"),
        ("removes_wrong", "--rollout-sample-filter-path"),
        ("looks", "--rollout-all-samples-process-path"),
        ("oldest", "--buffer-filter-path"),
        ("Source", "--data-source-path"),
        (f"{USERS}.SumSource", "--data-source-path"),
        ("doubles", "--custom-reward-post-process-path"),
        ("columns", "--custom-convert-samples-to-train-data-path"),
        ("counts", "--custom-rollout-log-function-path"),
        ("reads_results", "--custom-eval-rollout-log-function-path"),
    ],
)
def test_a_right_hook_has_nothing_to_mend(name, flag):
    found = tried(name, flag)
    assert [f for f in found if f["verdict"] in ("FAILS", "not run") and "save() and load()" not in f["found"]] == []
    assert len(found) > 3
    assert not any(f["mend"] for f in found)


@pytest.mark.parametrize(
    ("name", "flag", "test", "problem", "mend"),
    [
        ("gives_none", REWARD, "a right answer", "the reward is None", "a finite number"),
        ("gives_text", REWARD, "a right answer", "the text '1.0'", "a finite number"),
        ("gives_nan", REWARD, "a right answer", "the reward is nan", "a finite number"),
        ("gives_object", REWARD, "a right answer", "name one with --reward-key", "a finite number"),
        (
            "fails_on_empty",
            REWARD,
            "an empty response",
            "IndexError: string index out of range",
            "0 for one that is wrong",
        ),
        ("fails_without_label", REWARD, "no label and no metadata", "'NoneType'", "or raise ValueError with what the"),
        ("sets_args", REWARD, "a right answer", "args is read-only", "a finite number"),
        ("strips_response", REWARD, "changes nothing that it must not", "response of sample 4 was", "sample.metadata"),
        ("masks", REWARD, "changes nothing that it must not", "loss_mask of sample 0 was None", "sample.metadata"),
        ("keeps_a_lambda", REWARD, "can be sent to another process", "pickle", "only numbers, texts"),
        (
            "one_too_few",
            GROUP_REWARD,
            "group 0 of 4",
            "returned 3 rewards for 4 samples",
            "one finite number per sample",
        ),
        (
            "one_for_all",
            GROUP_REWARD,
            "group 0 of 4",
            "returned float 1.0 for 4 samples",
            "one finite number per sample",
        ),
        ("sorts", GROUP_REWARD, "group 0 of 4", "changed the list of samples", "sort a copy"),
        ("fails_for_one", GROUP_REWARD, "a group of one", "ZeroDivisionError", "one finite number per sample"),
        (
            "cuts_tokens",
            "--rollout-sample-hook-path",
            "a right answer",
            "1 entries of rollout_log_probs but 2",
            "every",
        ),
        (
            "renames",
            "--rollout-sample-hook-path",
            "changes nothing that it must not",
            "index of sample 1 was 1",
            "names",
        ),
        ("says_nothing", "--dynamic-sampling-filter-path", "group 0 of 4", "returned NoneType", "DynamicFilterOutput"),
        (
            "clears_rewards",
            "--dynamic-sampling-filter-path",
            "changes nothing that it must not",
            "reward of sample 0",
            "only",
        ),
        ("returns_groups", "--rollout-sample-filter-path", "a batch of 3 groups", "returned list", "return nothing"),
        (
            "drops_a_group",
            "--rollout-sample-filter-path",
            "a batch of 3 groups",
            "groups had [4, 4, 4]",
            "remove_sample",
        ),
        (
            "changes_finished",
            "--rollout-all-samples-process-path",
            "changes nothing that it must not",
            "tokens of",
            "leave",
        ),
        ("leaves_them", "--buffer-filter-path", "asked for 2 of 3 groups", "still in the buffer", "remove them"),
        ("too_many", "--buffer-filter-path", "asked for 2 of 3 groups", "returned 3 groups", "at most num_samples"),
        ("Short", "--data-source-path", "get_samples(3) gives as many groups of 8", "returned 2 groups", "exactly"),
        (
            "Same",
            "--data-source-path",
            "get_samples(3) gives as many groups of 8",
            "the same Sample object",
            "new Samples",
        ),
        ("Awaited", "--data-source-path", "is made as cls(args)", "get_samples is async", "a plain method"),
        (
            "Misnumbered",
            "--data-source-path",
            "numbers groups and samples, or leaves",
            "[7, 7, 7, 7]",
            "leave both None",
        ),
        (
            "Forgetful",
            "--data-source-path",
            "goes on where a checkpoint was made",
            "the resumed source gave '1+1='",
            "let",
        ),
        (
            "Unjson",
            "--data-source-path",
            "goes on where a checkpoint was made",
            "its state is not JSON",
            "as JSON has it",
        ),
        (
            "raw_only",
            "--custom-reward-post-process-path",
            "12 samples in 3 groups",
            "not iterable",
            "(raw, normalised)",
        ),
        ("divides", "--custom-reward-post-process-path", "12 samples in 3 groups", "not finite", "(raw, normalised)"),
        (
            "without_mask",
            "--custom-convert-samples-to-train-data-path",
            "12 samples in 3 groups",
            "'loss_mask'",
            "a dict",
        ),
        ("logs_text", "--custom-rollout-log-function-path", "12 samples", "left str 'run'", "add numbers"),
        ("returns_metrics", "--custom-eval-rollout-log-function-path", "12 samples", "returned dict", "return True"),
    ],
)
def test_each_fault_is_found_named_and_has_a_way_out(name, flag, test, problem, mend):
    failing = to_mend(name, flag)
    assert failing, "nothing was found"
    first = failing[0]
    assert first["test"].startswith(test)
    assert problem in first["found"]
    assert mend in first["mend"]


def test_a_function_that_does_not_load_or_fit_is_told_and_not_called():
    (missing,) = to_mend("no_such_function", REWARD)
    assert (missing["test"], "has no attribute" in missing["found"]) == ("loads", True)
    (wrong,) = to_mend("oldest", REWARD)
    assert wrong["test"] == "has the signature"
    assert wrong["mend"] == HOOKS[REWARD].example


def test_an_error_shows_the_line_that_raised_it():
    (finding,) = to_mend("fails_on_empty", REWARD)
    assert 'return float(sample.response[0] == "4")' in finding["found"]
    assert "tried_hooks.py" in finding["found"]


def test_an_async_function_that_does_not_await_is_found(monkeypatch):
    monkeypatch.setattr(trial, "HELD_LOOP_S", 0.1)
    (finding,) = to_mend("blocks", REWARD)
    assert finding["test"] == "lets other requests run"
    assert "the event loop stood still for 0." in finding["found"]


def test_a_function_that_takes_too_long_is_found():
    findings = to_mend("sleeps", REWARD, timeout_s=0.1)
    assert "took longer than 0.1 s" in findings[0]["found"]


def test_a_reward_that_is_not_the_same_twice_is_noted_only():
    found = tried("moody", REWARD)
    assert [f["test"] for f in found if f["verdict"] == "note"] == ["gives the same again, many at the same time"]
    assert to_mend("moody", REWARD) == []


def test_settings_of_the_run_reach_the_function():
    (finding, *_) = to_mend("with_own_setting", REWARD)
    assert "args has no 'length_penalty'" in finding["found"]
    assert to_mend("with_own_setting", REWARD, custom={"length_penalty": 0.1}) == []
    assert to_mend("gives_object", REWARD, reward={"reward_key": "score"}) == []
    assert "has no 'other'" in to_mend("gives_object", REWARD, reward={"reward_key": "other"})[0]["found"]
    assert to_mend("keeps_mixed", "--dynamic-sampling-filter-path", reward={"reward_key": "score"}) != []


def test_prompts_of_the_run_are_tried(tmp_path):
    args = make_args(tmp_path)
    found = tried("right", REWARD, model=dict(args.config.model), data=dict(args.config.data))
    assert "prompts like '0+1='" in found[2]["found"]
    assert "with the label '1'" in found[2]["found"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    data = {**dict(args.config.data), "prompt_data": str(broken)}
    (finding,) = to_mend("right", REWARD, model=dict(args.config.model), data=data)
    assert f"{broken}:1" in finding["found"]


def test_saved_samples_are_tried(tmp_path):
    path = str(tmp_path / "7.jsonl")
    save_groups(path, 7, groups(made_up_prompts(2)))
    found = tried("right", REWARD, samples=path)
    assert [f["test"] for f in found if f["test"].endswith("of the file")] == [
        f"sample {i} of the file" for i in range(8)
    ]
    assert to_mend("keeps_mixed", "--dynamic-sampling-filter-path", samples=path) == []
    (finding,) = to_mend("right", REWARD, samples=str(tmp_path / "none.jsonl"))
    assert "is no file of saved samples" in finding["found"]


def test_a_generate_function_is_tried_against_an_engine(tmp_path):
    model = {"hf_checkpoint": str(make_model_folder(tmp_path / "model"))}
    flag = "--custom-generate-function-path"
    found = tried(f"{USERS}.two_turns", flag, model=model)
    assert [f["verdict"] for f in found if f["test"].startswith("generates")] == ["ok", "ok"]
    assert to_mend("miles.rollout.generate_hub.single_turn.generate", flag, model=model) == []
    for name, problem in [
        ("forgets_status", "with the status pending"),
        ("forgets_log_probs", "no rollout_log_probs"),
        ("trains_on_nothing", "no token can be trained on"),
    ]:
        assert problem in to_mend(name, flag, model=model)[0]["found"], name
    assert "--hf-checkpoint" in next(f["found"] for f in tried("forgets_status", flag) if f["verdict"] == "not run")


def test_a_rollout_function_is_tried_with_the_runs_data(tmp_path):
    config = make_args(tmp_path).config
    sections = {name: dict(getattr(config, name)) for name in ("model", "data", "rollout", "reward")}
    path = "miles.rollout.inference_rollout.InferenceRolloutFn"
    found = tried(path, "--rollout-function-path", **sections)
    assert [f["found"] for f in found if f["test"] == "collects a batch"] == ["2 groups, 4 samples"]
    rollout = "tests.fast.hooks.test_hooks_check.half_a_batch"
    assert "returned 1 groups of 2" in to_mend(rollout, "--rollout-function-path", **sections)[0]["found"]
    evaluation = "tests.fast.hooks.test_hooks_check.no_rewards"
    assert "has no rewards" in to_mend(evaluation, "--eval-function-path", **sections)[0]["found"]


def half_a_batch(args, rollout_id, data_source, evaluation=False):
    return groups(made_up_prompts(1))


def no_rewards(args, rollout_id, data_source, evaluation=False):
    return {"heldout": {"truncated": []}}


def test_every_hook_of_these_rooms_has_tests_and_losses_are_sent_to_the_doctor():
    assert set(HOOKS) - set(TRIALS) == {flag for flag, contract in HOOKS.items() if contract.kind == "loss"}
    found = tried(f"{HERE}.right_loss", "--custom-loss-function-path")
    assert [f["verdict"] for f in found][:1] == ["FAILS"]
    found = tried("tests.fast.hooks.test_hooks_check.loss", "--custom-loss-function-path")
    assert (found[-1]["verdict"], "miles doctor loss" in found[-1]["found"]) == ("not run", True)


def loss(args, batch, logits, reducer):
    return logits.sum(), {}


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("right", REWARD),
        ("judge", REWARD),
        ("trims", "--rollout-sample-hook-path"),
        ("keeps_mixed", "--dynamic-sampling-filter-path"),
        ("removes_wrong", "--rollout-sample-filter-path"),
        ("looks", "--rollout-all-samples-process-path"),
        ("oldest", "--buffer-filter-path"),
        ("Source", "--data-source-path"),
        ("counts", "--custom-rollout-log-function-path"),
        ("reads_results", "--custom-eval-rollout-log-function-path"),
        ("forgets_status", "--custom-generate-function-path"),
    ],
)
def test_the_signature_tells_which_hook_it_is(name, flag):
    found = read_check([f"{HERE}.{name}"])
    assert (found.flag, found.told_by) == (flag, "by its signature")


def test_the_command_line_tells_which_hook_it_is(tmp_path):
    with pytest.raises(
        Exception, match=r"could be .*--custom-rm-path with --group-rm.*, --custom-reward-post-process"
    ):
        read_check([f"{HERE}.ranks"])
    assert read_check([f"{HERE}.ranks", "--as", "custom-rm-path", "--group-rm"]).flag == GROUP_REWARD
    assert read_check([f"{HERE}.ranks", "--as", "--custom-reward-post-process-path"]).timeout_s == 30
    named = read_check([f"{HERE}.right", "--custom-rm-path", f"{HERE}.right", "--reward.timeout-s", "7"])
    assert (named.flag, named.told_by, named.timeout_s) == (REWARD, "by the recipe", 7)
    for words, message in [
        ([], "names no function"),
        ([f"{HERE}.right", "--as", "no-such-hook"], "is no hook"),
        ([f"{HERE}.right", "--timeout", "0"], "leave no time"),
        ([f"{HERE}.right", "--custom-rm-pth", "x"], "did you mean --custom-rm-path"),
        ([f"{HERE}.wrong"], "has no attribute 'wrong'"),
        ([f"{HERE}.Judge"], "has the signature of no hook"),
    ]:
        with pytest.raises(Exception, match=message):
            read_check(words)


def miles_hooks(*words, timeout=60):
    command = [sys.executable, "-m", "miles.cli", "hooks", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_the_verb_exits_with_what_was_found():
    done = miles_hooks("check", f"{HERE}.right")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{HERE}.right as --custom-rm-path (by its signature)\n")
    assert done.stdout.endswith("nothing to mend\n")
    assert verb.main(["check", f"{HERE}.no_such"]) == 2


def test_a_function_that_ends_its_process_is_told_with_what_it_printed(capsys):
    assert verb.main(["check", f"{HERE}.ends_the_process"]) == 1
    shown = capsys.readouterr().out
    assert "a right answer FAILS ended its process with status 3" in " ".join(shown.split())
    assert "it printed:\ngoodbye\n1 to mend" in shown


def test_a_function_that_never_comes_back_is_ended(capsys, monkeypatch):
    monkeypatch.setattr(verb, "GRACE_S", 0.2)
    assert verb.main(["check", f"{HERE}.never_comes_back", "--timeout", "0.3"]) == 1
    shown = capsys.readouterr().out
    assert "did not come back" in shown
    assert "give every wait a limit" in shown


def test_the_list_has_every_hook_and_what_a_recipe_loads(tmp_path, capsys):
    assert verb.main([]) == 0
    shown = capsys.readouterr().out
    for flag, contract in HOOKS.items():
        assert f"  {flag}\n" in shown
        assert contract.called in shown
        assert all(form.strip() in shown for form in contract.example.split("  or  "))
    assert "loads miles.rollout.data_source.RolloutDataSourceWithBuffer: class, " in shown
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"reward:\n  custom_rm_path: {HERE}.right\n")
    assert verb.main([str(recipe), "--buffer-filter-path", f"{HERE}.oldest"]) == 0
    shown = capsys.readouterr().out
    assert f"loads {HERE}.right: async function, " in shown
    assert f"loads {HERE}.oldest: function, " in shown
    assert verb.main([str(recipe), "--buffer-filter-path", f"{HERE}.right"]) == 1
    shown = capsys.readouterr().out
    assert (
        f"{HERE}.right: is called as fn(args, rollout_id, buffer, num_samples)\n          mend: def fn(args" in shown
    )
    assert "1 of them cannot be used" in shown
    assert verb.main(["--help"]) == 0
    assert "Exit status" in capsys.readouterr().out
    assert verb.main(["--no-such-flag", "1"]) == 2
    assert "no such flag" in capsys.readouterr().err


def test_hook_args_are_those_of_a_run():
    assert HookArgs(RunConfig(), RunFacts()).custom_rollout_log_function_path is None
    assert HookArgs(RunConfig(), RunFacts()).rollout_sample_hook_path == []
