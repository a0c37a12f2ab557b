import resource
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config.cli import parse
from miles.config.docs import PAGE, docs_page
from miles.config.dump import undump
from miles.config.help_text import help_text
from miles.config.load import load
from miles.config.plan import describe_plan
from miles.config.walk import leaves
from miles.utils import arguments

HEAVY = ("torch", "ray", "transformers", "numpy", "fastapi", "aiohttp")
ROOT = Path(__file__).parents[3]
SCRIPT = f"""
import atexit, runpy, sys
atexit.register(lambda: sys.stderr.write(repr([m for m in {HEAVY} if m in sys.modules])))
runpy.run_path("train.py", run_name="__main__")
"""


def ended(capsys, argv: list[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_sound_command_line_gives_its_configuration(files):
    assert parse(files.argv()) == load(files.argv())


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["missing.yaml", "--lr", "x", "--help"]])
def test_help_ends_with_status_0(argv, capsys):
    code, out, err = ended(capsys, argv)
    assert (code, err) == (0, "")
    assert out == help_text()


def test_help_shows_every_flag_with_choices_bounds_and_defaults():
    text = help_text("my.py")
    assert text.startswith("usage: my.py [recipe.yaml ...] [--flag value ...]")
    words = set(text.replace(",", " ").split())
    assert {flag for leaf in leaves() for flag in (*leaf.flags, *leaf.inverted)} <= words
    assert "--kl-loss-type, --algorithm.kl-loss-type {k1,k2,k3,low_var_kl}" in text
    assert "Prompts per rollout step. [1 or more; default 32]" in text
    assert "Each has: name, path," in text
    assert "\nrollout: How samples are generated.\n" in text


def test_dry_run_shows_settings_arithmetic_and_processes(files, capsys):
    argv = files.argv("--dry-run", "--train-ranks", "2", "--num-cpus", "3", "--torch-threads", "2")
    code, out, err = ended(capsys, argv)
    assert (code, err) == (0, "")
    assert undump(out) == load([word for word in argv if word != "--dry-run"])
    assert "32 prompts x 8 samples = 256 samples a rollout = 1 optimizer step x 256 samples" in out
    assert "1 + 2 = 3 taken of the 3 that Ray may hand out" in out


def test_plan_names_every_process_with_its_share(files):
    lines = describe_plan(load(files.argv("--train-ranks", "2", "--torch-threads", "4", "--num-cpus", "3")))
    assert [" ".join(line.split()) for line in lines] == [
        "driver 1 process the loop; starts all others and ends them",
        f"rollout manager 1 Ray actor prompts from {files.prompts}",
        "router 1 process loopback, a free port, in front of 1 engine",
        "engines 1 process torch on CPU, 1 logical CPU and 4 threads each",
        "trainer 2 ranks fsdp on CPU, 1 logical CPU and 4 threads each",
        "logical CPUs 1 + 2 = 3 taken of the 3 that Ray may hand out",
        "each step 32 prompts x 8 samples = 256 samples a rollout = 1 optimizer step x 256 samples",
        "length 3 rollout steps, 3 optimizer steps",
        "run folder runs/miles-TIME",
    ]


def test_plan_of_supervised_training_has_no_engines(files):
    sft = ["--loss-type", "sft_loss", "--rollout-function-path", "miles.rollout.sft_rollout.generate_rollout"]
    lines = describe_plan(load(files.argv(*sft, "--num-rollout", "null", "--num-epoch", "2")))
    assert not any(line.startswith(("engines", "router")) for line in lines)
    assert any("1 taken of the 2" in line for line in lines)
    assert any("2 epochs of rows // 32 rollout steps" in line for line in lines)


def test_plan_of_half_a_run_has_only_that_half(files):
    lines = describe_plan(load(files.argv("--load-debug-rollout-data", "saved/{rollout_id}.jsonl")))
    assert not any(line.startswith(("engines", "router")) for line in lines)
    assert any(line.endswith("saved samples from saved/{rollout_id}.jsonl") for line in lines)
    assert any("1 taken of the 2" in line for line in lines)
    lines = describe_plan(load(files.argv("--debug-rollout-only")))
    assert [line.split()[0] for line in lines[:5]] == ["driver", "rollout", "router", "engines", "logical"]
    assert any("1 taken of the 2" in line for line in lines)
    assert any("3 rollout steps, none of them trained on" in line for line in lines)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_problems_of_settings_and_disk_come_together_with_status_2(files, capsys, dry):
    argv = files.argv("--kl-loss-coef", "1", "--hf-checkpoint", str(files.root / "gone"), "--rollout-batchsize", "8")
    code, out, err = ended(capsys, [*argv, *dry])
    assert (code, out) == (2, "")
    assert err == (
        "3 problems in this configuration\n"
        "  - --rollout-batchsize: no such flag\n"
        "    fix: did you mean --rollout-batch-size?\n"
        "  - algorithm.kl_loss_coef: 1.0 has no effect without --use-kl-loss\n"
        "    fix: --use-kl-loss, or --kl-loss-coef 0\n"
        f"  - model.hf_checkpoint: {files.root / 'gone'}: no such folder\n"
        "    fix: --hf-checkpoint with a folder of config.json, *.safetensors, tokenizer\n"
    )


def child(argv: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = cpu()
    command = [sys.executable, "-c", SCRIPT, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return cpu() - before, done


@pytest.mark.parametrize("mode", ["--help", "--dry-run"])
def test_fresh_interpreter_answers_in_half_a_second_without_heavy_imports(mode, files):
    runs = [child(files.argv(mode)) for _ in range(3)]
    assert [(done.returncode, done.stderr) for _, done in runs] == [(0, "[]")] * 3
    assert min(seconds for seconds, _ in runs) < 0.5


# Case H01: the exit status.
def test_fresh_interpreter_reports_problems_without_a_traceback():
    _, done = child(["--rollout-batchsize", "8"])
    assert done.returncode == 2
    assert "--rollout-batchsize: no such flag\n    fix: did you mean --rollout-batch-size?" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_arguments_at_all_are_told_how_to_begin(capsys):
    code, out, err = ended(capsys, [])
    assert (code, out) == (2, "")
    assert err.startswith("usage: train.py [recipe.yaml ...] [--flag value ...]\n`--help` lists every setting")
    assert "\n\n4 problems in this configuration\n" in err


@pytest.mark.parametrize(("argv", "status"), [(["train", "--bogus"], 2), ([], 2), (["trian"], 2), (["--help"], 0)])
def test_the_module_of_the_console_script_runs_as_the_script_does(argv, status):
    command = [sys.executable, "-m", "miles.cli", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("--bogus: no such flag" if "--bogus" in argv else "usage: miles VERB") in done.stdout + done.stderr


def test_reference_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == docs_page(), "run: python -m miles.config.docs"


def test_reference_page_has_every_setting():
    page = docs_page()
    assert [leaf.path for leaf in leaves() if f"| `{leaf.path}` |" not in page] == []
    assert (
        "| `rollout.batch_size` | `--rollout-batch-size`<br>`--rollout.batch-size` | a whole number, 1 or more |"
        in page
    )


def test_arguments_module_is_a_door_to_this_package():
    assert arguments.load is load
    assert arguments.parse is parse
