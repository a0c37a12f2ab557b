"""Every kind of process killed with -9 at every point of the loop: the table of docs/developer/reliability.md."""

import pytest

from tests.ci.register import register_cpu_ci
from tests.e2e import kill_matrix
from tests.fast.ray.conftest import TrainProcess, task

register_cpu_ci(est_time=1560, suite="stage-b-cpu", labels=["faults"])

__all__ = ["task"]


def test_the_table_names_every_kind_of_process_at_five_points():
    cells = list(kill_matrix.cells())
    assert {cell.victim for cell in cells} == set(kill_matrix.COMMAND_LINES)
    assert len(cells) == 5 * len(kill_matrix.COMMAND_LINES)


@pytest.mark.slow
@pytest.mark.parametrize("cell", kill_matrix.cells(), ids=str)
def test_a_process_killed_at_a_point_of_the_loop_ends_as_the_table_says(cell, task, tmp_path):
    run_dir = tmp_path / "run"
    train = TrainProcess(*kill_matrix.flags_of_run(task, run_dir))
    kill_matrix.kill_in_phase(train, run_dir, cell)
    # Ray's own agents notice the death of a driver late.
    kill_matrix.check(cell, train.end(gone_within_s=90 if cell.victim == "driver" else 5), run_dir)
    if cell.outcome != "goes on":
        kill_matrix.check_resume(task, run_dir, tmp_path / "resumed")
