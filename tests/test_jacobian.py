"""Maps of change: a known growth from template to subject, and between two scans in both orders."""
import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from bench_change import change_percent, shrinking_field
from scipy import ndimage

import OM_study
from Dataloader.nifti import read_numbers, write_field, write_volume
from Dataloader.synthetic import make_subject
from Diffusion.fields import exponential, identity, jacobian_determinant
from Inference.labels import apply_field
from Inference.results import file_digests
from Study.common import volumes_of
from Study.jacobian import LOCAL, WHOLE, half_ways, log_determinant, percent

SIZE, AFFINE = (22, 24, 20), np.diag([1.5, 1.5, 1.5, 1.0])


def swelling(size, strength, width):
    """Displacement of a swelling around the middle, strength per voxel there: (3, *size)."""
    places = np.stack(np.meshgrid(*(np.arange(n) - (n - 1) / 2 for n in size), indexing="ij")).astype(np.float32)
    return strength * places * np.exp(-0.5 * (places ** 2).sum(0) / width ** 2)


def texture(seed, sigma):
    """Smooth noise of 0..1, by which every voxel can be followed, that fades to the border: (*SIZE) float32."""
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=SIZE), sigma)
    fading = np.minimum.reduce(np.meshgrid(*(np.sin(np.linspace(0, np.pi, n)) for n in SIZE), indexing="ij"))
    return ((noise - noise.min()) / np.ptp(noise) * np.clip(2 * fading - 0.3, 0, 1)).astype(np.float32)


def run(*words):
    return OM_study.main(["jacobian", *map(str, words)])


def table(path):
    head, *lines = path.read_text().splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"))) for line in lines]


def list_fields(folder):
    """List the fields of the results in a folder as they are now."""
    content = json.loads((folder / "results.json").read_text())
    for row in content["pairs"]:
        row["files"] = file_digests([folder / row["folder"] / "field.nii.gz"], folder)
    (folder / "results.json").write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path):
    """Results as OM_register.py writes them, of two fields that are known: one grows by 3 %, one swells besides."""
    subject = make_subject(0, SIZE)
    write_volume(tmp_path / "fixed.nii.gz", subject["image"], AFFINE)
    label = np.zeros(SIZE, np.uint8)
    label[9:13, 10:14, 8:12] = 5
    write_volume(tmp_path / "label.nii.gz", label, AFFINE)
    grown = np.eye(4)
    grown[:3, :3] *= 1.01
    voxels = np.indices(SIZE, np.float32)
    fields = {"grown": 0.01 * voxels, "swollen": swelling(SIZE, 0.05, 4)}
    rows = []
    for name, field in fields.items():
        write_field(tmp_path / f"reg/{name}/field.nii.gz", field, AFFINE, nibabel.Nifti1Header())
        rows.append({"name": name, "folder": name, "fixed": str(tmp_path / "fixed.nii.gz"), "labels": {},
                     "matrix": (grown if name == "grown" else np.eye(4)).tolist()})
    (tmp_path / "reg/results.json").write_text(json.dumps({"pairs": rows, "failed": [], "complete": True}))
    list_fields(tmp_path / "reg")
    return tmp_path, fields


def test_noise_inside_of_a_label_changes_no_volume():
    """A velocity that ends before the label's border moves nothing across it, so both scans have the same volume."""
    inside = np.zeros(SIZE, bool)
    inside[2:20, 2:22, 2:18] = True
    shaking = np.random.default_rng(0).normal(size=(3, *SIZE)) * ndimage.binary_erosion(inside, iterations=3)
    velocity = torch.from_numpy(1.2 * ndimage.gaussian_filter(shaking, (0, 1, 1, 1), truncate=2)[None])
    before = log_determinant(exponential(-0.5 * velocity))
    change = log_determinant(exponential(0.5 * velocity)) - before
    assert percent(change[inside]) > 0.4
    assert percent(change[inside], np.exp(before[inside])) == pytest.approx(0, abs=1e-3)


def test_maps_and_table_of_known_fields(results, capsys):
    place, fields = results
    assert run("--results", place / "reg", "--labels", place / "label.nii.gz", "--out", place / "out") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["done"] == 2
    np.testing.assert_allclose(read_numbers(place / "out/grown" / WHOLE)[0], 3 * np.log(1.01), atol=1e-4)
    np.testing.assert_allclose(read_numbers(place / "out/grown" / LOCAL)[0], 0, atol=1e-4)
    exact = torch.log(jacobian_determinant(torch.from_numpy(fields["swollen"])[None]))[0].numpy()
    np.testing.assert_allclose(read_numbers(place / "out/swollen" / WHOLE)[0], exact, atol=1e-4)
    rows = {row["name"]: row for row in table(place / "out/jacobian.tsv")}
    assert float(rows["grown"]["change_percent"]) == pytest.approx(100 * (1.01 ** 3 - 1), abs=0.01)
    assert float(rows["grown"]["change_without_affine_percent"]) == pytest.approx(0, abs=0.01)
    inside = np.zeros(SIZE, bool)
    inside[9:13, 10:14, 8:12] = True
    assert float(rows["swollen"]["change_percent"]) == pytest.approx(percent(exact[inside]), abs=0.01)
    assert rows["swollen"]["voxels"] == "64"
    before = (place / "out/jacobian.tsv").read_text()
    content = json.loads((place / "reg/results.json").read_text())
    content["pairs"][0].update(verdict="doubtful", reason="its similarity is an outlier.")
    (place / "reg/results.json").write_text(json.dumps(content))
    assert run("--results", place / "reg", "--labels", place / "label.nii.gz", "--out", place / "out") == 0
    said = capsys.readouterr().err
    assert "keeping 2 of 2 subjects" in said and "grown: doubtful, its similarity is an outlier." in said
    assert (place / "out/jacobian.tsv").read_text() == before
    content["pairs"][0].update(verdict="failed")
    (place / "reg/results.json").write_text(json.dumps(content))
    assert run("--results", place / "reg", "--out", place / "out") == 43, "a subject that takes no part"
    assert f"remove folders such as {place}/out/grown." in capsys.readouterr().err
    content["pairs"][0].update(verdict="ok")
    (place / "reg/results.json").write_text(json.dumps(content))
    words = ("--smooth", "3", "--out", place / "smooth")
    assert run("--results", place / "reg", "--labels", place / "label.nii.gz", *words) == 0
    assert (place / "smooth/jacobian.tsv").read_text() == before, "the table is of the maps before the smoothing"
    smoothed = read_numbers(place / "smooth/swollen" / WHOLE)[0]
    assert 0 < smoothed.max() < exact.max() and smoothed.mean() == pytest.approx(exact.mean(), abs=1e-3)


def test_labels_of_a_registration_that_resampled_them_are_resampled_to_its_grid(results, capsys):
    place, _ = results
    fine = AFFINE @ np.diag([0.5, 0.5, 0.5, 1.0])
    fine[:3, 3] = -0.375  # the first voxel of the template is eight of the label map
    label = np.zeros([2 * n for n in SIZE], np.uint8)
    label[18:26, 20:28, 16:24] = 5
    write_volume(place / "fine.nii.gz", label, fine)
    content = json.loads((place / "reg/results.json").read_text())
    content["pairs"][1]["fixed_label"] = str(place / "fine.nii.gz")  # the first pair has no labels
    content["settings"] = {"config": {"model.dims": 3}, "labels": "nearest", "resample_labels": True}
    (place / "reg/results.json").write_text(json.dumps(content))
    assert run("--results", place / "reg", "--out", place / "out") == 0
    assert [(row["label"], row["voxels"]) for row in table(place / "out/jacobian.tsv")] == [("5", "64")] * 2
    capsys.readouterr()
    assert run("--results", place / "reg", "--labels", place / "fine.nii.gz", "--out", place / "given") == 43
    assert "fine.nii.gz: the label map is on another grid" in capsys.readouterr().err
    content["pairs"][0]["fixed_label"] = str(place / "label.nii.gz")
    (place / "reg/results.json").write_text(json.dumps(content))
    assert run("--results", place / "reg", "--out", place / "two") == 43
    assert f"label maps {place}/fine.nii.gz and {place}/label.nii.gz; choose one" in capsys.readouterr().err


def test_results_of_two_templates_and_of_an_early_version_are_refused(results, capsys):
    place, _ = results
    content = json.loads((place / "reg/results.json").read_text())
    content["pairs"][1]["fixed"] = str(place / "label.nii.gz")
    (place / "reg/results.json").write_text(json.dumps(content))
    assert run("--results", place / "reg", "--out", place / "out") == 43
    assert "maps are compared on one grid" in capsys.readouterr().err
    (place / "reg/results.json").write_text(json.dumps({**content, "complete": False}))
    assert run("--results", place / "reg", "--out", place / "out") == 43
    assert f"warning: {place}/reg: the registration did not finish; run it" in capsys.readouterr().err
    for version, said in (("1.2.0", "OmniMorph 1.2.0 did not store the affine part"), ("1.10.0", "on one grid")):
        content["pairs"][0]["start"], content["version"] = "field", version
        (place / "reg/results.json").write_text(json.dumps(content))
        assert run("--results", place / "reg", "--out", place / "out") == 43 and said in capsys.readouterr().err
    for words in ((), ("--results", place / "reg", "--scans", place / "nowhere.nii.gz")):
        assert run(*words, "--out", place / "out") == 43 and "give either --results" in capsys.readouterr().err
    for words in (("--affine", "affine"), ("--similarity", "mind")):
        assert run("--results", place / "reg", *words, "--out", place / "out") == 43
        assert "--affine and --similarity are for --scans" in capsys.readouterr().err
    assert run("--results", place / "none", "--out", place / "out") == 43
    assert "no results of a template" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"pairs": [{"name": 5, "folder": "."}]}', "[" * 100_000])
def test_what_no_registration_has_written_is_no_result(tmp_path, capsys, content):
    (tmp_path / "results.json").write_text(content)
    assert run("--results", tmp_path, "--out", tmp_path / "out") == 43
    assert "the folder has no results of a template" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../escaped", "/escaped", ".."])
def test_results_of_others_lead_no_map_out_of_its_folder(tmp_path, capsys, name):
    row = {"name": name, "fixed": "t.nii.gz", "matrix": np.eye(4).tolist(), "folder": "."}
    (tmp_path / "results.json").write_text(json.dumps({"version": "1.11.0", "pairs": [row], "complete": True}))
    assert run("--results", tmp_path, "--out", tmp_path / "out") == 43 and not (tmp_path / "out").exists()
    assert f"its results.json names the subject {name}, and no folder can have" in capsys.readouterr().err


@pytest.mark.parametrize("size, affine", [(SIZE, np.diag([2.0, 1.5, 1.5, 1.0])), (SIZE[::-1], AFFINE)])
def test_a_field_on_another_grid_than_the_template_is_left_out(results, size, affine):
    place, _ = results
    path = place / "reg/grown/field.nii.gz"
    write_field(path, np.zeros((3, *size), np.float32), affine)
    for reason in (f"{path} has changed since it was written: register the subject again.",
                   f"{path}: the field is on another grid"):
        assert run("--results", place / "reg", "--out", place / "out") == 0
        content = json.loads((place / "out/results.json").read_text())
        assert [row["name"] for row in content["pairs"]] == ["swollen"] and content["failed"][0]["name"] == "grown"
        assert content["failed"][0]["reason"].startswith(reason)
        list_fields(place / "reg")


@pytest.mark.parametrize("size, growth", [((24, 24, 24), 1.05), ((24, 26, 9), 1.1), ((48, 40), 1.1)])
def test_growth_of_all_that_is_seen_is_found_up_to_the_border(size, growth):
    """It was lost where half of the field leads out of the field of view: 42 % of the voxels were off by 0.01."""
    places = identity(size) - (torch.tensor(size) - 1).view(1, -1, *[1] * len(size)) / 2
    ahead, behind = half_ways((growth - 1) * places, (1 / growth - 1) * places)
    change = log_determinant(ahead) - log_determinant(behind)
    np.testing.assert_allclose(change, len(size) * np.log(growth), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("orders", [
    pytest.param([("one", "two")], id="one order"),
    pytest.param([("one", "two"), ("two", "one")], id="both orders")])
def test_two_scans_give_the_same_change_in_both_orders(tmp_path, orders):
    """The second scan's middle has shrunk by a known field; the sign turns with the order, within 0.01."""
    first = texture(0, 1.5)
    field = swelling(SIZE, 0.05, 6)  # of the second scan's grid: it shows what lies further out, so it has shrunk
    second = apply_field(first, AFFINE, field, AFFINE)
    noise = np.random.default_rng(0).normal(0, 0.01, (2, *SIZE)).astype(np.float32)
    write_volume(tmp_path / "one.nii.gz", first + noise[0], AFFINE)
    write_volume(tmp_path / "two.nii.gz", second + noise[1], AFFINE)
    maps = {}
    for order in orders:
        out = tmp_path / order[0]
        assert run("--scans", *(tmp_path / f"{name}.nii.gz" for name in order), "--out", out,
                   "--device", "cpu") == 0
        maps[order[1]] = read_numbers(out / order[1] / WHOLE)[0]
    assert len(orders) == 1 or np.abs(maps["two"] + maps["one"]).max() < 0.01
    middle = tuple(slice(n // 2 - 3, n // 2 + 3) for n in SIZE)
    exact = -percent(np.log(jacobian_determinant(torch.from_numpy(field)[None])[0].numpy()[middle]))
    assert percent(maps["two"][middle]) == pytest.approx(exact, rel=0.35) and exact < -8


@pytest.mark.slow
def test_scans_may_be_in_a_list_and_keep_its_order(tmp_path, monkeypatch, capsys):
    """Maps are kept when scans and results were moved, and from another working directory."""
    image, rng = make_subject(0, (16, 17), dims=2)["image"], np.random.default_rng(0)
    for name in ("early", "a_late"):
        write_volume(tmp_path / f"old/{name}.nii.gz", image + rng.normal(0, 0.02, image.shape).astype(np.float32),
                     AFFINE)
    (tmp_path / "old/scans.csv").write_text("image\nearly.nii.gz\na_late.nii.gz\n")
    monkeypatch.chdir(tmp_path / "old")
    assert run("--scans", "scans.csv", "--device", "cpu", "--out", "out") == 0
    assert "keeping" not in capsys.readouterr().err
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    assert run("--scans", "new/scans.csv", "--device", "cpu", "--out", "new/out") == 0
    assert "keeping 1 of 1 subjects" in capsys.readouterr().err
    assert [row["name"] for row in json.loads(Path("new/out/results.json").read_text())["pairs"]] == ["a_late"]


def test_segmentations_among_the_files_of_a_command_line_are_no_scans(tmp_path):
    """A shell's * names them too; they are the labels of their images."""
    names = [tmp_path / f"{name}.nii.gz" for name in ("b", "b_seg", "a", "a_dseg", "c")]
    for path in names:
        path.touch()
    found = volumes_of(names)
    assert [item["id"] for item in found] == ["b", "a", "c"]
    assert [item["label"] for item in found] == [names[1], names[3], None]


def test_the_benchmark_makes_the_change_that_it_says():
    places = np.stack(np.meshgrid(*(np.arange(n) - n / 2 for n in (50, 48, 46)), indexing="ij"))
    inside = np.hypot(np.hypot(places[0] / 10, places[1] / 8), places[2] / 7) < 1
    field = shrinking_field(inside, 1.0)
    assert change_percent(field, inside) == pytest.approx(-1.0, abs=1e-3)
    shown = ndimage.map_coordinates(inside.astype(float), np.indices(inside.shape) + field, order=1)
    assert 100 * (shown.sum() / inside.sum() - 1) == pytest.approx(-1.0, abs=0.1)  # counted in the second scan
