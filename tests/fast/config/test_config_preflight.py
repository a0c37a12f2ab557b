import json
import os
import socket

import pytest

from miles.config.load import load, read
from miles.config.preflight import preflight
from miles.config.resources import machine_cores, num_engines, resolved_num_cpus, resolved_threads
from miles.config.schema import ClusterConfig, RunConfig
from miles.utils.checkpoint_folder import write_state, writing
from miles.utils.run_record import FILE, RunRecord, write

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
SFT = ["--loss-type", "sft_loss", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout"]


def problems(argv: list[str]) -> list[str]:
    return [f"{issue.path}: {issue.problem} -> {issue.fix}" for issue in preflight(load(argv))]


def only(argv: list[str]) -> str:
    found = problems(argv)
    assert len(found) == 1, found
    return found[0]


def test_complete_files_pass(files):
    assert problems(files.argv("--eval-interval", "1", "--eval-prompt-data", "held", str(files.held_out))) == []


def test_missing_model_folder(files):
    missing = str(files.root / "nowhere")
    assert only(files.argv("--hf-checkpoint", missing)) == (
        f"model.hf_checkpoint: {missing}: no such folder -> "
        "--hf-checkpoint with a folder of config.json, *.safetensors, tokenizer"
    )


def test_hub_name_in_place_of_a_folder(files):
    found = only(files.argv("--hf-checkpoint", "Qwen/Qwen3-0.6B"))
    assert found.endswith("hf download Qwen/Qwen3-0.6B --local-dir FOLDER, then --hf-checkpoint FOLDER")


def test_model_that_is_a_file(files):
    assert "is a file, not a folder" in only(files.argv("--hf-checkpoint", str(files.prompts)))


def test_unset_model_and_prompts():
    found = preflight(load(["--rm-type", "math", "--label-key", "a", "--num-rollout", "1", "--num-cpus", "2"]))
    assert [str(issue) for issue in found] == [
        "model.hf_checkpoint: no model is given\n    fix: --hf-checkpoint FOLDER",
        "data.prompt_data: no prompts are given\n    fix: --prompt-data FILE.jsonl",
    ]


def test_folder_without_tokenizer(files):
    (files.model / "tokenizer.json").unlink()
    assert only(files.argv()) == (
        f"model.hf_checkpoint: {files.model} has no tokenizer: neither tokenizer.json nor tokenizer_config.json -> "
        "save the model's tokenizer into it: tokenizer.save_pretrained(FOLDER)"
    )
    (files.model / "tokenizer_config.json").write_text("{}")
    assert problems(files.argv()) == []


def test_folder_without_config_or_weights_names_both(files):
    (files.model / "config.json").unlink()
    (files.model / "model.safetensors").unlink()
    found = problems(files.argv())
    assert [p.partition(" -> ")[0] for p in found] == [
        f"model.hf_checkpoint: {files.model} has no config.json, so it is no model folder",
        f"model.hf_checkpoint: {files.model} has no *.safetensors",
    ]


def test_config_that_is_no_json(files):
    (files.model / "config.json").write_text("{")
    assert only(files.argv()).startswith(f"model.hf_checkpoint: {files.model / 'config.json'} is not a JSON object")


def test_model_of_another_architecture_is_named_with_the_choices(files):
    (files.model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert only(files.argv()) == (
        f"model.hf_checkpoint: {files.model} holds a model of type 'gpt2' -> "
        "choose a model of type llama, qwen2, qwen3 or qwen3_moe"
    )


def test_missing_weight_files_of_an_index_are_counted(files):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (files.model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of 2 weight files are missing: model-2.safetensors -> fetch the model again" in only(files.argv())
    (files.model / "model-2.safetensors").write_bytes(NO_TENSORS)
    assert problems(files.argv()) == []


def weights_file(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is damaged: it ends within its header, after 0 bytes"),
        (weights_file('{"w": {"data_offsets": [0, 8]}}', b"")[:20], "ends within its header, after 20 bytes"),
        (
            weights_file('{"__metadata__": {}, "w": {"data_offsets": [0, 8]}}', b"1234"),
            "is damaged: it has 63 bytes, and its header promises 67",
        ),
        (weights_file("{nothing}", b""), "is no safetensors file: its header cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1", "ends within its header, after 42 bytes"),
    ],
)
def test_a_damaged_weight_file_is_seen_before_anything_starts(files, content, problem):
    (files.model / "model.safetensors").write_bytes(content)
    found = only(files.argv())
    assert found.startswith(f"model.hf_checkpoint: {files.model / 'model.safetensors'} ")
    assert problem in found


def test_a_weight_file_as_the_library_writes_it_passes(files):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3, 5), "b": torch.zeros(0)}, files.model / "model.safetensors", {"format": "pt"})
    assert problems(files.argv()) == []


def test_rows_of_a_file_that_are_named_wrongly_get_the_form(files):
    assert only(files.argv("--prompt-data", f"{files.prompts}@[2]")).endswith(
        "take rows a to b with FILE@[a:b], whole numbers and no step"
    )


def test_reference_model_needs_no_tokenizer_but_weights(files):
    reference = files.root / "reference"
    reference.mkdir()
    (reference / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert only(files.argv("--ref-load", str(reference))).startswith(
        f"model.ref_load: {reference} has no *.safetensors"
    )
    (reference / "model.safetensors").write_bytes(NO_TENSORS)
    assert problems(files.argv("--ref-load", str(reference))) == []
    assert "model.ref_load: " in only(files.argv("--ref-load", str(files.root / "none")))


def test_the_critics_folder_is_named_by_its_own_flag(files):
    ppo = ["--advantage-estimator", "ppo", "--critic-load"]
    assert problems(files.argv(*ppo, str(files.model))) == []
    found = only(files.argv(*ppo, str(files.root / "none")))
    assert found.startswith("critic.load: ")
    assert "--critic-load with a folder of config.json" in found


def test_missing_chat_template(files):
    assert only(files.argv("--chat-template-path", "none.jinja")) == (
        "model.chat_template_path: none.jinja: no such file -> --chat-template-path FILE.jinja"
    )


def test_unusable_prompt_files_are_told_apart(files):
    empty, blank, text = files.root / "empty.jsonl", files.root / "blank.jsonl", files.root / "rows.csv"
    empty.write_text("")
    blank.write_text("\n \n")
    text.write_text("a,b\n")
    cut = files.root / "cut.parquet"
    cut.write_bytes(b"PAR1 and no more")
    rows = "a .jsonl file with one JSON object a line, or a .parquet file"
    for path, problem in [
        (empty, f"{empty} is empty -> give {rows}"),
        (blank, f"{blank} is empty -> give {rows}"),
        (text, f"{text} is neither a .jsonl nor a .parquet file -> give {rows}"),
        (cut, f"{cut} is not a Parquet file, or is cut off -> write the file anew"),
        (files.root, f"{files.root} is not a file -> give {rows}"),
        (
            files.root / "none.jsonl",
            f"{files.root / 'none.jsonl'}: no such file -> check the path; the current folder is",
        ),
    ]:
        assert only(files.argv("--prompt-data", str(path))).startswith(f"data.prompt_data: {problem}")


def test_own_data_source_reads_what_it_likes(files):
    assert problems(files.argv("--prompt-data", "s3://bucket", "--data-source-path", "my.Source")) == []


def test_missing_evaluation_file_names_dataset_and_path(files):
    # Case H13.
    argv = files.argv("--eval-interval", "1", "--eval-prompt-data", "gsm", "does_not_exist.jsonl")
    found = problems([*argv, "--eval.datasets", "{name: aime, path: gone.jsonl}"])
    assert found[0].startswith("eval.prompt_data: dataset gsm: does_not_exist.jsonl: no such file")
    assert found[1].startswith("eval.datasets.0.path: dataset aime: gone.jsonl: no such file")
    assert len(found) == 2


def test_checkpoint_to_load_must_exist_and_be_complete(files):
    folder = files.root / "checkpoints"
    assert only(files.argv("--load", str(folder))).startswith(f"checkpoint.load: {folder}: no such folder")
    (folder / "iter_0000003").mkdir(parents=True)
    assert "holds no complete checkpoint" in only(files.argv("--load", str(folder)))
    with writing(folder, 4):
        pass
    assert problems(files.argv("--load", str(folder))) == []


def test_run_folder_of_another_run_is_refused_unless_it_is_resumed(files):
    folder = files.root / "run"
    with writing(folder / "checkpoints", 1):
        pass
    assert problems(files.argv("--run-dir", str(folder))) == []
    (folder / "resolved.yaml").write_text("")
    assert only(files.argv("--run-dir", str(folder))) == (
        f"run.dir: {folder} holds another run -> "
        f"--run-dir with a new folder (null makes one under runs/), or --load {folder / 'checkpoints'} to go on with that run"
    )
    assert problems(files.argv("--run-dir", str(folder), "--load", str(folder / "checkpoints"))) == []
    with writing(files.root / "elsewhere", 1):
        pass
    assert "holds another run" in only(files.argv("--run-dir", str(folder), "--load", str(files.root / "elsewhere")))
    assert "is a file" in only(files.argv("--run-dir", str(files.prompts)))


def test_a_folder_with_another_runs_checkpoints_is_refused_unless_the_run_goes_on_from_them(files):
    folder, saving = files.root / "checkpoints", ["--save-interval", "2"]
    argv = files.argv("--save", str(folder), *saving)
    assert problems(argv) == []
    with writing(folder, 100) as draft:
        write(draft, RunRecord("theirs", {}))
    assert only(argv) == (
        f"checkpoint.save: {folder} holds checkpoints of another run, the latest iter_0000100 -> "
        f"--save with a new folder, or --load {folder} to go on from its latest checkpoint"
    )
    assert problems([*argv, "--load", str(folder)]) == []
    assert problems(files.argv("--save", str(folder / "mine"), *saving)) == []
    with writing(files.root / "mine", 10) as draft:
        write(draft, RunRecord("mine", {}))
    assert "of another run" in only([*argv, "--load", str(files.root / "mine")])
    (folder / "iter_0000100" / FILE).write_text("{")
    assert "run.json: unreadable" in only([*argv, "--load", str(files.root / "mine")])


def test_a_run_folder_that_holds_checkpoints_of_another_run_is_refused(files):
    folder, saving = files.root / "run", ["--save-interval", "2"]
    with writing(folder / "checkpoints", 100):
        pass
    assert only(files.argv("--run-dir", str(folder), *saving)) == (
        f"run.dir: {folder / 'checkpoints'} holds checkpoints of another run, the latest iter_0000100 -> --run-dir with a "
        f"new folder, or --load {folder / 'checkpoints'} to go on from its latest checkpoint"
    )
    assert problems(files.argv("--run-dir", str(folder), *saving, "--load", str(folder / "checkpoints"))) == []
    (folder / "resolved.yaml").write_text("")
    assert "holds another run" in only(files.argv("--run-dir", str(folder), *saving))


def test_more_processes_than_ray_may_place(files):
    argv = ["--train-ranks", "2", "--rollout-engines", "3", "--num-cpus", "4"]
    assert only(files.argv(*argv)) == (
        "cluster.num_cpus: 2 trainer rank(s) and 3 engine(s) take 5 logical CPUs, but Ray may hand out 4 (--num-cpus) "
        "-> --num-cpus 5, or fewer --train-ranks or --rollout-engines"
    )
    assert problems(files.argv("--train-ranks", "2", "--rollout-engines", "2", "--num-cpus", "4")) == []


def test_a_port_in_use_is_seen_before_anything_starts(files):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert only(files.argv("--router-port", port)) == (
            f"router.port: port {port} of 127.0.0.1 is in use -> --router-port with another port, or 0 for a free one"
        )
        assert problems(files.argv("--router-port", port, *SFT)) == []
    assert problems(files.argv("--router-port", port)) == []


def test_engines_take_no_place_when_nothing_generates(files):
    argv = files.argv(*SFT, "--rollout-engines", "8", "--num-cpus", "1")
    assert num_engines(load(argv)) == 0
    assert problems(argv) == []


def test_cpus_and_threads_default_to_the_machines_cores():
    assert 1 <= machine_cores() <= (os.cpu_count() or 1)
    assert (resolved_num_cpus(RunConfig()), resolved_threads(RunConfig())) == (machine_cores(), machine_cores())
    cfg = RunConfig(cluster=ClusterConfig(num_cpus=8, threads=3))
    assert (resolved_num_cpus(cfg), resolved_threads(cfg)) == (8, 3)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("x", None)]
)
def test_a_containers_quota_limits_the_cores(quota, cores, tmp_path, monkeypatch):
    free = machine_cores()
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("miles.config.resources._CPU_QUOTA", tmp_path / "cpu.max")
    assert machine_cores() == (cores or free)


def test_lengths_are_held_against_the_models_positions(files):
    assert only(files.argv("--rollout-max-context-len", "1024")) == (
        f"rollout.max_context_len: 1024 tokens are more than the 512 positions of {files.model} -> "
        "--rollout-max-context-len 512 or less"
    )
    assert only(files.argv("--rollout-max-response-len", "512")) == (
        "rollout.max_response_len: responses of 512 tokens leave no room for a prompt in the 512 positions of the model "
        "-> --rollout-max-response-len below 512, or a model with more positions"
    )
    assert "prompts of 500 and responses of 64 tokens can have 564" in only(
        files.argv("--rollout-max-prompt-len", "500")
    )
    assert problems(files.argv(*SFT, "--rollout-max-response-len", "512")) == []


def test_looks_that_need_a_wrong_setting_are_skipped(files):
    reading = read(files.argv("--train-ranks", "x", "--prompt-data", "none.jsonl"))
    assert [issue.path for issue in preflight(reading.config, reading.unknown)] == ["data.prompt_data"]


def test_half_a_run_needs_room_for_its_own_processes_only(files):
    many = ["--train-ranks", "2", "--rollout-engines", "2"]
    assert only(files.argv(*many)).startswith("cluster.num_cpus: 2 trainer rank(s) and 2 engine(s) take 4")
    assert problems(files.argv(*many, "--debug-rollout-only")) == []
    saved = files.root / "{rollout_id}.jsonl"
    for step in range(3):
        (files.root / f"{step}.jsonl").write_text("")
    assert problems(files.argv(*many, "--load-debug-rollout-data", str(saved))) == []


def test_steps_whose_saved_samples_are_missing_are_named_from_the_checkpoints_step_on(files):
    saved = ["--load-debug-rollout-data", str(files.root / "{rollout_id}.jsonl")]
    (files.root / "1.jsonl").write_text("")
    found = only(files.argv(*saved))
    assert "2 of the 3 files of this run's steps are missing" in found
    assert f"{files.root / '0.jsonl'}, {files.root / '2.jsonl'}" in found
    with writing(files.root / "checkpoints", 1) as draft:
        write_state(draft, {"next_step": 1})
    resumed = [*saved, "--load", str(files.root / "checkpoints")]
    assert problems(files.argv(*resumed, "--num-rollout", "2")) == []


def test_a_folder_cannot_ask_for_a_checkpoint(files):
    assert only(files.argv("--save-trigger-sentinel", str(files.root))) == (
        f"checkpoint.save_trigger_sentinel: {files.root} is a folder -> --save-trigger-sentinel FILE"
    )
    assert problems(files.argv("--save-trigger-sentinel", str(files.root / "save-now"))) == []


def test_the_first_row_of_each_prompt_file_is_looked_at_before_anything_starts(files):
    path = files.root / "rows.jsonl"
    path.write_text('\n{"prompt": "1+1", "answer": "2"}\nnot looked at\n')
    (found,) = problems(files.argv("--prompt-data", str(path), "--input-key", "promt", "--label-key", "answer"))
    assert found == (
        f"data.input_key: {path}:2: the row has no 'promt', only 'prompt', 'answer' -> did you mean --input-key prompt?"
    )
    (found,) = problems(files.argv("--prompt-data", str(path), "--input-key", "prompt", "--label-key", "gold"))
    assert found.startswith(f"data.label_key: {path}:2: the row has no 'gold', only 'prompt', 'answer'")
    assert problems(files.argv("--prompt-data", f"{path}@[1:]", "--input-key", "promt")) == []
    path.write_text("[1]\n")
    assert only(files.argv("--prompt-data", str(path))).startswith(f"data.prompt_data: {path}:1: holds a JSON array")
