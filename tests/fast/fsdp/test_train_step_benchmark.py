import json

import pytest

from benchmarks import train_step


def test_the_benchmark_of_training_steps_runs_the_trainer_on_each_pack(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert train_step.main(["--tiny", "--times", "1", "--profile", "3", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["pack"], row["tokens"]) for row in rows] == [("4 x 32", 128), ("3 x 100", 127)] * 2
    assert [row["model"] for row in rows] == ["tiny"] * 2 + ["tiny-moe"] * 2
    assert all(row["tokens_per_s"] > 0 and row["steps"] == 1 for row in rows)
    assert len(rows[0]["kernels"]) == 4
    assert "tokens/s" in capsys.readouterr().out


def test_operations_are_those_of_the_matrices_and_of_attention():
    linear = 440_401_920 + 151936 * 1024
    assert train_step.operations("0.6b", [2048] * 8) == pytest.approx(
        6 * linear * 16384 + 6 * 28 * 2048 * 8 * 2048**2, rel=1e-9
    )


def test_a_model_that_fails_does_not_keep_the_others_from_being_measured(monkeypatch, capsys):
    monkeypatch.setattr(train_step, "measure", lambda name, *_: (_ for _ in ()).throw(MemoryError(name)))
    assert train_step.main(["--model", "0.6b", "4b"]) == 1
    err = capsys.readouterr().err
    assert "MemoryError: 0.6b" in err
    assert "MemoryError: 4b" in err
