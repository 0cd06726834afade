"""Results under the names of BIDS derivatives (finding E6), as the commands write them."""
import json
import shutil

import numpy as np
import pytest

import OM_register
import OM_study
from Dataloader.nifti import read_field, read_label, write_volume
from Dataloader.synthetic import make_subject
from Inference.bids import split_name, targets, write_bids
from Runtime.errors import InputError

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture
def study(tmp_path):
    """Two labelled scans of a BIDS study, and a fixed volume F."""
    for number, name in enumerate(("F", "study/sub-01/ses-1/anat/sub-01_ses-1_T1w", "study/sub-02/anat/sub-02_T1w")):
        subject, path = make_subject(number, (14, 16, 18)), tmp_path / f"{name}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_volume(path, subject["image"], np.eye(4))
        write_volume(path.with_name(path.name.replace("T1w", "dseg").replace("F.", "F_dseg.")), subject["label"],
                     np.eye(4))
    return tmp_path


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_registered_list(study):
    out = study / "out"
    assert OM_register.main(["--fixed", str(study / "F.nii.gz"), "--moving", str(study / "study"), "--affine", "none",
                             "--refine", "2", "--also", "bids", "h5", "--no-picture", "--device", "cpu", "--out",
                             str(out)]) == 0
    first, second = "sub-01/ses-1/anat/sub-01_ses-1", "sub-02/anat/sub-02"
    ends = ("from-T1w_to-F_mode-image_xfm.h5", "from-T1w_to-F_mode-image_xfm.json",
            "from-T1w_to-F_mode-image_xfm.nii.gz", "space-F_T1w.json", "space-F_T1w.nii.gz", "space-F_dseg.json",
            "space-F_dseg.nii.gz")
    assert files(out / "bids") == sorted(["dataset_description.json", *(f"{name}_{end}" for name in (first, second)
                                                                        for end in ends)])
    about = json.loads((out / "bids/dataset_description.json").read_text())
    assert about["DatasetType"] == "derivative" and about["GeneratedBy"][0]["Name"] == "OmniMorph"
    sidecar = json.loads((out / f"bids/{second}_space-F_T1w.json").read_text())
    assert sidecar["SpatialReference"] == str(study / "F.nii.gz")
    assert sidecar["Sources"] == [str(study / "study/sub-02/anat/sub-02_T1w.nii.gz"), str(study / "F.nii.gz")]
    assert read_field(out / f"bids/{first}_{ends[2]}")[0].shape == (3, 14, 16, 18)
    assert read_label(out / f"bids/{first}_space-F_dseg.nii.gz")[0].any()


@pytest.mark.slow
def test_a_segmented_list(study):
    out = study / "out"
    words = ["segment", "--atlases", str(study / "study"), "--images", str(study / "study/sub-02"), "--affine", "rigid",
             "--device", "cpu", "--out", str(out)]
    assert OM_study.main([*words, "--bids"]) == 0
    assert files(out / "bids") == ["dataset_description.json", "sub-02/anat/sub-02_desc-omnimorph_dseg.json",
                                   "sub-02/anat/sub-02_desc-omnimorph_dseg.nii.gz"]
    assert OM_study.main(words) == 0 and files(out / "bids") == ["dataset_description.json"], "those of the last run"


@pytest.mark.slow
def test_an_aligned_series(study):
    path, out = study / "sub-01_ses-1_task-rest_space-T1w_desc-preproc_bold.nii.gz", study / "out"
    path.with_name(path.name.replace(".nii.gz", ".json")).write_text(
        '{"RepetitionTime": 2.5, "InstitutionName": "Klinik S\u00fcd"}', encoding="utf-16")
    frame = make_subject(0, (14, 16, 18))["image"]
    write_volume(path, np.stack([frame] * 2, -1), np.eye(4))
    words = ["motion", "--series", str(path), "--reference", "0", "--device", "cpu", "--out", str(out)]
    assert OM_study.main([*words, "--bids"]) == 0
    name = "sub-01/ses-1/func/sub-01_ses-1_task-rest_space-T1w_desc"
    ends = "aligned_bold.nii.gz", "motion_timeseries.tsv", "reference_boldref.nii.gz"
    assert files(out / "bids") == sorted(["dataset_description.json", *(f"{name}-{end}" for end in ends),
                                          *(f"{name}-{end.split('.')[0]}.json" for end in ends)])
    assert (out / f"bids/{name}-{ends[1]}").read_bytes() == (out / "motion.tsv").read_bytes()
    about = json.loads((out / f"bids/{name}-motion_timeseries.json").read_text())
    columns = (out / f"bids/{name}-motion_timeseries.tsv").read_text().splitlines()[0].split("\t")
    assert about.pop("Sources") == [str(path)] and list(about) == columns
    aligned = json.loads((out / f"bids/{name}-aligned_bold.json").read_text())
    assert aligned["RepetitionTime"] == 2.5 and aligned["InstitutionName"] == "Klinik S\u00fcd", "in any encoding"
    assert OM_study.main(words) == 0 and files(out / "bids") == ["dataset_description.json"], "those of the last run"


def test_names_that_are_no_bids_or_meet_are_refused_before_the_work(study, capsys):
    words = ["--moving", str(study / "F.nii.gz"), "--fixed", str(study / "study/sub-02/anat/sub-02_T1w.nii.gz"),
             "--also", "bids", "--out", str(study / "out")]
    assert OM_register.main(words) == 43 and not (study / "out").exists()
    assert "F.nii.gz: it has no BIDS name, so its derivatives cannot have one" in capsys.readouterr().err
    moving = study / "study/sub-02/anat/sub-02_T1w.nii.gz"
    (study / "pairs.csv").write_text(f"name,fixed,moving\na,F.nii.gz,{moving}\nb,F.nii.gz,{moving}\n")
    assert OM_register.main(["--pairs", str(study / "pairs.csv"), "--also", "bids", "--out", str(study / "out")]) == 43
    assert "a and b would both be sub-02_space-F_T1w.nii.gz" in capsys.readouterr().err


@pytest.mark.slow
def test_files_of_an_earlier_run_that_this_one_lacks_are_removed(study):
    words = ["--fixed", str(study / "F.nii.gz"), "--moving", str(study / "study/sub-02/anat/sub-02_T1w.nii.gz"),
             "--affine", "none", "--refine", "1", "--no-picture", "--device", "cpu", "--out", str(study / "out")]
    assert OM_register.main([*words, "--inverse", "--also", "bids", "h5"]) == 0
    before = files(study / "out/bids")
    assert OM_register.main([*words, "--also", "bids"]) == 0
    gone = [f"sub-02/anat/sub-02_{end}" for end in (
        "from-F_to-T1w_mode-image_xfm.h5", "from-F_to-T1w_mode-image_xfm.json", "from-F_to-T1w_mode-image_xfm.nii.gz",
        "from-T1w_to-F_mode-image_xfm.h5")]
    assert set(gone) < set(before) and files(study / "out/bids") == sorted(set(before) - set(gone))
    theirs = study / "out/bids/sub-02/anat/sub-02_desc-mine_T1w.json"
    theirs.write_text('{"Sources": ["bids:raw:sub-02/anat/sub-02_T1w.nii.gz"]}')
    assert OM_register.main([*words, "--refine", "2"]) == 0
    assert files(study / "out/bids") == ["dataset_description.json", str(theirs.relative_to(study / "out/bids"))]


def test_copies_of_what_a_later_run_has_not_are_removed(tmp_path):
    rows = []
    for name in ("sub-01_T1w", "sub-02_T1w"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "label.nii.gz").write_text(name)
        rows.append({"name": name, "image": f"/data/{name}.nii.gz", "folder": name})
    for kept in (rows, rows[:1]):
        (tmp_path / "results.json").write_text(json.dumps({"pairs": kept}))
        copies = sorted(path.name for path in write_bids(tmp_path).rglob("*.nii.gz"))
        assert copies == [f"{row['name'][:6]}_desc-omnimorph_dseg.nii.gz" for row in kept]


def test_a_copy_that_this_run_would_replace_is_no_input(study, capsys):
    words = ["--fixed", str(study / "F.nii.gz"), "--affine", "none", "--refine", "1", "--no-picture", "--device", "cpu",
             "--out", str(study / "out"), "--moving"]
    assert OM_register.main([*words, str(study / "study/sub-02/anat/sub-02_T1w.nii.gz"), "--also", "bids"]) == 0
    copy = study / "out/bids/sub-02/anat/sub-02_space-F_T1w.nii.gz"
    kept = copy.read_bytes()
    for more in ([], ["--also", "bids"]):
        assert OM_register.main([*words, str(copy), *more]) == 43 and copy.read_bytes() == kept
        assert f"{copy}: a result with the same name would overwrite this input" in capsys.readouterr().err


def test_two_scans_that_share_a_segmentation_are_refused_before_the_work(study, capsys):
    scans = [study / f"study/sub-02/anat/sub-02_{suffix}.nii.gz" for suffix in ("T1w", "T2w")]
    shutil.copy(*scans)
    assert OM_register.main(["--fixed", str(study / "F.nii.gz"), "--moving", *map(str, scans), "--also", "bids",
                             "--out", str(study / "out")]) == 43 and not (study / "out").exists()
    assert "sub-02_T2w_to_F would both be sub-02_space-F_dseg.nii.gz" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["segment --atlases {0}/study --images {0}/F.nii.gz",
                                   "template --images {0}/study {0}/F.nii.gz", "motion --series {0}/F.nii.gz"])
def test_studies_refuse_names_that_are_no_bids_before_the_work(study, words, capsys):
    assert OM_study.main([*words.format(study).split(), "--bids", "--out", str(study / "out")]) == 43
    assert "F.nii.gz: it has no BIDS name" in capsys.readouterr().err and not (study / "out").exists()


@pytest.mark.parametrize("words", [
    "register --fixed {0}/F.nii.gz --moving {0}/study --also bids", "motion --series {0}/sub-02_bold.nii.gz --bids",
    "segment --atlases {0}/study --images {0}/study/sub-02 --bids", "template --images {0}/study --bids"])
def test_a_data_set_of_others_in_the_way_is_refused_before_the_work(study, words, capsys):
    program, *words = words.format(study).split()
    path = study / "out/bids/dataset_description.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"Name": "raw", "GeneratedBy": [{"Name": "dcm2bids"}]}')
    write_volume(study / "sub-02_bold.nii.gz", np.stack([make_subject(0, (14, 16, 18))["image"]] * 2, -1), np.eye(4))
    main = OM_register.main if program == "register" else lambda words: OM_study.main([program, *words])
    assert main([*words, "--device", "cpu", "--out", str(study / "out")]) == 43
    assert f"{path.parent}: it is not of an earlier run" in capsys.readouterr().err
    assert files(study / "out") == ["bids/dataset_description.json"] and "dcm2bids" in path.read_text()


def test_entities_of_a_derivative_are_not_those_of_its_results():
    path = "/x/sub-1_acq-a_space-MNI_desc-preproc_T2w.nii.gz"
    assert split_name(path) == ("sub-1_acq-a", "T2w")
    label, = targets({"image": path}).values()
    assert label.name == "sub-1_acq-a_space-MNI_desc-omnimorph_dseg.nii.gz", "a segmentation stays in its space"
    for name in ("T1w", "sub-1", "sub-_T1w", "sub-1_run_T1w"):
        with pytest.raises(InputError, match="no BIDS name"):
            split_name(f"{name}.nii.gz")
