"""The study of docs/study.md, its commands as they are written, one after another, on a folder of small volumes."""
import os
import re
import sys

import numpy as np
import pytest

from Dataloader.nifti import write_volume
from Dataloader.synthetic import make_subject
from tests import launching
from tests.tiny import ROOT

AFFINE, SIZE = np.diag([2.0, 2.0, 2.0, 1.0]), (18, 20, 16)
PROMISED = {"segment": ["segment.html", "labels.tsv", "*/label.nii.gz", "*/doubt.nii.gz"],
            "template": ["template.html", "template.nii.gz", "template_label.nii.gz", "subjects/*/field.nii.gz",
                         "subjects.tsv", "convergence.json"],
            "jacobian": ["jacobian.html", "*/log_jacobian.nii.gz", "*/log_jacobian_without_affine.nii.gz"],
            "qc": ["qc.html", "qc.tsv"], "motion": ["motion.html", "motion.tsv", "aligned.nii.gz"],
            "plan": ["plan.html", "config.yaml"]}


def test_every_command_leads_to_what_the_page_promises(tmp_path):
    for seed in range(6):
        subject = make_subject(seed, SIZE)
        where = tmp_path / "Data" / ("atlases" if seed < 2 else "new")
        write_volume(where / f"imagesTr/s_{seed}.nii.gz", subject["image"], AFFINE)
        write_volume(where / f"labelsTr/s_{seed}.nii.gz", subject["label"].astype(np.uint8), AFFINE)
        write_volume(tmp_path / f"Data/brains/s_{seed}.nii.gz", subject["image"], AFFINE)
    images = [make_subject(seed, SIZE)["image"] for seed in (7, 8)]
    for name, image in zip("FM", images):
        write_volume(tmp_path / f"{name}.nii.gz", image, AFFINE)
    write_volume(tmp_path / "BOLD.nii.gz", np.stack([images[0], np.roll(images[0], 1, 0)], -1), AFFINE)
    lines = re.findall(r"^\.venv/bin/python OM_study\.py .*$", (ROOT / "docs/study.md").read_text(), re.M)
    assert len(lines) == 7 and {line.split()[2] for line in lines} == set(PROMISED)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for line in lines:
        words = line.split()
        done = launching.run([sys.executable, ROOT / words[1], *words[2:]], cwd=tmp_path, env=environment, timeout=900)
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{line}\n{done.stdout}\n{done.stderr}"
        for pattern in PROMISED[words[2]]:
            assert list((tmp_path / words[-1]).glob(pattern)), f"{line}: {pattern}"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
