"""The cluster that all tests of this folder share."""
import pytest

from tests.slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Environment in which sbatch and the others reach a real Slurm of four nodes with four fake devices each."""
    if reason := cluster.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    try:
        yield cluster.start(folder)
    finally:
        cluster.stop(folder)
