"""One default: the command without options and `omnimorph.register` of whatever holds the two volumes are one call."""
import hashlib
import re
import subprocess
import sys

import nibabel
import numpy as np
import pytest
import torch

import OM_register
import omnimorph
from Dataloader.nifti import read_field, write_field, write_volume
from Dataloader.synthetic import make_subject
from Dataloader.volume import read_source
from tests.test_nifti import OBLIQUE
from tests.tiny import ROOT

SHAPES = {"F": (14, 16, 12), "M": (15, 13, 14)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two volumes on two grids, and what the function makes of them by their paths."""
    folder = tmp_path_factory.mktemp("default")
    for seed, (name, shape) in enumerate(SHAPES.items()):
        affine = OBLIQUE.copy()
        affine[:3, 3] = -affine[:3, :3] @ (np.subtract(shape, 1) / 2) + seed
        image = np.rint(1000 * make_subject(seed, shape)["image"]).astype(np.int16)
        write_volume(folder / f"{name}.nii.gz", image, affine)
    return folder, omnimorph.register(folder / "F.nii.gz", folder / "M.nii.gz")


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_the_command_without_options_gives_the_same_field(place, tmp_path):
    folder, found = place
    assert np.abs(found.field).max() > 0.5 and found.seconds["affine"] > 0 and found.seconds["refine"] > 0
    assert found.warnings == []
    assert OM_register.main(["--fixed", str(folder / "F.nii.gz"), "--moving", str(folder / "M.nii.gz"), "--no-picture",
                             "--out", str(tmp_path / "out")]) == 0
    write_field(tmp_path / "ours.nii.gz", found.field, found.fixed.affine, found.fixed.header)
    for name in ("ours", "out/field"):
        assert read_field(tmp_path / f"{name}.nii.gz")[0].shape == (3, *SHAPES["F"])
    assert (tmp_path / "ours.nii.gz").read_bytes() == (tmp_path / "out/field.nii.gz").read_bytes()


def test_a_small_pair_has_the_same_field_on_any_number_of_cores():
    before = torch.get_num_threads()
    volumes = [(make_subject(seed, (44, 42, 34))["image"], np.eye(4)) for seed in range(2)]
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(digest(omnimorph.register(*volumes, affine=False, refine=12).field))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["text", "nibabel", "SimpleITK", "array and affine", "tensor with a gradient"])
def test_whatever_holds_a_volume(place, kind):
    path = place[0] / "F.nii.gz"
    image, source = nibabel.load(path), str(path)
    if kind == "nibabel":
        source = image
    elif kind == "SimpleITK":
        source = pytest.importorskip("SimpleITK").ReadImage(source)
    elif kind == "array and affine":
        source = image.get_fdata(), image.affine
    elif kind == "tensor with a gradient":
        source = torch.tensor(image.get_fdata(), requires_grad=True), image.affine.tolist()
    volume = read_source(source, "fixed")
    assert digest(volume.array) == digest(place[1].fixed.array)
    np.testing.assert_allclose(volume.affine, image.affine, atol=0 if kind != "SimpleITK" else 1e-4)


def test_an_array_alone_says_that_its_spacing_is_unknown(place):
    volumes = [make_subject(seed, SHAPES["F"])["image"] for seed in (0, 1)]
    with pytest.warns(UserWarning, match="moving: an array alone has no spacing, so voxels of 1 mm"):
        found = omnimorph.register(*volumes, affine=False, refine=1)
    assert np.array_equal(found.fixed.affine, np.eye(4)) and found.field.shape == (3, *SHAPES["F"])


GOOD = np.random.default_rng(0).random((8, 9, 10))


@pytest.mark.parametrize("source, words", [
    (None, "moving: NoneType is not a volume; give a path, a nibabel or SimpleITK image, an array"),
    ((GOOD, nibabel.Nifti1Header()), "moving: its affine is a Nifti1Header"),
    ((GOOD, GOOD), "moving: the affine of shape .8, 9, 10. is not an invertible 4x4 matrix"),
    ((GOOD, np.eye(4), 1), "moving: 3 values instead of an array and its affine"),
    ((GOOD.astype(complex), np.eye(4)), "moving: each voxel must be one real number, but the type is complex128"),
    ("nowhere.nii.gz", "nowhere.nii.gz: no such file"),
    (nibabel.Nifti1Image(GOOD[..., None, None] * np.ones(2), np.eye(4)), "moving: shape .8, 9, 10, 1, 2. is neither")])
def test_what_holds_no_volume_is_one_sentence(source, words):
    with pytest.raises(omnimorph.InputError, match=words) as error:
        omnimorph.register((GOOD, np.eye(4)), source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_there_is_one_sentence():
    with pytest.raises(omnimorph.InputError, match="cuda is requested, but torch .* sees no such device") as error:
        omnimorph.register((GOOD, np.eye(4)), (GOOD, np.eye(4)), device="cuda")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words, code, said", [
    (["OM_register.py", "--version"], 0, "omnimorph 1."), (["-m", "omnimorph", "--version"], 0, "omnimorph 1."),
    (["-m", "omnimorph", "register", "--help"], 0, "--model FILE"),
    (["OM_register.py", "--fixed", "none.nii", "--moving", "none.nii", "--out", "x"], 43, "none.nii: no such file"),
    (["OM_register.py", "--fixd", "a.nii"], 43, "error: the following arguments are required: --out; see "),
    (["OM_register.py", "--fixd", "a.nii", "--out", "x"], 43, "error: unrecognized arguments: --fixd a.nii; see ")])
def test_what_needs_no_torch_is_told_at_once(words, code, said):
    done = subprocess.run([sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr and "Traceback" not in done.stderr
    imported = set(re.findall(r"^import time: .*\| +(\w+)$", done.stderr, re.M))
    assert "Runtime" in imported and not imported & {"torch", "scipy", "matplotlib"}
