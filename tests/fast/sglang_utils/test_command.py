from miles.backends.sglang_utils.command import sglang_command
from miles.config.load import read


def command_of(*words):
    return sglang_command(read(["--hf-checkpoint", "model", "--num-rollout", "1", *words]).config)


def value(command, flag):
    return command[command.index(flag) + 1]


def test_settings_of_the_run_are_the_servers_arguments():
    command = command_of(
        "--rollout-num-gpus-per-engine",
        "2",
        "--engine.max-running-requests",
        "96",
        "--rollout-max-context-len",
        "4096",
    )
    assert value(command, "--model-path") == "model"
    assert value(command, "--tp-size") == "2"
    assert value(command, "--max-running-requests") == "96"
    assert value(command, "--cuda-graph-max-bs-decode") == "96"
    assert value(command, "--context-length") == "4096"
    assert not {"--enable-memory-saver", "--disable-radix-cache"} & set(command)


def test_an_engine_that_gives_memory_up_has_the_memory_saver():
    assert "--enable-memory-saver" in command_of("--offload-rollout")
    assert "--enable-memory-saver" in command_of("--colocate")
    assert "--enable-memory-saver" not in command_of("--colocate", "--offload-rollout", "false")


def test_retracted_requests_find_no_cache_of_old_weights():
    assert "--disable-radix-cache" in command_of("--pause-generation-mode", "retract")


def test_what_the_user_adds_comes_last():
    command = command_of(
        "--sglang-mem-fraction-static", "0.6", "--sglang-enable-metrics", "--sglang-cuda-graph-bs-decode", "1", "8"
    )
    assert command[-6:] == ["--mem-fraction-static", "0.6", "--enable-metrics", "--cuda-graph-bs-decode", "1", "8"]


def test_kernels_are_kept_in_the_folder_that_the_run_names():
    assert value(command_of("--kernel-cache-dir", "/caches"), "--cache-dir") == "/caches"
