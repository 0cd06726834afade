"""Four faults in one real launch; `make faults` runs each by itself, and random kills."""
import errno
import json
import os
import signal
from pathlib import Path

import pytest

from tests import launching, warm
from tests.faults.common import SCALED, ends, final_weights, new_folder, rank_pid, steps_done
from tests.faults.run_matrix import kernel_takes_memory, matrix
from tests.launching import until
from tests.tiny import QUICK, ROOT, arguments, launcher_environment

SETTINGS = {**{key.replace(".", "__"): value for key, value in SCALED.items()}, **QUICK, "run__epochs": 2}
STEPS = 24


@pytest.mark.slow
def test_faults_are_found_named_and_survived(tmp_path):
    """One launch: a killed rank, a stopped rank and a wrong branch end an attempt each; then a file is damaged."""
    undisturbed, folder = new_folder(tmp_path, "undisturbed"), new_folder(tmp_path, "faults")
    warm.train(2, undisturbed / "log.txt", arguments(undisturbed, **SETTINGS))
    at = {"rank": 1, "phase": "forward", "mode": "diffusion"}
    faults = [{"id": "stop", "do": "stop", "attempt": 1, "step": 9, **at},
              {"id": "branch", "do": "other_branch", "attempt": 2, "step": 13, **at},
              {"id": "damage", "do": "truncate", "attempt": 3, "rank": 0, "phase": "restore"}]
    environment = launcher_environment(2, FAULTS=json.dumps(faults), FAULT_DIR=str(folder),
                                       PYTHONPATH=str(ROOT / "tests/faults/inject"))
    command = ["bash", ROOT / "bash_train_multi_nodes.sh", *arguments(folder, **SETTINGS)]
    with open(folder / "log.txt", "w") as log, launching.running(command, env=environment, stdout=log) as process:
        until(lambda: steps_done(folder) >= 5)
        os.kill(rank_pid(folder, 1), signal.SIGKILL)
        assert process.wait(240) == 0, (folder / "log.txt").read_text()
    found = [(end["verdict"]["cause"], end["verdict"]["rank"]) for end in ends(folder).values()]
    assert found == [("killed", 1), ("frozen", 1), ("out of step", 1), ("done", None)]
    assert [end["verdict"]["phase"] for end in ends(folder).values()][1:3] == ["forward", "agree"]
    said = [line for line in (folder / "log.txt").read_text().splitlines() if "is skipped" in line]
    assert len(said) == 1 and "truncated" in said[0]
    assert steps_done(folder) == STEPS - 1
    assert final_weights(folder, 2) == final_weights(undisturbed, 2) is not None


def test_the_matrix_has_all_rows():
    titles = [title for title, *_ in matrix()]
    assert len(set(titles)) == len(titles) >= 49 and sum("zero1" in title for title in titles) >= 6


def test_a_row_that_needs_a_control_group_is_left_out_where_sys_is_read_only(tmp_path, monkeypatch):
    def refuse(path, *more, **others):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="Read-only"):  # what main() leaves out by name
        kernel_takes_memory(tmp_path, 2, None)
