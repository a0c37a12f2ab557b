import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from miles.config.load import read
from miles.config.walk import leaves
from miles.core.samples import Sample
from miles.data_check.main import main
from miles.rollout.dataset import feed, fingerprint, tables
from miles.rollout.prompts import PromptFormat, load_prompts

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:<!-- file: (.+?) -->\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def blocks(kind):
    return [text for _, found, text in BLOCKS if found == kind]


@pytest.fixture
def code():
    """What the page's Python defines."""
    names: dict = {}
    for text in blocks("python"):
        exec(text, names)
    return names


def test_the_check_prints_what_the_page_shows(tmp_path, model_folder, monkeypatch, capsys):
    for name, _, text in BLOCKS:
        if name:
            (tmp_path / name).write_text(text)
    shutil.copytree(model_folder, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (session,) = blocks("console")
    command, _, expected = session.removeprefix("$ miles data ").partition("\n")
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == [line.rstrip() for line in expected.splitlines()]


def test_commands_give_their_settings():
    for text in blocks("bash"):
        words = shlex.split(text)
        assert words[:2] == ["miles", "train"]
        reading = read(words[2:])
        assert not [i for i in reading.issues if i.path.startswith(("--", "data.", "eval.prompt"))]
        assert reading.config.data.prompt_data


def test_flags_and_defaults_are_those_of_the_settings():
    by_flag = {flag: leaf for leaf in leaves() for flag in (*leaf.flags, *leaf.inverted)}
    own = {"--json"}
    assert set(re.findall(r"--[a-z][a-z0-9-]+", PAGE)) - own <= set(by_flag)
    table = PAGE[PAGE.index("| flag | default |") : PAGE.index("## Look")]
    for flag, default in (("--input-key", "input"), ("--metadata-key", "metadata"), ("--tool-key", "tools")):
        assert by_flag[flag].default == default
        assert f"`{default}`" in table
    assert by_flag["--rollout-seed"].default == 42


def test_rows_of_the_page_are_usable(tmp_path):
    format = PromptFormat(input_key="input", tool_key="tools", multimodal_keys={"image": "images"})
    for number, text in enumerate(blocks("json")):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text)
        assert len(load_prompts(str(path), format, None).rows) == len(text.splitlines())


def test_images_are_opened_as_shown(tmp_path, code):
    Image.new("RGB", (3, 2)).save(tmp_path / "cat.png")
    Image.new("RGB", (5, 4)).save(tmp_path / "dog.png")
    (text,) = [text for text in blocks("json") if "<image>" in text]
    (tmp_path / "rows.jsonl").write_text(text)
    format = PromptFormat(input_key="input", multimodal_keys={"image": "images"})
    (row,) = load_prompts(str(tmp_path / "rows.jsonl"), format, None).rows
    assert code["sizes"](Sample(prompt=row.prompt)) == [(3, 2), (5, 4)]


# Case C19.
def test_the_letter_is_that_of_the_right_choice(code):
    rows = [code["multiple_choice"](i, "?", "right", ["w1", "w2", "w3"]) for i in range(40)]
    for row in rows:
        letter = row["label"]
        assert row["metadata"]["choices"]["ABCD".index(letter)] == "right"
        assert f"\n{letter}) right" in row["input"]
    assert set(Counter(row["label"] for row in rows)) == set("ABCD")
    assert rows == [code["multiple_choice"](i, "?", "right", ["w1", "w2", "w3"]) for i in range(40)]


def test_the_data_source_of_the_page_keeps_its_contract(code, make_args):
    source = code["Source"](make_args("", n_samples_per_prompt=2))
    first = source.get_samples(3)
    assert [(s.group_index, s.index) for g in first for s in g] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    source.add_samples(first[1:2])
    resumed = code["Source"](make_args("", n_samples_per_prompt=2))
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [group[0].group_index for group in resumed.get_samples(2)] == [1, 3]


def test_sizes_on_the_page_are_the_codes():
    mib = 1 << 20
    sizes = [feed.CHECKED_BYTES, fingerprint.WHOLE, tables.ARROW_BYTES, fingerprint.EDGE, fingerprint.BLOCK]
    assert sizes == [64 * mib, 1024 * mib, 1024 * mib, 64 * mib, mib]
    assert fingerprint.BLOCKS == 64
