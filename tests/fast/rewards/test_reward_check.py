import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles.core.samples import Sample
from miles.reward_check.main import main
from miles.rollout.metrics import dump_rows
from miles.rollout.saved_samples import save_groups

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS = """
def score(args, sample):
    return {"score": 1.0, "length": len(sample.response)}

def rank(args, samples):
    return [float(i) for i, _ in enumerate(samples)]

def breaks(args, sample):
    raise ZeroDivisionError("no way")

def wrong_signature(sample):
    return 1.0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_check.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def write(*rows, name="rows.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def row(response, label, reward, **fields):
    return {"response": response, "label": label, "reward": reward, **fields}


def sample(index, group, response, reward, **fields):
    status = Sample.Status.COMPLETED
    return Sample(index=index, group_index=group, response=response, reward=reward, status=status, **fields)


def saved(*rewards, step=3):
    """Two groups of two samples; `rewards` are the stored ones."""
    samples = [sample(i, i // 2, "yes" if i % 2 else "no", r, label="yes") for i, r in enumerate(rewards)]
    save_groups("saved.jsonl", step, [samples[:2], samples[2:]])
    return "saved.jsonl"


def check(*argv, status=0, capsys=None):
    assert main(["check", *argv]) == status
    return capsys.readouterr() if capsys else None


def test_saved_samples_with_the_same_rewards_pass(capsys):
    out = check(saved(0.0, 1.0, 0, 1), "--rm-type", "exact", capsys=capsys).out
    assert "saved.jsonl: 4 samples, graded by --rm-type exact" in out
    assert "mean      stored 0.5, now 0.5, of the 4 that have both" in out
    assert "errors    0" in out
    assert "differ    0 of 4" in out
    assert "samples/s" in out


def test_a_difference_is_shown_and_fails_unless_allowed(capsys):
    path = saved(1.0, 1.0, 0.0, 1.0)
    out = check(path, "--rm-type", "exact", status=1, capsys=capsys).out
    assert "differ    1 of 4" in out
    shown = ["sample 0 (group 0)", '  prompt    ""', '  response  "no"', '  label     "yes"', "  stored 1.0, now 0.0"]
    assert "\n".join(shown) in out
    check(path, "--rm-type", "exact", "--allow-differences")


def test_rows_of_any_file_are_named_by_their_line(capsys):
    path = write(row("Answer: C", "C", 1), row("x" * 500, "C", 1, prompt="q" * 500))
    out = check(path, "--rm-type", "gpqa", status=1, capsys=capsys).out
    assert "line 2\n" in out
    assert f'  prompt    ..."{"q" * 160}"\n  response  ..."{"x" * 160}"\n' in out


def test_a_runs_own_rollouts_file_is_read(capsys):
    group = [sample(4, 2, "yes", 1.0, label="yes", prompt=[{"role": "user", "content": "q"}])]
    path = write(*dump_rows([group]))
    assert "1 samples" in check(path, "--rm-type", "exact", capsys=capsys).out


def test_rows_without_a_stored_reward_are_graded_and_are_no_difference(capsys):
    path = write(row("yes", "yes", None), row("no", "yes", 0))
    out = check(path, "--rm-type", "exact", capsys=capsys).out
    assert "of the 1 that have both; 1 have none stored, and all of now are 0.5" in out


def test_an_error_fails_whatever_is_allowed(capsys):
    path = write(row("yes", "yes", 1), row("yes", None, 1))
    out = check(path, "--rm-type", "exact", "--allow-differences", status=1, capsys=capsys).out
    assert "errors    1" in out
    assert "stored 1, now an error: --rm-type exact: sample 2 (group None): the row has no label" in out
    out = check(write(row("a", "b", 1)), "--custom-rm-path", "rewards_of_check.breaks", status=1, capsys=capsys).out
    assert "on sample 1 (group None): raised ZeroDivisionError" in out


def test_rows_may_name_their_reward(capsys):
    path = write(row("C", "C", 1, metadata={"rm_type": "gpqa"}), row("the x", "x", 1, metadata={"rm_type": "f1"}))
    assert "graded by the rm_type of each row" in check(path, capsys=capsys).out


def test_objects_are_compared_by_the_key_or_by_every_number():
    path = write(row("four", "x", {"score": 1.0, "length": 3}))
    custom = ["--custom-rm-path", "rewards_of_check.score"]
    check(path, *custom, "--reward-key", "score")
    check(path, *custom, "--reward-key", "length", status=1)
    check(path, *custom, "--reward-key", "length", "--tolerance", "1")
    path = write(row("four", "x", {"score": 1.0, "length": 4, "note": "a"}))
    check(path, *custom, "--reward-key", "score")


def test_groups_are_given_whole_to_a_group_function():
    path = write(*(row("a", "b", i % 2, group_index=i // 2) for i in range(4)))
    check(path, "--custom-rm-path", "rewards_of_check.rank", "--group-rm")
    check(saved(0, 1, 0, 1), "--custom-rm-path", "rewards_of_check.rank", "--group-rm")


def test_a_recipe_gives_the_reward_and_what_else_it_needs_is_not_asked_for(tmp_path):
    (tmp_path / "recipe.yaml").write_text("rollout: {num_rollout: 9}\nreward: {rm_type: exact}\n")
    check(saved(0, 1, 0, 1), "recipe.yaml")
    check(saved(0, 1, 0, 1), "recipe.yaml", "--rm-type", "f1")


def test_the_result_is_written_as_json(tmp_path):
    check(saved(1.0, 1.0, 0.0, 1.0), "--rm-type", "exact", "--json", "out.json", "--show", "0", status=1)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["samples"], found["differences"], found["errors"]) == (4, 1, 0)
    assert (found["stored_mean"], found["now_mean"]) == (0.75, 0.5)
    assert found["found"][0]["where"] == "sample 0 (group 0)"


def test_what_is_not_shown_is_counted(capsys):
    path = write(*(row("a", "b", 1) for _ in range(7)))
    out = check(path, "--rm-type", "exact", "--show", "2", status=1, capsys=capsys).out
    assert out.count("now 0.0") == 2
    assert "5 more; --show N prints more" in out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "names no file"),
        (["--rm-type", "exact"], "names no file"),
        (["rows.jsonl", "--rm-type", "exakt"], "did you mean exact?"),
        (["rows.jsonl", "--rm-typ", "exact"], "--rm-typ: no such flag"),
        (["rows.jsonl", "--rm-type", "exact", "--show", "x"], "--show: got x"),
        (["rows.jsonl", "--rm-type", "exact", "--json", "none/x.json"], "--json: got none/x.json"),
        (["rows.jsonl", "--rm-type", "exact", "--in-flight", "0"], "--in-flight: got 0"),
        (["rows.jsonl"], "names no reward"),
        (["rows.jsonl", "missing.yaml"], "missing.yaml"),
    ],
)
def test_a_wrong_command_line_exits_with_2(capsys, argv, problem):
    write(row("a", "a", 1))
    assert problem in check(*argv, status=2, capsys=capsys).err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "rows.jsonl: holds no samples"),
        ('{"text": "a"}\n', "rows.jsonl:1: has no text under `response`; it has text"),
        ('{"response": "a", "label": "a"}\n{"response": 5}\n', "rows.jsonl:2: has no text under `response`"),
        ('{"response": "a", "metadata": []}\n{"response": "a", "metadata": 4}\n', "rows.jsonl:2: `metadata` is to be"),
        ("nonsense\n", "rows.jsonl:1: is not JSON"),
        ('{"kind": "rollout samples", "format": 1}\n', "rows.jsonl:1: its first line has no step"),
    ],
)
def test_a_file_of_something_else_is_an_error_with_its_line(capsys, content, problem):
    Path("rows.jsonl").write_text(content)
    assert problem in check("rows.jsonl", "--rm-type", "exact", status=1, capsys=capsys).err


def test_a_custom_function_that_cannot_be_called_is_told_before_grading(capsys):
    path = write(row("a", "a", 1))
    err = check(path, "--custom-rm-path", "rewards_of_check.wrong_signature", status=1, capsys=capsys).err
    assert "is called as fn(args, sample)" in err


def test_help_and_other_words_after_reward(capsys):
    assert main(["--help"]) == 0
    assert "Exit status: 0 every reward is as stored" in capsys.readouterr().out
    assert main(["chek"]) == 2
    assert "'chek'" in capsys.readouterr().err


def test_the_console_script_has_the_verb():
    path = write(row("yes", "yes", 0))
    argv = [sys.executable, "-m", "miles.cli", "reward", "check", path, "--rm-type", "exact"]
    done = subprocess.run(argv, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "differ    1 of 1" in done.stdout
