"""One default: the command without options and `omnimorph.register` of whatever holds the two volumes are one call."""
import concurrent.futures
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

import OM_register
import omnimorph
from Dataloader.nifti import read_field, write_field, write_volume
from Dataloader.synthetic import make_subject
from Dataloader.volume import Volume, further_sources, read_source
from tests.test_nifti import OBLIQUE
from tests.tiny import ROOT

SHAPES = {"F": (14, 16, 12), "M": (15, 13, 14)}
GOOD = np.random.default_rng(0).random((8, 9, 10))


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


@pytest.mark.slow
def test_the_command_without_options_gives_the_same_field(place, tmp_path, no_figures):
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
        source = tuple(torch.tensor(array, requires_grad=True) for array in (image.get_fdata(), image.affine))
    volume = read_source(source, "fixed")
    assert digest(volume.array) == digest(place[1].fixed.array)
    np.testing.assert_allclose(volume.affine, image.affine, atol=0 if kind != "SimpleITK" else 1e-4)


@pytest.mark.parametrize("kind", [lambda array: (array, np.eye(4)), lambda array: (torch.from_numpy(array), np.eye(4)),
                                  lambda array: nibabel.Nifti1Image(array, np.eye(4))])
def test_a_volume_stays_when_the_memory_it_came_from_gets_the_next_one(kind):
    array = GOOD.astype(np.float32)
    volume = read_source(kind(array), "fixed")
    array[:] = 0
    assert np.array_equal(volume.array, GOOD.astype(np.float32))


def test_an_array_alone_says_that_its_spacing_is_unknown(place):
    volumes = [make_subject(seed, SHAPES["F"])["image"] for seed in (0, 1)]
    with pytest.warns(UserWarning, match="moving: an array alone has no spacing, so voxels of 1 mm"):
        found = omnimorph.register(*volumes, affine=False, refine=1)
    assert np.array_equal(found.fixed.affine, np.eye(4)) and found.field.shape == (3, *SHAPES["F"])


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
    for device, words in (("cuda", "sees no such device"), (torch.device("cuda"), "sees none"), (None, "not None.")):
        with pytest.raises(omnimorph.InputError, match=f"device: .*{words}") as error:
            omnimorph.register((GOOD, np.eye(4)), (GOOD, np.eye(4)), device=device)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("words, code, said", [
    (["OM_register.py", "--version"], 0, "omnimorph 1."), (["-m", "omnimorph", "--version"], 0, "omnimorph 1."),
    (["-m", "omnimorph", "register", "--help"], 0, "--model FILE"),
    (["OM_register.py", "--fixed", "none.nii", "--moving", "none.nii", "--out", "x"], 43, "none.nii: no such file"),
    (["OM_register.py", "--fixd", "a.nii"], 43, "error: the following arguments are required: --out; see "),
    (["OM_register.py", "--fixd", "a.nii", "--out", "x"], 43, "error: unrecognized arguments: --fixd a.nii; see "),
    (["OM_export.py", "--help"], 0, "--licence TEXT"),
    (["OM_export.py", "--model", "none.pth"], 43, "error: none.pth: no such model"),
    (["OM_evaluate.py", "--help"], 0, "--pairs LIST"),
    (["OM_evaluate.py", "--field", "none.nii", "--out", "x"], 43, "error: none.nii: no such file"),
    (["OM_evaluate.py", "--out", "x"], 43, "error: give either --pairs or the files of one pair")])
def test_what_needs_no_torch_is_told_at_once(words, code, said):
    done = subprocess.run([sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr and "Traceback" not in done.stderr
    imported = set(re.findall(r"^import time: .*\| +(\w+)$", done.stderr, re.M))
    assert "Runtime" in imported and not imported & {"torch", "scipy", "matplotlib"}


# ---------------------------------------------------------------------------------------------------------------------
# Within a program of one's own
# ---------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small():
    """Two arrays, a label of the first, and how the program calls `register`."""
    fixed, moving = (make_subject(seed, SHAPES["F"]) for seed in (0, 1))
    label = (fixed["image"] > fixed["image"].mean()).astype(np.uint8)

    def call(**more):
        return omnimorph.register((fixed["image"], np.eye(4)), (moving["image"], np.eye(4)),
                                  **{"affine": "rigid", "refine": 2, **more})
    return fixed["image"], label, call


@pytest.mark.slow
def test_settings_of_the_program_change_nothing_and_stay(small):
    """Coarse products moved coordinates by a fifth of a voxel, and under autocast similarities were wrong by 0.1."""
    image, label, call = small
    shift = np.eye(4)
    shift[:3, 3] = 3, -2, 5
    large = np.random.default_rng(0).integers(0, 9, (300, 24, 24))
    field = np.zeros((3, *large.shape), np.float32)
    wanted = call(), omnimorph.augment(image, label, start=20), omnimorph.apply_field(large, np.eye(4), field, shift, 0)
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            found = (call(), omnimorph.augment(image, label, start=20),
                     omnimorph.apply_field(large, np.eye(4), field, shift, 0))
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium" and torch.get_default_dtype() == torch.float64
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_default_dtype(before[1])
    omnimorph.load_model("universal")
    assert torch.backends.cudnn.allow_tf32 == before[2]
    assert digest(found[0].field) == digest(wanted[0].field) and found[0].similarity == wanted[0].similarity
    assert all(digest(one) == digest(other) for one, other in zip(found[1], wanted[1]))
    assert np.array_equal(found[2], wanted[2]) and np.array_equal(wanted[2][:297, 2:, :19], large[3:, :22, 5:])


@pytest.mark.slow
def test_calls_from_several_threads_leave_the_number_of_threads(small):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            fields = {digest(found.field) for found in pool.map(lambda _: small[2](affine=False), range(6))}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2, "in a thread that starts afterwards"
        assert len(fields) == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(tmp_path):
    """torch's pool of threads does not exist there. 52^3 voxels take two threads, and so does a large weight."""
    program = """
import os, signal, sys, numpy, torch, omnimorph
torch.set_num_threads(2)
pair = [(numpy.random.default_rng(seed).random((52, 52, 52)), numpy.eye(4)) for seed in range(2)]
torch.ones(2 ** 22).exp()
child = os.fork()
if not child:
    signal.alarm(60)
    omnimorph.register(*pair, affine=False, refine=1).save(sys.argv[1])
    omnimorph.load_model("universal")
    omnimorph.RandDeformationd("image", prob=1.0)({"image": torch.from_numpy(pair[0][0])[None]})
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "found"], cwd=ROOT, capture_output=True, text=True,
                          timeout=200, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_all_that_computes_does_so_whatever_the_program_has_set(small, tmp_path):
    """The meta device stands in for a GPU: tensors without a device would go there."""
    image, label, call = small
    wanted, net = call(affine=False, refine=1), omnimorph.load_model("universal")[0]
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        with torch.inference_mode():
            found = call(affine=False, refine=1)
            found.save(tmp_path)
            omnimorph.augment(image, label, start=20)
            omnimorph.RandDeformationd("image", prob=1.0)({"image": torch.from_numpy(image)[None]})
            loaded, _ = omnimorph.load_model("universal")
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert torch.get_default_device().type == "meta" and torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert digest(found.field) == digest(wanted.field)
    pairs = zip(loaded.parameters(), net.parameters(), strict=True)
    assert all(torch.equal(one, other) and not one.is_inference() for one, other in pairs)


@pytest.mark.parametrize("more, words", [
    ({"config": {"refine.wieght": 3.0}}, "config: unknown key refine.wieght; did you mean refine.weight"),
    ({"config": {"refine.weight": "abc"}}, "config: refine.weight must be a number, not 'abc'"),
    ({"config": "config_om.yaml"}, "config: give a flat dict of keys"),
    ({"refine": -5}, "refine must be True, False or a number of steps, not -5"), ({"refine": None}, "refine must be"),
    ({"affine": "none"}, "affine must be True, rigid, affine or False, not 'none'"),
    ({"start": Path("a.mat")}, "or Result.known, not a PosixPath|or Result.known, not a WindowsPath"),
    ({"fixed_mask": np.ones((3, 4, 5))}, "the mask of fixed: the mask is on another grid"),
    ({"fixed_mask": np.eye(14, 16)[..., None] * (np.arange(12) == 40)}, "nowhere above 0"),
    ({"fixed_channels": "F_T2.nii.gz"}, "F_T2.nii.gz: no such file"),
    ({"fixed_channels": [np.ma.masked_less(GOOD, 0.5)]}, "channel 2 of fixed: the mask of a masked array")])
def test_an_option_that_cannot_be_is_one_sentence(small, more, words):
    with pytest.raises(omnimorph.InputError, match=words):
        small[2](**more)


@pytest.mark.parametrize("more, words", [
    ({"affine": np.eye(3)}, "image: the affine .* is not an invertible 4x4"), ({"labels": "linear"}, "labels must be"),
    ({"label": nibabel.Nifti1Image(GOOD, np.eye(4))}, "label: Nifti1Image is not a volume; give an array"),
    ({"start": (1, 2, 3)}, "start .1, 2, 3.: the time"), ({"start": np.inf}, "start inf: the time"),
    ({"mask": [0, 1]}, "mask: list is not a volume; give an array"),
    ({"seed": None}, "seed and draw must be whole numbers"),
    ({"cfg": {"diffusion.v_scal": 1}}, "config: unknown key diffusion.v_scal")])
def test_a_copy_that_cannot_be_is_one_sentence(small, more, words):
    with pytest.raises(omnimorph.InputError, match=words):
        omnimorph.augment(small[0], **more)


def of_sitk(image):
    image = pytest.importorskip("SimpleITK").GetImageFromArray(image.T)
    image.SetDirection((-1, 0, 0, 0, -1, 0, 0, 0, 1))
    return image


@pytest.mark.parametrize("alone", [np.asarray, torch.from_numpy, of_sitk,
                                   lambda image: read_source((image, np.eye(4)), "x")])
def test_a_channel_alone_is_one_channel(small, alone):
    found, wanted = (small[2](affine=False, refine=1, fixed_channels=given, moving_channels=given)
                     for given in (alone(small[0]), [small[0]]))
    assert len(found.warped_channels) == 1 and digest(found.field) == digest(wanted.field)


@pytest.mark.parametrize("shape, given, count", [
    ((9, 8, 1), (2, 9, 8), 2), ((9, 8, 1), (9, 8), 1), ((9, 8, 7, 1), (9, 8, 7), 1), ((9, 8, 7), (9, 8, 7, 1), 1),
    ((9, 8, 7), (2, 9, 8, 7), 2), ((9, 8, 7), (1, 9, 8, 7), 1)])
def test_a_stack_of_channels_is_told_from_one(shape, given, count):
    """Trailing axes of length 1 do not count, in files and in arrays; also beside a Volume."""
    volume = np.zeros(shape, np.float32)
    sources = volume, (volume, np.eye(4)), nibabel.Nifti1Image(volume, np.eye(4)), Volume(volume, np.eye(4), "x")
    assert [len(further_sources(np.zeros(given), source)) for source in sources] == [count] * 4
    alone = (volume, np.eye(4))
    assert further_sources(alone, volume) == [alone]


@pytest.mark.slow
def test_a_mask_may_be_whatever_a_volume_may_be(small):
    image, label, call = small
    sources = [label, nibabel.Nifti1Image(label, np.eye(4)), (label, np.eye(4)), torch.from_numpy(label)]
    assert len({digest(call(fixed_mask=source, affine=False).field) for source in sources}) == 1
    stiff = call(config={"refine.weight": 4.0}, affine=False)
    assert digest(stiff.field) != digest(call(affine=False).field), "a part of a config is enough"
    brief = omnimorph.register((torch.from_numpy(image).bfloat16(), np.eye(4)), read_source((image, np.eye(4)), "x"),
                               affine=False, refine=1)
    assert len(repr(brief)) < 200 and brief != stiff and len({brief.fixed, brief.moving}) == 2


def test_an_undefined_voxel_stays_where_it_is():
    image = GOOD.copy()
    image[0, 0, 0] = np.nan
    warped = omnimorph.apply_field(image, np.eye(4), np.zeros((3, *image.shape), np.float32), np.eye(4))
    assert np.isnan(warped).sum() <= 8 and np.allclose(warped[2:], GOOD[2:], atol=1e-5)
    with pytest.raises(omnimorph.InputError, match="labels must be smooth or nearest, not 'Nearest'"):
        omnimorph.apply_label(np.ones((8, 9, 10), int), np.eye(4), np.zeros((3, 8, 9, 10)), np.eye(4), "Nearest")


@pytest.mark.slow
def test_what_an_earlier_save_wrote_of_another_registration_goes(small, tmp_path):
    image, moving = (small[0], np.eye(4)), (small[0][::-1], np.eye(4))
    options = {"affine": False, "refine": 0}
    found = [omnimorph.register(image, moving, **options, **more) for more in (
        {"fixed_channels": [image], "moving_channels": [moving]}, {})]
    for number in (0, 1, 0):
        found[number].save(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert ("fixed_channel_2.nii.gz" in names) == ("moving_channel_2.nii.gz" in names) == (number == 0)
        assert "fixed.nii.gz" in names


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_the_brightest_whole_number_is_saved_as_it_is(small, tmp_path, dtype):
    image = (small[0] * 2.0 ** 30).astype(dtype)
    image[image == image.max()] = np.iinfo(dtype).max
    omnimorph.register((image, np.eye(4)), (small[0], np.eye(4)), affine=False, refine=0).save(tmp_path)
    saved = np.asarray(nibabel.load(tmp_path / "fixed.nii.gz").dataobj)
    assert saved.min() >= 0 and saved.max() == pytest.approx(np.iinfo(dtype).max, rel=1e-6)


@pytest.mark.slow
def test_saving_replaces_no_file_of_the_user(small, tmp_path, monkeypatch):
    image = small[0]
    nibabel.save(nibabel.Nifti1Image(image, np.eye(4)), tmp_path / "fixed.nii.gz")
    content = (tmp_path / "fixed.nii.gz").read_bytes()
    moving = image[::-1], np.eye(4)
    found = omnimorph.register(nibabel.load(tmp_path / "fixed.nii.gz"), moving, affine=False, refine=1)
    with pytest.raises(omnimorph.InputError, match="fixed.nii.gz: it is not of an earlier run"):
        found.save(tmp_path)
    assert (tmp_path / "fixed.nii.gz").read_bytes() == content
    for _ in range(2):
        found.save(tmp_path / "own")  # what an earlier save wrote is replaced
    monkeypatch.chdir(tmp_path)
    found = omnimorph.register("fixed.nii.gz", moving, affine=False, refine=1)
    monkeypatch.chdir("/")
    found.save(tmp_path / "other")
    assert (tmp_path / "other/field.nii.gz").is_file()
    nibabel.save(nibabel.Nifti1Image(1 - image, np.eye(4)), tmp_path / "fixed.nii.gz")
    for _ in range(2):
        with pytest.raises(omnimorph.InputError, match="fixed.nii.gz: it has changed or is gone since it was"):
            found.save(tmp_path / "late")
        (tmp_path / "fixed.nii.gz").unlink(missing_ok=True)
    assert not (tmp_path / "late").exists()
