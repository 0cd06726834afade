"""Some inputs of tests/fuzz.py, and that its judgement sees what it is there for."""
import json

import nibabel
import numpy as np
import pytest

from tests import fuzz, launching
from tests.tiny import ROOT


def test_changed_files_end_in_a_result_or_in_one_sentence():
    done = launching.run([fuzz.sys.executable, ROOT / "tests/fuzz.py", "--n", "60", "--seed", "3", "--workers", "1"],
                         timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {kind: found[kind] for kind in ("tracebacks", "hangs", "silent", "lost")} == {
        "tracebacks": 0, "hangs": 0, "silent": 0, "lost": 0}, done.stdout
    assert found["inputs"] == 60 and found["results"] > 10 and found["refused"] > 10
    assert done.returncode == 0


def test_a_changed_value_a_lost_file_and_a_traceback_are_seen(tmp_path):
    case = fuzz.Case("", "register", [], lambda: "other than given")
    (tmp_path / "stderr").write_text("")
    (tmp_path / "given").write_text("as it was")
    before = fuzz.digests(tmp_path)
    assert fuzz.judge(case, 0, tmp_path) == ("silent", "other than given")
    assert fuzz.judge(case, None, tmp_path)[0] == "hangs"
    assert fuzz.judge(case, -11, tmp_path)[0] == fuzz.judge(case, 1, tmp_path)[0] == "tracebacks"
    assert fuzz.judge(case, 43, tmp_path)[0] == "tracebacks"  # without a sentence
    (tmp_path / "stderr").write_text("error: config.yaml: data.batchsize is a whole number.\n")
    assert fuzz.judge(case, 43, tmp_path)[0] == ""
    assert fuzz.lost_files(before, case, tmp_path) == "stderr has changed"
    (tmp_path / "stderr").write_text("")
    (tmp_path / "given").unlink()
    assert fuzz.lost_files(before, case, tmp_path) == "given is gone"


@pytest.mark.parametrize("key, text, meaning", [
    ("data.batchsize", "3.0", [3]), ("data.batchsize", "3.5", []), ("data.batchsize", "1_000", []),
    ("optim.lr", "1e-3", [0.001]), ("run.amp", "off", ["off"]), ("optim.lr", "'7'", None),
    ("data.val_ids", "017", ["017"]), ("run.channels_last", "no", [False])])
def test_the_meaning_of_a_value_is_known(key, text, meaning):
    found = fuzz.meaning_of_value(key, text)
    assert (found and sorted(set(found))) == meaning


@pytest.mark.parametrize("code", ["sform", "qform"])
def test_the_meaning_of_a_header_is_that_of_the_standard(code):
    turn = np.array([[0.8, -0.6, 0, 3], [0.6, 0.8, 0, -4], [0, 0, -2.0, 5], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), turn)
    image.set_sform(turn, 1 if code == "sform" else 0)
    image.set_qform(turn, 1)
    image.header.set_slope_inter(0.5, 2)
    array, affine = fuzz.meaning_of_nifti(image.to_bytes())
    assert np.allclose(affine, turn, atol=1e-5)
    assert np.allclose(array, nibabel.Nifti1Image.from_bytes(image.to_bytes()).get_fdata())
