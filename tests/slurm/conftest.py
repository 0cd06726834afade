"""The cluster that all tests of this folder share."""
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.slurm import cluster


@pytest.fixture(scope="session")
def slurm():
    """Environment in which sbatch and the others reach a real Slurm of four nodes with four fake devices each."""
    if reason := cluster.missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged is another user
    try:
        yield cluster.start(folder)
    finally:
        cluster.stop(folder)
        shutil.rmtree(folder)
