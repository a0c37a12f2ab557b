import pytest

from miles.config.load import read
from miles.config.preflight import prompts_exist

BASE = ["--num-rollout", "1", "--rm-type", "math", "--label-key", "label"]
GENERATE = ["--custom-generate-function-path", "my.generate"]


def issues(*argv: str) -> list[str]:
    found = read([*BASE, *argv]).issues
    return [f"{i.path}: {i.problem} -> {i.fix}" for i in found if i.path.startswith(("data.", "rollout.num"))]


def test_prompts_are_a_list_of_files_and_a_recipe_may_name_one_as_text(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {prompt_data: 'a.jsonl@[0:10]'}")
    assert read([str(recipe), *BASE]).config.data.prompt_data == ["a.jsonl@[0:10]"]
    several = read([*BASE, "--prompt-data", "a.jsonl@[0:10]", "b.parquet", "--prompt-data-weights", "2", "1"])
    assert several.config.data.prompt_data == ["a.jsonl@[0:10]", "b.parquet"]
    assert several.config.data.prompt_data_weights == [2, 1]
    assert not several.issues


def test_weights_that_do_not_fit_the_files():
    assert issues("--prompt-data", "a.jsonl", "--prompt-data-weights", "2", "1") == [
        "data.prompt_data_weights: there are 2 weights for 1 files of --prompt-data -> "
        "give one number per file, in their order"
    ]
    assert issues("--prompt-data", "a.jsonl", "b.jsonl", "--prompt-data-weights", "1", "0") == [
        "data.prompt_data_weights: 0 is no share -> give numbers above 0; leave a file out of --prompt-data to take "
        "nothing from it"
    ]


def test_blank_prompts_need_a_function_that_fills_them_in():
    flag = "--disable-rollout-global-dataset"
    assert issues(flag) == [
        f"data.global_dataset: with {flag} samples are blank, and nothing fills in their prompts -> "
        "--custom-generate-function-path package.module.function"
    ]
    assert issues(flag, *GENERATE) == []
    assert issues(flag, *GENERATE, "--prompt-data", "a.jsonl") == [
        f"data.global_dataset: {flag} reads no prompts, and --prompt-data names a.jsonl -> "
        f"leave out {flag} or --prompt-data"
    ]
    assert issues(flag, *GENERATE, "--num-rollout", "null", "--num-epoch", "2") == [
        f"rollout.num_epoch: --num-epoch counts passes over the prompts, and with {flag} there are none -> "
        "--num-rollout STEPS"
    ]


def test_a_run_with_blank_prompts_needs_no_file():
    assert list(prompts_exist(read([*BASE, *GENERATE, "--disable-rollout-global-dataset"]).config)) == []
    assert [i.path for i in prompts_exist(read([*BASE, *GENERATE]).config)] == ["data.prompt_data"]


def test_images_are_not_left_out_in_silence():
    keys = ["--multimodal-keys", '{"image": "images"}']
    (found,) = issues("--prompt-data", "a.jsonl", *keys)
    assert found.startswith("data.multimodal_keys: engine and trainer read text alone, so images")
    assert "--custom-generate-function-path with a function that opens them" in found
    assert issues("--prompt-data", "a.jsonl", *keys, *GENERATE) == []


@pytest.mark.parametrize("kind", ["picture", "images"])
def test_an_unknown_kind_of_media_is_named(kind):
    assert issues("--prompt-data", "a.jsonl", *GENERATE, "--multimodal-keys", f'{{"{kind}": "images"}}') == [
        f"data.multimodal_keys: there is no kind {kind!r} -> "
        """use image, video or audio: '{"image": "images"}'"""
    ]
