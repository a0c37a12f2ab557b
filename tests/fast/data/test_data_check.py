import json
import subprocess
import sys

import pytest

from miles.data_check.main import main

USAGE_ERROR = 2


@pytest.fixture
def check(capsys, tmp_path):
    """Run the verb; gives its status, its output, and the JSON of the first file."""

    def check(*argv):
        status = main(["check", *argv, "--json", str(tmp_path / "out.json")])
        out = capsys.readouterr()
        found = json.loads((tmp_path / "out.json").read_text())["files"][0] if status != USAGE_ERROR else None
        return status, out.out + out.err, found

    return check


def rows(count):
    return [{"input": f"{i} plus 1?", "label": str(i + 1)} for i in range(count)]


def test_a_good_file_is_described(check, write, model_folder):
    path = write([*rows(8), {"input": "x" * 30, "label": 3, "metadata": {"k": 1}}, rows(3)[2]])
    status, text, found = check(
        path, "--hf-checkpoint", str(model_folder), "--label-key", "label", "--rollout-max-prompt-len", "20"
    )
    assert status == 0
    assert found["rows"] == 10
    assert found["keys"]["label"] == {"types": {"text": 9, "integer": 1}, "missing": 0}
    assert found["keys"]["metadata"] == {"types": {"object": 1}, "missing": 9}
    assert found["lengths"] == {"min": 10, "median": 10.0, "p95": pytest.approx(21.55), "max": 31}
    assert (found["dropped"], found["duplicates"], found["duplicate_lines"]) == (1, 1, [[3, 10]])
    assert [prompt["text"] for prompt in found["prompts"]] == ["0 plus 1?", "1 plus 1?", "2 plus 1?"]
    assert f"{path}: 10 rows" in text
    assert "dropped     1 of 10 are too long" in text
    assert "line 10 is line 3" in text
    assert "problems    none" in text


def test_prompts_are_shown_as_the_model_sees_them(check, write, model_folder):
    tool = {"name": "f"}
    path = write([{"input": [{"role": "user", "content": "hi"}], "tools": [tool]}])
    _, text, found = check(path, "--hf-checkpoint", str(model_folder))
    assert found["prompts"] == [{"line": 1, "text": '<bos>[{"name": "f"}]\nuser: hi\nassistant: '}]
    assert '    | <bos>[{"name": "f"}]\n    | user: hi\n    | assistant: ' in text
    _, text, found = check(write(rows(1)), "--hf-checkpoint", str(model_folder), "--apply-chat-template")
    assert found["prompts"][0]["text"] == "<bos>user: 0 plus 1?\nassistant: "


def test_every_row_that_a_run_would_refuse_is_told_with_its_line(check, write, model_folder):
    lines = [json.dumps(row) for row in (*rows(2), {"inptu": "a"}, {"input": ""}, {"input": "y" * 70})]
    path = write("\n".join([*lines, "{bad", "", '{"input": "ok", "metadata": 3}']))
    status, text, found = check(path, "--hf-checkpoint", str(model_folder), "--show", "2")
    assert status == 1
    assert found["num_problems"] == 5
    assert sorted(problem.partition(": ")[0] for problem in found["problems"]) == [
        f"{path}:{line}" for line in (3, 4, 5, 6, 8)
    ]
    assert "did you mean --input-key inptu?" in text
    assert "5 rows that a run would refuse" in text
    assert "... and 3 more (--show N prints more)" in text


# Case A34.
def test_labels_that_the_reward_cannot_grade_against_are_told(check, write):
    path = write([{"input": "a", "label": label} for label in ("0.5", "2/3", "", None, [1])])
    status, text, found = check(path, "--label-key", "label", "--rm-type", "math")
    assert status == 1
    assert [problem.partition(": ")[0] for problem in found["problems"]] == [f"{path}:{line}" for line in (3, 4, 5)]
    assert "5 of 5 distinct ones graded against" in text
    assert check(path, "--label-key", "label")[0] == 0  # no reward is named, so any label will do


def test_a_row_that_names_an_unknown_reward_is_a_problem_of_that_row_alone(check, write):
    rows = [{"input": "a", "label": "1"}, {"input": "b", "label": "2", "metadata": {"rm_type": "maht"}}]
    path = write([*rows, {"input": "c", "label": ""}])
    status, _, found = check(path, "--label-key", "label", "--rm-type", "math")
    assert status == 1
    first, second = found["problems"]
    assert first.startswith(f"{path}:2: there is no built-in reward 'maht': did you mean math?")
    assert second.startswith(f"{path}:3: the label is empty")


def test_conversations_of_fine_tuning_are_measured_with_their_answers(check, write, model_folder):
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write([{"input": conversation}, {"input": conversation[:1]}])
    sft = ("--loss-type", "sft_loss", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout")
    status, _, found = check(path, "--hf-checkpoint", str(model_folder), *sft)
    assert status == 1
    (problem,) = found["problems"]
    assert problem.startswith(f"{path}:2: the last message is not the assistant's")
    assert "assistant:a" in found["prompts"][0]["text"].replace(" ", "")


def test_without_a_model_lengths_are_not_known_and_everything_else_is(check, write_parquet):
    status, text, found = check(write_parquet(rows(5)) + "@[1:4]")
    assert (status, found["rows"], found["lengths"]) == (0, 3, None)
    assert "not known: --hf-checkpoint FOLDER names a tokenizer" in text


def test_a_file_of_which_nothing_is_left_fails(check, write, model_folder):
    argv = ("--hf-checkpoint", str(model_folder), "--rollout-max-prompt-len", "3")
    assert check(write(rows(4)), *argv)[0] == 1
    status, text, _ = check(write("\n \n"))
    assert (status, "is empty" in text) == (USAGE_ERROR, True)


def test_a_recipe_names_files_and_settings(check, write, tmp_path):
    path = write([{"q": "a"}])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"data: {{prompt_data: {path}, input_key: q}}")
    assert check(str(recipe))[2]["rows"] == 1
    assert check(path, str(recipe), "--input-key", "input")[0] == 1


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--show", "x"], "--show: got x"),
        (["--show", "-1"], "--show: -1 is negative"),
        (["--inptu-key", "q"], "did you mean --input-key?"),
        (["none.jsonl"], "none.jsonl: no such file"),
    ],
)
def test_a_wrong_command_line_is_told(capsys, write, argv, told):
    assert main(["check", write(rows(1)), *argv] if argv[0].startswith("-") else ["check", *argv]) == USAGE_ERROR
    assert told in capsys.readouterr().err


def test_other_verbs_and_help(capsys):
    assert main(["--help"]) == 0
    assert main(["chekc"]) == USAGE_ERROR
    out = capsys.readouterr()
    assert "Exit status: 0 a run would take every row" in out.out
    assert "there is no 'chekc' here" in out.err


def test_the_console_script_has_the_verb(write):
    run = subprocess.run(
        [sys.executable, "-m", "miles.cli", "data", "check", write(rows(3))], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "3 rows" in run.stdout
