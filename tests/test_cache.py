"""OM_prepare.py as it is used: real processes that are killed, disks that are full, files that are damaged."""
import contextlib
import csv
import errno
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

import OM_prepare
from Dataloader import cache, staging
from Dataloader.datalist import list_volumes, read_datalist
from Dataloader.dataset import as_float, epoch_batches, read_datasets
from Dataloader.prepare import on_grid
from Dataloader.synthetic import write_dataset
from Runtime.errors import DONE, STOP, InputError
from Runtime.global_batch import Split
from Runtime.launch import Ranks
from Runtime.memory import children
from Runtime.progress import Progress
from tests import launching
from tests.launching import until
from tests.tiny import ROOT, add_masks, arguments, config, make_data, run_prepare

COUNT, SIDE = 40, 20
LOCKS = {".lock", "lock.json", ".readers"}
SHARE = Split(samples=2, pairs=2, sample_batch=2, pair_batch=1, sample_batches=1, pair_batches=2)
OTHER = {"data.name": "other", "data.root": "elsewhere", "model.dims": 2, "data.img_size": "[16, 16, 20]",
         "data.spacing_mm": 1.5, "data.crop_above": 0.25, "data.percentiles": "[1.0, 99.0]",
         "data.window": "[-100, 300]", "data.dtype": "float16", "data.channels": 2}
SAME_DATA = """
import hashlib, multiprocessing, sys
from pathlib import Path
from Dataloader.dataset import as_float, epoch_batches, read_datasets
from Runtime.global_batch import Split
from Runtime.launch import Ranks
from Runtime.progress import Progress
from tests.tiny import config
SHARE = Split(samples=2, pairs=2, sample_batch=2, pair_batch=1, sample_batches=1, pair_batches=2)
if __name__ == "__main__":
    for place, workers in (("", 0), (sys.argv[2], 0), (sys.argv[2], 2)):
        cfg = config(Path(sys.argv[1]), data__cache=place, data__dtype="float32", data__in_memory="false",
                     data__num_workers=workers, run__logs=sys.argv[1], loss__dice=0.1, data__label_ids="0-3",
                     registration__masks=True)
        dataset, _, listed = read_datasets(cfg)
        total, pids = hashlib.sha256(), []
        for epoch in range(2):
            progress = Progress(epoch=epoch)
            for step in epoch_batches(cfg, dataset, listed, progress, SHARE, Ranks()):
                for images, positions, subjects, maps in step[0] + step[1]:
                    total.update(as_float(images).numpy().tobytes() + repr((positions, subjects)).encode())
                    for kind in sorted(maps or {}):
                        total.update(kind.encode() + maps[kind].numpy().tobytes())
            pids.append(sorted(worker.pid for worker in multiprocessing.active_children()))
        print(bool(place), workers, total.hexdigest(), len(pids[0]), pids[0] == pids[1], flush=True)
"""
EVERYBODY = {"data__train_ids": "", "data__val_ids": "", "data__val_fraction": 0, "data__expect_samples": 0}
FORK = multiprocessing.get_context("fork")


# ---------------------------------------------------------------------------------------------------------------------
# What the tests are made of
# ---------------------------------------------------------------------------------------------------------------------

def write_raw(path, array):
    """A NIfTI file of 1 mm voxels, quickly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = (array.shape, array.dtype)
    if key not in HEADS:
        image = nibabel.Nifti1Image(array, np.eye(4))
        image.header["cal_min"], image.header["cal_max"] = 100, 1000
        HEADS[key] = image.to_bytes()[:352]
    path.write_bytes(HEADS[key] + array.tobytes(order="F"))


HEADS = {}


def write_volumes(folder, numbers, side=SIDE):
    """Noise with labels: the image int16, the label 1 where it is bright."""
    for number in numbers:
        image = np.random.default_rng(number).integers(0, 1000, (side, side, side)).astype(np.int16)
        write_raw(folder / f"data/imagesTr/v_{number:05d}.nii", image)
        write_raw(folder / f"data/labelsTr/v_{number:05d}.nii", (image > 600).astype(np.uint8))
    return folder


def words(folder, place, *more, **changes):
    changes = {"run__logs": place.parent / "Logs", "data__cache": place, **changes}
    return arguments(folder, *map(str, more), **changes)


def command(folder, place, *more, **changes):
    return [sys.executable, str(ROOT / "OM_prepare.py"), *words(folder, place, *more, **changes)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def prepare(folder, place, *more, limit=None, seconds=240, **changes):
    """OM_prepare.py as a process of its own. limit: bytes that a file may have."""
    full = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return launching.run(command(folder, place, *more, **changes), seconds, env=environment(), preexec_fn=full)


def run_here(folder, place, *more, page=False, workers=False, **changes):
    """OM_prepare.py's main in this process, see `run_prepare`."""
    return run_prepare(words(folder, place, *more, **changes), page, workers)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in LOCKS}


def one_sentence(text):
    """The last line of what went to stderr is the error, and nothing looks like a traceback."""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    assert "Traceback" not in text and lines[-1].startswith("error: ") and lines[-1].endswith("."), text
    assert sum(line.startswith("error:") for line in lines) == 1
    return lines[-1]


def workers_of(process):
    return [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def flip(path, at=-5, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_files_of_a_folder_that_is_no_cache_are_left_alone(tmp_path, capsys):
    write_volumes(tmp_path, range(3))
    for name in ("manifest.json", "refused.csv", "images_00000.npy", "plan.json"):
        place = tmp_path / f"own {name}"
        place.mkdir()
        (place / name).write_text('{"my": "own"}')
        with pytest.raises(InputError):
            read_datasets(cached(tmp_path, place))  # a training that comes first makes it no cache
        for more in ((), ("--fresh",), ("--repair",)):
            assert run_here(tmp_path, place, *more) == STOP
            assert f"OM_prepare.py did not write its {name}, and would replace" in one_sentence(capsys.readouterr().err)
        assert [path.name for path in place.iterdir()] == [name] and (place / name).read_text() == '{"my": "own"}'
    (place / "plan.json").rename(place / ".plan.json.tmp-1")  # as a kill leaves it
    assert run_here(tmp_path, place) == DONE
    for path in place.glob("*.json"):
        path.write_text("damaged")
    assert run_here(tmp_path, place, "--repair") == DONE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with data/ of three parts and cache/, which an undisturbed run with two workers has made."""
    folder = write_volumes(tmp_path_factory.mktemp("made"), range(COUNT))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert run_here(folder, folder / "cache", "--workers", "2", workers=True) == DONE
    assert f"{COUNT} volumes ({COUNT} with labels), 0 refused" in said.getvalue()
    return folder


@pytest.fixture
def place(made, tmp_path):
    """A copy of the cache of `made`, to spoil."""
    return shutil.copytree(made / "cache", tmp_path / "cache")


def cached(made, place, **changes):
    return config(made, data__cache=place, run__logs=place.parent / "Logs", **changes)


# ---------------------------------------------------------------------------------------------------------------------
# What a run makes
# ---------------------------------------------------------------------------------------------------------------------

def test_a_run_makes_a_few_large_files_that_hold_every_volume(made):
    files = contents(made / "cache")
    parts = [f"{kind}_{number:05d}.{suffix}" for number in range(3)
             for kind, suffix in (("images", "npy"), ("labels", "npy"), ("volumes", "json"))]
    assert set(files) == {*parts, "manifest.json"}
    assert not (made / "cache/lock.json").exists()
    cfg = cached(made, made / "cache", **EVERYBODY)
    dataset, held_out, _ = read_datasets(cfg)
    assert len(dataset) == COUNT and not len(held_out)
    for index in (0, 15, 16, 39):
        item = {"id": "", "image": made / f"data/imagesTr/v_{index:05d}.nii", "mask": None,
                "label": made / f"data/labelsTr/v_{index:05d}.nii"}
        found = on_grid(item, cfg)
        assert (dataset.image(index) - torch.from_numpy(found["image"])).abs().max() <= 0.5 / 255 + 1e-6
        assert torch.equal(dataset.label(index)[0], torch.from_numpy(found["label"]))
        assert not dataset.images[index].flags.writeable


def test_a_second_run_finds_all_there(made, place, capsys):
    before = {name: mark for name, mark in marks(place).items() if name != "manifest.json"}
    assert run_here(made, place) == DONE
    assert f"{COUNT} of {COUNT} volumes are there already" in capsys.readouterr().out
    assert before.items() <= marks(place).items()
    assert run_here(made, place, "--verify") == DONE
    assert f"all 9 files of {COUNT} volumes are intact" in capsys.readouterr().out
    assert contents(place) == contents(made / "cache")


def test_an_edit_of_the_preparing_code_is_told(made, place, tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "Dataloader", tmp_path / "Dataloader", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", tmp_path / "Dataloader/cache.py")
    told = []
    try:
        path = tmp_path / "Dataloader/prepare.py"
        for text in ("# a remark\n", "LEAST = 3\n"):
            path.write_text('"""Other words."""' + path.read_text().split('"""', 2)[2] + text)
            cache.code_mark.cache_clear()
            assert run_here(made, place) == DONE
            told.append(f"{COUNT} of these were prepared by another version" in capsys.readouterr().err)
    finally:
        cache.code_mark.cache_clear()
    assert told == [False, True]


def test_what_a_version_prepared_that_did_not_mark_its_code_is_told(made, place, capsys):
    path, *others = cache.record_paths(place)
    record = cache.read_json(path)
    del record["code"]
    cache.write_json(place, path.name, record)
    assert others and run_here(made, place) == DONE
    said = f"{len(record['volumes']) + len(record['refused'])} of these were prepared by another version"
    assert said in capsys.readouterr().err


def test_2d_images_go_the_whole_way(tmp_path):
    write_dataset(tmp_path / "data", range(8), 24, dims=2)
    changes = {"model__dims": 2, "data__img_size": "[16, 24]"}
    assert run_here(tmp_path, tmp_path / "cache", **changes) == DONE
    cfg = cached(tmp_path, tmp_path / "cache", **changes)
    dataset, held_out, listed = read_datasets(cfg)
    assert held_out.label(1).shape == (1, 16, 24) and set(held_out.label(1).unique().tolist()) > {0, 1}
    steps = list(epoch_batches(cfg, dataset, listed, Progress(), SHARE, Ranks()))
    images, _, subjects, _ = steps[0][0][0]
    assert images.shape == (2, 1, 16, 24) and images.dtype == torch.uint8
    assert torch.equal(as_float(images)[1], dataset.image(dataset.subjects.tolist().index(subjects[1])))


@pytest.mark.slow
def test_training_data_are_those_of_the_files_bit_for_bit_with_any_number_of_workers(tmp_path):
    add_masks(make_data(tmp_path, size=20))
    assert run_here(tmp_path, tmp_path / "cache", data__dtype="float32") == DONE
    (tmp_path / "same.py").write_text(SAME_DATA)
    run = launching.run([sys.executable, tmp_path / "same.py", tmp_path, tmp_path / "cache"], env=environment())
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith(("True", "False"))]
    assert [line[:2] for line in lines] == [["False", "0"], ["True", "0"], ["True", "2"]]
    assert len({line[2] for line in lines}) == 1
    assert lines[-1][3:] == ["2", "True"], "the same two workers in both epochs"


# ---------------------------------------------------------------------------------------------------------------------
# Kills, full disks, two at once
# ---------------------------------------------------------------------------------------------------------------------

def kill_at(folder, place, rng, new_parts, workers, **changes):
    """Start OM_prepare.py, kill -9 its main process at a random moment, and see that its workers end.

    new_parts: how many parts it may finish before; it is killed at once when it is done. Returns: parts that are there.
    """
    place.mkdir(exist_ok=True)
    before, delay = len(list(place.glob("volumes_*.json"))), rng.uniform(0, 0.1 if new_parts else 1.2)
    with open(place.parent / "killed.txt", "a") as out:
        process = launching.start(command(folder, place, "--workers", str(workers), **changes), stdout=out, stderr=out,
                                  env=environment())
    until(lambda: process.poll() is not None or len(list(place.glob("volumes_*.json"))) >= before + new_parts)
    time.sleep(delay)
    process.kill()
    process.wait()
    assert not launching.expect_nothing(process.mark)
    return len(list(place.glob("volumes_*.json")))


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_no_bit(tmp_path):
    write_volumes(tmp_path, range(720), 30)
    fitted = {"data__spacing_mm": 0.0}  # every volume is smoothed and interpolated
    assert prepare(tmp_path, tmp_path / "whole", "--workers", "2", **fitted).returncode == DONE
    rng, parts = random.Random(1), []
    for number in range(10):
        parts.append(kill_at(tmp_path, tmp_path / "cache", rng, number % 2, rng.choice((1, 2)), **fitted))
    print(f"parts after each kill: {parts}")
    assert any(0 < count < 45 for count in parts), f"no kill met a part of the work: {parts}"
    (tmp_path / "cache/images_00002.npy.tmp-99999").write_bytes(b"half")
    run = prepare(tmp_path, tmp_path / "cache", "--workers", "3", **fitted)
    assert run.returncode == DONE and "of 720 volumes are there already" in run.stdout, run.stderr
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_one_at_a_time_and_a_killed_worker_is_one_sentence(made, tmp_path, capsys):
    place = tmp_path / "cache"
    place.mkdir()
    process = launching.start(command(made, place, "--workers", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, env=environment())
    until((place / "plan.json").exists)
    assert run_here(made, place) == STOP
    said = one_sentence(capsys.readouterr().err)
    assert f"in use by process {process.pid} on" in said and "name another data.cache" in said
    os.kill(until(lambda: workers_of(process))[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == STOP and "fewer --workers than 2" in one_sentence(said)
    assert not (place / "manifest.json").exists() and not (place / "lock.json").exists()
    assert run_here(made, place) == DONE
    assert contents(place) == contents(made / "cache")


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(made, tmp_path):
    place = tmp_path / "cache"
    for limit in (600, 40000):  # not even plan.json may be written whole, or no part of 16 volumes
        run = prepare(made, place, "--workers", "2", limit=limit)
        said = one_sentence(run.stderr)
        assert run.returncode == STOP and str(place) in said and "File too large" in said and "again" in said
        # The smallest part may be there, or be broken off by the end of the other.
        assert set(contents(place)) - {"images_00002.npy", "labels_00002.npy", "volumes_00002.json"} == (
            set() if limit == 600 else {"plan.json"})
    with pytest.raises(InputError, match=f"not complete: (32|40) of its {COUNT} volumes are missing .v_00000, v_00001, "
                                         "v_00002, v_00003, v_00004 and (27|35) more.; run OM_prepare.py"):
        read_datasets(cached(made, place))
    assert run_here(made, place) == DONE
    assert contents(place) == contents(made / "cache")


def test_more_than_the_disk_has_is_refused_before_anything_is_made(made, tmp_path, capsys):
    side = 65536  # voxels; with the labels 20 PiB
    assert shutil.disk_usage(tmp_path).free < 2 * COUNT * side ** 3
    assert run_here(made, tmp_path / "cache", data__img_size=side) == STOP
    said = one_sentence(capsys.readouterr().err)
    assert f"{COUNT} volumes need about {2 * COUNT * side ** 3 / 2 ** 30:.1f} GiB" in said
    assert not contents(tmp_path / "cache")


def test_one_label_of_a_part_takes_the_room_of_all(tmp_path):
    cfg = config(tmp_path, data__img_size=65536)
    group = [{"label": "a.nii.gz", "mask": None}, *[{"label": None, "mask": None}] * 15]
    with pytest.raises(InputError, match=f"16 volumes need about {2 * 16 * 65536 ** 3 / 2 ** 30:.1f} GiB"):
        OM_prepare.require_room(tmp_path, {0: group}, cfg)


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------

def test_every_damage_is_named_and_repaired(made, place, capsys):
    flip(place / "images_00000.npy")
    flip(place / "labels_00001.npy", at=200)
    flip(place / "volumes_00002.json", at=len((place / "volumes_00002.json").read_bytes()) // 2)
    with open(place / "labels_00002.npy", "r+b") as file:
        file.truncate(300)
    (place / "images_00001.npy").unlink()
    for name in ("notes.txt", "volumes_old.json", "images_00000.npy.bak"):
        (place / name).write_text("ours")
    assert run_here(made, place, "--verify") == STOP
    out, err = capsys.readouterr()
    for text in ("images_00000.npy is damaged", "labels_00001.npy is damaged", "volumes_00002.json is damaged",
                 "labels_00002.npy is truncated: 300 of ", "images_00001.npy is missing",
                 "notes.txt does not belong to the cache", "volumes_old.json does not belong",
                 "images_00000.npy.bak does not belong"):
        assert text in out
    assert len(out.splitlines()) == 8 and "5 of 9 files are damaged" in one_sentence(err) and "--repair" in err
    assert run_here(made, place, "--repair") == DONE
    assert "rebuilding 3 parts that are damaged or lack a volume" in capsys.readouterr().out
    kept = contents(place)
    for name in ("notes.txt", "volumes_old.json", "images_00000.npy.bak"):
        assert kept.pop(name) == b"ours"
    assert kept == contents(made / "cache")
    assert run_here(made, place, "--verify") == STOP
    out, err = capsys.readouterr()
    assert "all 9 files of the cache are intact, but the folder has 3 other files" in one_sentence(err)


def test_any_flipped_bit_of_a_manifest_is_found(made, place, capsys):
    whole = (place / "manifest.json").read_bytes()
    rng = random.Random(0)
    for number in range(100):
        flip(place / "manifest.json", rng.randrange(len(whole)), rng.randrange(8))
        assert cache.read_json(place / "manifest.json") is None, number
        if number == 0:
            assert run_here(made, place, "--verify") == STOP
            assert "manifest.json is damaged" in one_sentence(capsys.readouterr().err)
            with pytest.raises(InputError, match="manifest.json is damaged; run OM_prepare.py .* --repair"):
                read_datasets(cached(made, place))
        (place / "manifest.json").write_bytes(whole)
    flip(place / "manifest.json", 40)
    assert run_here(made, place, "--repair") == DONE
    assert "0 parts that are damaged" in capsys.readouterr().out
    assert contents(place) == contents(made / "cache")


def test_a_flipped_bit_that_leaves_the_same_number_is_found(tmp_path):
    content = {"low": 1e-05, "high": 0.1}
    cache.write_json(tmp_path, "plan.json", content)
    assert cache.read_json(tmp_path / "plan.json")["low"] == 1e-05
    data = (tmp_path / "plan.json").read_bytes()
    assert b"1e-05" in data
    flip(tmp_path / "plan.json", data.index(b"1e-05") + 1, 5)
    assert json.loads((tmp_path / "plan.json").read_bytes())["low"] == 1e-05
    assert cache.read_json(tmp_path / "plan.json") is None


def test_training_refuses_what_is_not_whole_when_it_opens_it(made, place):
    with open(place / "labels_00001.npy", "r+b") as file:
        file.truncate(200)
    with pytest.raises(InputError, match="labels_00001.npy is truncated: 200 of .*--repair"):
        read_datasets(cached(made, place))
    (place / "labels_00001.npy").unlink()
    with pytest.raises(InputError, match="labels_00001.npy is missing.*--repair"):
        read_datasets(cached(made, place))


def open_as_other_user(folder, place, pipe):
    """In a process of its own: what training and OM_prepare.py say of a cache, as a user who may not read or write all
    of it."""
    if os.geteuid() == 0:
        os.setuid(65534)  # root may read everything
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(InputError) as refusal:
        run_here(folder, place)
        read_datasets(cached(folder, place))
    pipe.send((str(refusal.value), one_sentence(said.getvalue())))


@pytest.mark.parametrize("closed, mode", [("manifest.json", 0), ("labels_00001.npy", 0), ("", 0o600)])
def test_what_this_user_may_not_read_of_a_cache_is_named(made, closed, mode):
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        os.chmod(outer, 0o755)
        place = Path(shutil.copytree(made / "cache", Path(outer) / "cache"))
        os.chmod(place, 0o555)
        os.chmod(place / closed, mode)
        process, pipe = forked(open_as_other_user, made, place)
        refusal, of_prepare = pipe.recv()
        process.join(60)
        os.chmod(place, 0o755)
    assert refusal.startswith(f"data.cache {place}: this user may not read or write {place / closed}")
    assert refusal.endswith("; ask its owner to allow it, or name another.")
    assert of_prepare.startswith(f"error: data.cache {place}: this user may not read or write {place}")


def test_a_refusal_that_names_no_file_is_not_blamed_on_the_cache(tmp_path):
    with pytest.raises(PermissionError), cache.for_this_user("data.cache"):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_no_cache_is_one_sentence(made, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(InputError, match="there is no prepared cache; run OM_prepare.py with this config first"):
            read_datasets(cached(made, path))
    assert run_here(made, tmp_path / "file") == STOP
    assert str(tmp_path / "file") in one_sentence(capsys.readouterr().err)


def test_a_flipped_voxel_is_found_before_the_training(made, place):
    flip(place / "labels_00001.npy")
    with pytest.raises(InputError, match="labels_00001.npy differ from what was prepared; run .* --repair"):
        read_datasets(cached(made, place))
    read_datasets(cached(made, place, data__verify="false"))
    read_datasets(cached(made, place), headers_only=True)
    found = []
    for rank in range(3):  # each takes a share, together they see everything
        try:
            read_datasets(cached(made, place), ranks=Ranks(rank=rank, world_size=3))
        except InputError as error:
            found.append(str(error))
    assert len(found) == 1 and "labels_00001.npy" in found[0]


# ---------------------------------------------------------------------------------------------------------------------
# Who reads it
# ---------------------------------------------------------------------------------------------------------------------

def forked(target, *arguments):
    """A process that calls target(*arguments, pipe), and the other end of its pipe."""
    pipe, inner = FORK.Pipe()
    process = FORK.Process(target=target, args=(*arguments, inner), daemon=True)
    process.start()
    return process, pipe


def hold_cache(folder, place, pipe):
    """In a process of its own: read a cache as a training does, until it is killed."""
    kept = read_datasets(cached(folder, place))
    pipe.send(len(kept[0]))
    time.sleep(600)


@pytest.mark.slow
def test_nothing_is_taken_from_under_a_training(tmp_path, capsys):
    write_volumes(tmp_path, range(20))
    place = tmp_path / "cache"
    assert run_here(tmp_path, place) == DONE
    before = contents(place)
    process, pipe = forked(hold_cache, tmp_path, place)
    try:
        assert pipe.recv() == 6
        for option in ("--fresh", "--repair"):
            assert run_here(tmp_path, place, option) == STOP
            assert f"data.cache {place} is in use by a training run" in one_sentence(capsys.readouterr().err)
            assert contents(place) == before
        write_volumes(tmp_path, range(3, 4))  # at another time: its part is made anew
        write_volumes(tmp_path, range(100, 101))
        assert run_here(tmp_path, place) == DONE
        assert "a training run reads this cache, so 3 old files stay" in capsys.readouterr().out
        arrays = {name: data for name, data in before.items() if name.endswith(".npy")}
        assert arrays.items() <= contents(place).items()
        assert len(read_datasets(cached(tmp_path, place, data__train_ids="", data__val_ids="100"))[0]) == 20
    finally:
        process.kill()  # a training that dies holds nothing
        process.join()
    assert run_here(tmp_path, place) == DONE
    assert "images_00000.npy" not in contents(place)
    assert run_here(tmp_path, place, "--verify") == DONE
    assert run_here(tmp_path, place, "--fresh") == DONE


def test_a_volume_that_left_the_list_and_came_back_under_a_training_is_there_once(tmp_path):
    """The part that the training holds and the part made without the volume were both intact: two were there twice."""
    write_volumes(tmp_path, range(3))
    place, kinds = tmp_path / "cache", ("imagesTr", "labelsTr")
    assert run_here(tmp_path, place) == DONE
    training = read_datasets(cached(tmp_path, place, **EVERYBODY))[0]
    for kind in kinds:
        (tmp_path / f"data/{kind}/v_00002.nii").rename(tmp_path / kind)
    assert run_here(tmp_path, place) == DONE
    for kind in kinds:
        (tmp_path / kind).rename(tmp_path / f"data/{kind}/v_00002.nii")
    assert run_here(tmp_path, place) == DONE
    found = read_datasets(cached(tmp_path, place, **EVERYBODY))[0]
    assert [item["id"] for item in found.items] == ["v_00000", "v_00001", "v_00002"]
    assert torch.equal(found.image(1), training.image(1))


def test_a_part_that_was_begun_has_no_record_of_an_earlier_one(tmp_path, monkeypatch):
    """Killed twice, a volume left out and put back in between: the old record described the arrays of other volumes."""
    def killed(folder, name, content):
        if name != "plan.json":
            raise KeyboardInterrupt
        write_json(folder, name, content)

    write_volumes(tmp_path, range(cache.MOST_VOLUMES + 1), side=8)
    place, write_json, file = tmp_path / "cache", cache.write_json, tmp_path / "data/imagesTr/v_00000.nii"
    changes = {**EVERYBODY, "data__img_size": 8}
    assert run_here(tmp_path, place, **changes) == DONE
    (place / "manifest.json").unlink()
    (place / "volumes_00001.json").unlink()
    shutil.move(file, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_json", killed)
        assert run_here(tmp_path, place, **changes) != DONE
    shutil.move(tmp_path / file.name, file)
    assert run_here(tmp_path, place, **changes) == DONE
    cfg = cached(tmp_path, place, **changes)
    found = read_datasets(cfg)[0]
    for item, image in zip(list_volumes(tmp_path / "data"), found.images, strict=True):
        assert np.array_equal(image, cache.encode(on_grid(item, cfg)["image"], "uint8")), item["id"]


def test_a_training_waits_for_the_preparation_and_then_says_so(made, place, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.3)
    with cache.without_readers(place) as free:
        assert free
        read_datasets(cached(made, place), headers_only=True)
        manifest = (place / "manifest.json").read_bytes()
        for step in (lambda: None, lambda: cache.forget_damaged(place, lambda: None)):
            step()  # --repair removes the manifest
            with pytest.raises(InputError, match="OM_prepare.py is rebuilding it; wait until it has finished"):
                read_datasets(cached(made, place))
        (place / "manifest.json").write_bytes(manifest)
    kept = read_datasets(cached(made, place))
    with cache.without_readers(place) as free:
        assert not free
    del kept
    with cache.without_readers(place) as free:
        assert free, "given back with the data set"


def test_where_there_are_no_locks_it_is_said_once(made, place, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)  # as on Lustre without -o flock
    for rank in (0, 1):
        assert len(read_datasets(cached(made, place), ranks=Ranks(rank=rank, world_size=2))[0]) == 6
    said = capsys.readouterr().err
    assert said.count("cannot be locked (No locks available): do not run OM_prepare.py on it during training") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Other settings
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", cache.SETTINGS)
def test_a_cache_of_other_settings_is_refused_with_both_values(made, key):
    changes = {key.replace(".", "__"): OTHER[key]}
    if key == "model.dims":
        changes["data__img_size"] = 16
    now, before = cached(made, made / "cache", **changes)[key], cached(made, made / "cache")[key]
    with pytest.raises(InputError) as refused:
        read_datasets(cached(made, made / "cache", **changes))
    said = str(refused.value)
    assert "was made with " in said and f"{key} {before} (the config says {now})" in said and "--fresh" in said


def test_a_cache_of_other_settings_stays_as_it_is(made, place, capsys):
    files = contents(place)
    for more in ((), ("--repair",), ("--verify",)):
        assert run_here(made, place, *more, data__spacing_mm=1.5) == STOP
        assert "data.spacing_mm 1.0 (the config says 1.5)" in one_sentence(capsys.readouterr().err)
        assert contents(place) == files


def test_the_data_folder_may_be_spelt_otherwise(made, place, monkeypatch, capsys):
    monkeypatch.chdir(made)
    for root in ("data", f"{made}/data/", "./data/"):
        assert len(read_datasets(cached(made, place, data__root=root))[0]) == 6
    assert run_here(made, place, data__root=root) == DONE
    assert f"{COUNT} of {COUNT} volumes are there already" in capsys.readouterr().out


@pytest.mark.slow
def test_other_words_of_the_list_read_no_volume_again(made, place, tmp_path, capsys):
    """Subjects and splits are no voxels: a part keeps its arrays when only they change."""
    rows = [f"{made}/data/imagesTr/v_{number:05d}.nii,{made}/data/labelsTr/v_{number:05d}.nii"
            for number in range(COUNT)]
    changes = {"data__root": tmp_path / "list.csv"}
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows]))
    assert run_here(made, place, "--fresh", **changes) == DONE
    before = marks(place)
    words_of = [f"p{number // 2},{'val' if number < 4 else ''}" for number in range(COUNT)]
    lines = [f"{row},{word}" for row, word in zip(rows, words_of)]
    (tmp_path / "list.csv").write_text("\n".join(["image,label,subject,split", *lines]))
    capsys.readouterr()
    assert run_here(made, place, **changes) == DONE
    assert f"{COUNT} of {COUNT} volumes are there already" in capsys.readouterr().out
    assert all(marks(place)[name] == mark for name, mark in before.items() if name.endswith(".npy"))
    cfg = cached(made, place, data__train_ids="", data__val_ids="", **changes)
    train, val, _ = read_datasets(cfg)
    assert [item["id"] for item in val.items] == [f"v_{number:05d}" for number in range(4)]
    assert len(train) == COUNT - 4 and train.items[0]["subject"] == train.items[1]["subject"] == "p2"
    assert run_here(made, place, "--verify", **changes) == DONE


def test_an_edited_list_is_refused_until_the_cache_is_made_anew(tmp_path, monkeypatch, capsys):
    """A volume that the list now holds out would be trained on."""
    write_volumes(tmp_path, range(6), side=8)
    rows, path, place = [f"data/imagesTr/v_{number:05d}.nii" for number in range(6)], tmp_path / "list.csv", (
        tmp_path / "cache")
    changes = {"data__root": path, "data__train_ids": "", "data__val_ids": "", "data__img_size": 8,
               "data__expect_samples": 0}
    path.write_text("\n".join(["image", *rows]))
    assert run_here(tmp_path, place, **changes) == DONE
    cfg, before = cached(tmp_path, place, **changes), marks(place)
    assert [len(part) for part in read_datasets(cfg)[:2]] == [6, 0]
    path.write_text("\n".join(["image,split", *(f"{row},{'val' if row > rows[3] else ''}" for row in rows)]))
    for only in (False, True):
        with pytest.raises(InputError, match=f"{path} .*has changed since .*run OM_prepare.py with this config, which "
                                             "reads no volume again for new subjects, modalities or splits"):
            read_datasets(cfg, headers_only=only)
    monkeypatch.setenv("OMNIMORPH_ROUND", "3")  # a restart of a campaign
    assert [len(part) for part in read_datasets(cfg)[:2]] == [6, 0] and "has changed since" in capsys.readouterr().err
    monkeypatch.delenv("OMNIMORPH_ROUND")
    assert run_here(tmp_path, place, **changes) == DONE
    # Records too: with new ones beside the old manifest, a restart would take the cache for a damaged one.
    assert [name for name, mark in marks(place).items() if before.get(name) != mark] == ["manifest.json"]
    assert run_here(tmp_path, place, "--verify", **changes) == DONE
    assert [len(part) for part in read_datasets(cfg)[:2]] == [4, 2]
    path.unlink()
    assert len(read_datasets(cfg)[0]) == 4, "a machine without the original files"


def test_a_cache_without_a_mark_of_its_list_stays_usable_and_a_new_list_counts(tmp_path):
    folder = make_data(tmp_path, size=8) / "data"
    shutil.move(folder / "dataset.json", tmp_path / "kept.json")
    place, changes = tmp_path / "cache", {"data__img_size": 8}
    assert run_here(tmp_path, place, **changes) == DONE
    cfg = cached(tmp_path, place, **changes)
    assert len(read_datasets(cfg)[0]) == 6
    shutil.move(tmp_path / "kept.json", folder / "dataset.json")
    with pytest.raises(InputError, match="dataset.json .*has changed since"):
        read_datasets(cfg)
    manifest = cache.read_json(place / "manifest.json")
    del manifest["list"]
    cache.write_json(place, "manifest.json", manifest)
    assert len(read_datasets(cfg)[0]) == 6, "made by an earlier version"


def test_a_cache_of_another_pattern_is_refused_until_its_words_are_made_anew(made, place):
    changes = {"data__subject_pattern": "v_000([0-9])", "data__train_ids": "", "data__val_ids": ""}
    with pytest.raises(InputError, match="subject_pattern \"\" .the config says \"v_000.*which reads no volume again"):
        read_datasets(cached(made, place, **changes))
    before = marks(place)
    assert run_here(made, place, **changes) == DONE
    assert all(marks(place)[name] == mark for name, mark in before.items() if name.endswith(".npy"))
    train, _, _ = read_datasets(cached(made, place, data__val_fraction=0, **changes))
    assert sorted({item["subject"] for item in train.items}) == ["0", "1", "2", "3"]


def test_settings_of_a_run_that_was_killed_count_too(made, place, capsys):
    (place / "manifest.json").unlink()
    for name in ("volumes_00000.json", "volumes_00001.json"):
        (place / name).unlink()
    assert run_here(made, place, data__dtype="float16") == STOP
    assert "data.dtype uint8 (the config says float16)" in one_sentence(capsys.readouterr().err)


def test_a_part_of_other_settings_is_made_anew(made, place):
    cfg = cached(made, place)
    items = read_datalist(cfg["data.root"])
    assert not cache.plan(place, items, cfg)[1]
    record = cache.read_json(place / "volumes_00001.json")
    record["settings"]["data.dtype"] = "float16"
    cache.write_json(place, "volumes_00001.json", record)
    kept, groups = cache.plan(place, items, cfg)
    assert set(kept) == {0, 2} and list(groups.values()) == [items[16:32]]


def test_fresh_replaces_the_cache_and_leaves_what_is_not_of_it(made, place, capsys):
    for name in ("notes.txt", "volumes_old.json", "images_00000.npy.bak"):
        (place / name).write_text("ours")
    assert run_here(made, place, "--fresh", data__dtype="float16", data__root=made / "data") == DONE
    assert all((place / name).read_text() == "ours" for name in ("notes.txt", "volumes_old.json"))
    cfg = cached(made, place, data__dtype="float16")
    assert read_datasets(cfg)[0].images[0].dtype == np.float16
    assert run_here(made, place, data__dtype="uint8") == STOP


# ---------------------------------------------------------------------------------------------------------------------
# Refused volumes; added, changed and removed ones
# ---------------------------------------------------------------------------------------------------------------------

def spoil(folder):
    """Five volumes that cannot be used, each in its way. Returns: {id: a word of the reason}."""
    data, image = folder / "data", np.random.default_rng(0).random((SIDE,) * 3).astype(np.float32)
    image[3, 3, 3] = np.nan
    write_raw(data / "imagesTr/v_00010.nii", image)
    whole = data / "imagesTr/v_00011.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.random.default_rng(0).random((SIDE,) * 3), np.eye(4)), whole)
    whole.write_bytes(whole.read_bytes()[:-3000])
    write_raw(data / "imagesTr/v_00012.nii", np.full((SIDE,) * 3, 7, np.int16))
    write_volumes(folder, [13])
    write_raw(data / "labelsTr/v_00013.nii", np.ones((SIDE, SIDE, SIDE - 1), np.uint8))
    write_raw(data / "imagesTr/v_00014.nii", np.arange(400, dtype=np.int16).reshape(20, 20, 1))
    for number in (10, 11, 12, 14):
        write_raw(data / f"labelsTr/v_{number:05d}.nii", np.ones((SIDE,) * 3, np.uint8))
    return {"v_00010": "NaN", "v_00011": "truncated", "v_00012": "empty", "v_00013": "another grid",
            "v_00014": "not 3D"}


def test_refused_volumes_are_left_out_and_reported(tmp_path, capsys):
    write_volumes(tmp_path, range(8))
    reasons, place = spoil(tmp_path), tmp_path / "cache"
    assert run_here(tmp_path, place, page=True) == DONE
    printed = capsys.readouterr().out
    assert "8 volumes (8 with labels), 5 refused" in printed
    rows = {row["id"]: row for row in csv.DictReader(open(place / "refused.csv", encoding="utf-8"))}
    assert set(rows) == set(reasons)
    refused = {name: (file, why) for name, file, why in json.loads((place / "manifest.json").read_text())["refused"]}
    page = (tmp_path / "Logs/demo_cache_prepared.html").read_text()
    assert "Prepared: demo" in page and "data:image/png" in page
    for name, word in reasons.items():
        assert word in rows[name]["reason"] and f"refused {name}: {rows[name]['reason']}" in printed
        assert refused[name] == (rows[name]["image"], rows[name]["reason"])
        assert name in page and word in page
    with pytest.raises(InputError, match=r"6 training volumes \(5 were refused when it was prepared\), but"):
        read_datasets(cached(tmp_path, place, data__expect_samples=9))
    assert len(read_datasets(cached(tmp_path, place))[0]) == 6
    write_volumes(tmp_path, [12, 13])
    assert run_here(tmp_path, place) == DONE
    assert "10 volumes (10 with labels), 3 refused" in capsys.readouterr().out
    assert len(list(csv.DictReader(open(place / "refused.csv", encoding="utf-8")))) == 3
    assert run_here(tmp_path, place, "--verify") == DONE
    assert run_here(tmp_path, tmp_path / "demo", page=True) == DONE  # its page has the name alone, and is another one
    names = ["demo_cache_prepared.html", "demo_prepared.html"]
    assert sorted(path.name for path in (tmp_path / "Logs").glob("*_prepared.html")) == names
    assert (tmp_path / "Logs" / names[0]).read_text() == page


def test_a_refused_volume_is_tried_again_even_if_its_file_looks_the_same(tmp_path, capsys):
    write_volumes(tmp_path, range(3))
    place, first = tmp_path / "cache", tmp_path / "data/imagesTr/v_00000.nii"
    whole = first.read_bytes()
    for content, ids in ((bytes(len(whole)), ["v_00000"]), (whole, [])):  # the first of all is no reason to stop
        first.write_bytes(content)
        os.utime(first, (1e9, 1e9))
        assert run_here(tmp_path, place) == DONE
        assert f"{3 - len(ids)} volumes ({3 - len(ids)} with labels), {len(ids)} refused" in capsys.readouterr().out
        assert (place / "refused.csv").exists() == bool(ids)
        assert [line[0] for line in json.loads((place / "manifest.json").read_text())["refused"]] == ids
    assert run_here(tmp_path, place, "--verify") == DONE


@pytest.mark.skipif(sys.platform != "linux", reason="neither such names nor /dev/full are everywhere")
def test_names_that_are_not_utf8_are_prepared_and_refused_by_name(tmp_path, capsys):
    write_volumes(tmp_path, range(3))
    for number, name in ((1, b"J\xf6rg"), (2, b"K\xf6nig")):
        for kind in ("imagesTr", "labelsTr"):
            (tmp_path / f"data/{kind}/v_0000{number}.nii").rename(tmp_path / f"data/{kind}/{os.fsdecode(name)}.nii")
    write_raw(tmp_path / "data/imagesTr" / os.fsdecode(b"K\xf6nig.nii"), np.full((SIDE,) * 3, 7, np.int16))
    assert run_here(tmp_path, tmp_path / "cache", page=True) == DONE
    assert "2 volumes (2 with labels), 1 refused" in capsys.readouterr().out
    assert b"\nK\xf6nig," in (tmp_path / "cache/refused.csv").read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("side", [700, 1300], ids=["as float32", "to map"])
def test_a_volume_too_large_for_the_memory_is_refused_by_name(tmp_path, side):
    write_volumes(tmp_path, range(2))
    large = tmp_path / "data/imagesTr/v_00001.nii"
    image = nibabel.Nifti1Image(np.zeros((2, 2, 2), np.uint8), np.eye(4))
    image.header["dim"][1:4], image.header["vox_offset"] = side, 352
    large.write_bytes(image.header.binaryblock)
    os.truncate(large, 352 + side ** 3)  # sparse; as float32 it takes four times as much
    (tmp_path / "cache").mkdir()
    used, limits = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used * resource.getpagesize() + 2 ** 30, limits[1]))
    try:
        record = cache.write_group(tmp_path / "cache", 0, list_volumes(tmp_path / "data"), config(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert [line["id"] for line in record["volumes"]] == ["v_00000"]
    assert f"{large}: too large for the free memory (" in record["refused"][0]["reason"]


def test_a_grid_smaller_than_a_voxel_is_refused_whatever_the_type(tmp_path):
    """Interpolation leaves differences of a millionth, on which a training would learn nothing."""
    write_volumes(tmp_path, [0])
    (tmp_path / "cache").mkdir()
    cfg = cached(tmp_path, tmp_path / "cache", data__spacing_mm=1e-6, data__dtype="float32")
    record = cache.write_group(tmp_path / "cache", 0, read_datalist(cfg["data.root"]), cfg)
    assert not record["volumes"] and "v_00000.nii: all of it is nearly one" in record["refused"][0]["reason"]


def test_no_usable_volume_at_all_is_an_error(tmp_path, capsys):
    for number in range(3):
        write_raw(tmp_path / f"data/v_{number}.nii", np.full((SIDE,) * 3, 7, np.int16))
    assert run_here(tmp_path, tmp_path / "cache") == STOP
    said = one_sentence(capsys.readouterr().err)
    assert "none of the 3 volumes can be used" in said and "v_0.nii: every voxel" in said
    assert not (tmp_path / "cache/manifest.json").exists()


@pytest.mark.slow
def test_added_changed_and_removed_volumes(tmp_path):
    write_volumes(tmp_path, range(36))
    place = tmp_path / "cache"
    assert run_here(tmp_path, place) == DONE
    inodes = {path.name: path.stat().st_ino for path in place.glob("*_0*")}
    images = tmp_path / "data/imagesTr"
    shutil.copyfile(images / "v_00000.nii", images / "v_00020.nii")
    shutil.copyfile(tmp_path / "data/labelsTr/v_00000.nii", tmp_path / "data/labelsTr/v_00020.nii")
    for kind in ("imagesTr", "labelsTr"):
        (tmp_path / f"data/{kind}/v_00025.nii").unlink()
    write_volumes(tmp_path, range(100, 103))
    assert run_here(tmp_path, place) == DONE
    now = {path.name: path.stat().st_ino for path in place.glob("*_0*")}
    assert {name[-9:-4] for name in now if name.startswith("images")} == {"00000", "00002", "00003", "00004"}
    assert {name: inode for name, inode in now.items() if name[-9:-4] in ("00000", "00002")
            or name in ("volumes_00000.json", "volumes_00002.json")}.items() <= inodes.items()
    cfg = cached(tmp_path, place, **EVERYBODY)
    dataset = read_datasets(cfg)[0]
    names = [item["id"] for item in dataset.items]
    assert names == [f"v_{number:05d}" for number in (*range(25), *range(26, 36), *range(100, 103))]
    for index, name in enumerate(names):
        found = on_grid({"image": images / f"{name}.nii", "label": None, "mask": None}, cfg)["image"]
        assert np.array_equal(dataset.images[index], cache.encode(found, "uint8")), name
    assert torch.equal(dataset.image(20), dataset.image(0)) and torch.equal(dataset.label(20), dataset.label(0))
    assert run_here(tmp_path, place, "--verify") == DONE


# ---------------------------------------------------------------------------------------------------------------------
# Staging
# ---------------------------------------------------------------------------------------------------------------------

def take_copy(source, place, pipe):
    """In a process of its own: make or take a copy and tell where it is, then give it back as told."""
    pipe.send(str(staging.stage(source, cache.read_json(source / "manifest.json"), str(place))))
    while True:
        staging.release(remove=pipe.recv() == "remove")
        pipe.send("released")


def let_go(process, pipe, how="keep"):
    """End a process of `take_copy` after it has given its copy back."""
    pipe.send(how)
    assert pipe.recv() == "released"
    process.kill()
    process.join()


def staged_here(place, stage):
    """The folder of a copy that this process makes or takes, and gives back again."""
    try:
        return staging.stage(place, json.loads((place / "manifest.json").read_text()), str(stage))
    finally:
        staging.release()


def marks(folder):
    found = {path.name: path.stat() for path in folder.iterdir() if path.name != ".lock"}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


@pytest.mark.timeout(120)
def test_ranks_of_a_node_share_one_copy_which_the_last_one_removes(made, tmp_path):
    both = [forked(take_copy, made / "cache", tmp_path) for _ in range(2)]
    [copy] = {Path(pipe.recv()) for _, pipe in both}
    assert contents(copy) == contents(made / "cache") and os.listdir(tmp_path) == [copy.name]
    before = marks(copy)
    third = forked(take_copy, made / "cache", tmp_path)
    assert third[1].recv() == str(copy) and marks(copy) == before
    let_go(*both[0], "remove")
    let_go(*third)
    assert marks(copy) == before, "one process still holds it"
    let_go(*both[1], "remove")
    assert not os.listdir(tmp_path)


@pytest.mark.timeout(120)
def test_a_copy_nobody_holds_stays_for_the_same_cache_and_gives_way_to_another(made, place, tmp_path):
    stage = tmp_path / "stage"
    stage.mkdir()
    first = forked(take_copy, made / "cache", stage)
    copy = Path(first[1].recv())
    before = marks(copy)
    first[0].kill()
    first[0].join()
    for name in ("images_00000.npy", "manifest.json"):
        assert (copy / name).exists()
    again = forked(take_copy, made / "cache", stage)
    assert again[1].recv() == str(copy) and marks(copy) == before
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["refused"] = [["other", "other", "another cache"]]
    cache.write_json(place, "manifest.json", manifest)
    held = forked(take_copy, place, stage)
    other = Path(held[1].recv())
    assert other != copy and marks(copy) == before, "it is held"
    let_go(*again)
    let_go(*held)
    last = forked(take_copy, place, stage)
    assert last[1].recv() == str(other)
    assert not copy.exists() and os.listdir(stage) == [other.name]
    let_go(*last, "remove")


def test_a_damaged_file_is_found_while_it_is_copied(made, place, tmp_path):
    stage = tmp_path / "stage"
    stage.mkdir()
    flip(place / "images_00001.npy")
    with pytest.raises(InputError, match=f"{place / 'images_00001.npy'} is damaged"):
        staged_here(place, stage)
    [copy] = stage.iterdir()
    assert not (copy / "manifest.json").exists() and not list(copy.glob("images_00001*"))
    shutil.copyfile(made / "cache/images_00001.npy", place / "images_00001.npy")
    assert staged_here(place, stage) == copy and contents(copy) == contents(place)


def test_a_copy_is_for_its_user_alone(made, tmp_path):
    before = os.umask(0)
    try:
        copy = staged_here(made / "cache", tmp_path)
    finally:
        os.umask(before)
    assert copy.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in copy.iterdir()} == {0o600}


def test_what_is_left_of_a_removed_copy_is_removed(made, tmp_path):
    """Its process was killed after the lock was gone."""
    copy = staged_here(made / "cache", tmp_path)
    left = shutil.copytree(copy, copy.with_name(f"{copy.name}.removed-999999"), ignore=lambda *_: [".lock"])
    staging.remove_unused(tmp_path, copy)
    assert copy.is_dir() and not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to another user")
def test_what_other_users_have_put_there_is_neither_believed_nor_touched(made, tmp_path):
    victim, stage = tmp_path / "victim", tmp_path / "stage"
    victim.write_text("precious")
    taken = staging.copy_of(json.loads((made / "cache/manifest.json").read_text()), stage)
    foreign = [taken, taken.with_name(f"omnimorph_{os.getuid()}_0123456789abcdef")]
    for folder in foreign:
        shutil.copytree(made / "cache", folder)
        flip(folder / "images_00000.npy")
        (folder / ".lock").unlink(missing_ok=True)
        (folder / ".lock").symlink_to(victim)
        os.chown(folder, 65534, 65534)
    link = taken.with_name(f"{taken.name}.1")
    link.symlink_to(foreign[0])
    before = [contents(folder) for folder in foreign]
    copy = staged_here(made / "cache", stage)
    assert copy.name == f"{taken.name}.2" and contents(copy) == contents(made / "cache")
    assert staged_here(made / "cache", stage) == copy, "other ranks find the same"
    assert victim.read_text() == "precious" and [contents(folder) for folder in foreign] == before and link.is_symlink()
    for number in range(staging.MOST_TAKEN):
        if not os.path.lexists(name := f"{taken}.{number}" if number else taken):
            os.symlink("/", name)
    shutil.rmtree(copy)
    os.symlink("/", copy)
    with pytest.raises(InputError, match="99 folders with similar names belong to other users; name another folder"):
        staged_here(made / "cache", stage)


def test_a_link_in_place_of_the_lock_is_not_followed(made, tmp_path):
    victim, stage = tmp_path / "victim", tmp_path / "stage"
    victim.write_text("precious")
    stage.mkdir()
    copy = staged_here(made / "cache", stage)
    (copy / ".lock").unlink()
    (copy / ".lock").symlink_to(victim)
    with pytest.raises(InputError, match="/.lock is a link, which OmniMorph never creates; remove "):
        staged_here(made / "cache", stage)
    assert victim.read_text() == "precious"


def test_a_copy_of_an_earlier_round_is_compared_with_its_checksums(made, tmp_path):
    copy = staged_here(made / "cache", tmp_path)
    before = marks(copy)
    flip(copy / "images_00001.npy")
    (copy / "labels_00002.npy").unlink()
    assert staged_here(made / "cache", tmp_path) == copy and contents(copy) == contents(made / "cache")
    changed = {name for name, mark in marks(copy).items() if mark != before[name]}
    assert changed == {"images_00001.npy", "labels_00002.npy", "manifest.json"}


def restage(seed, one, two, stage):
    """In a process of its own: take copies of two caches in turn, and find each whole."""
    rng = random.Random(seed)
    for _ in range(15):
        folder = rng.choice((one, two))
        manifest = json.loads((folder / "manifest.json").read_text())
        copy = staging.stage(folder, manifest, str(stage))
        assert all((copy / name).stat().st_size == size for name, (size, _) in manifest["files"].items())
        staging.release(remove=rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_trainings_that_come_and_go_never_see_half_a_copy(tmp_path):
    for word in ("one", "two", "stage"):
        (tmp_path / word).mkdir()
    for word in ("one", "two"):  # many small files: what a removal could meet half way
        files = {f"{number}.npy": cache.write_bytes(tmp_path / word, f"{number}.npy", word.encode())
                 for number in range(150)}
        (tmp_path / word / "manifest.json").write_text(json.dumps({"files": files, "sha256": word * 8}))
    folders = [tmp_path / word for word in ("one", "two", "stage")]
    several = [FORK.Process(target=restage, args=(seed, *folders), daemon=True) for seed in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join(100)
        assert process.exitcode == 0


def test_staged_training_data_and_places_that_cannot_be(made, tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    plain, staged = (read_datasets(cached(made, made / "cache", data__stage=stage))[0] for stage in ("", "$NODE_DISK"))
    try:
        assert staged.images.folder.parent == tmp_path and plain.images.folder == made / "cache"
        assert all(torch.equal(plain.image(index), staged.image(index)) for index in range(len(plain)))
    finally:
        staging.release(remove=True)
    assert not os.listdir(tmp_path)
    for stage in (tmp_path / "missing", "$NO_SUCH_VARIABLE", "$NO_SUCH_VARIABLE/x"):
        with pytest.raises(InputError, match="data.stage .*: no folder .* on this node; correct it"):
            read_datasets(cached(made, made / "cache", data__stage=stage))
        read_datasets(cached(made, made / "cache", data__stage=stage), headers_only=True)
    with monkeypatch.context() as patch:  # as on Lustre without -o flock

        def refuse(*asked):
            raise OSError(errno.ENOSYS, "Function not implemented")

        patch.setattr(staging, "lock_at_once", refuse)
        with pytest.raises(InputError, match="data.stage .* has no file locks .*; name another folder"):
            read_datasets(cached(made, made / "cache", data__stage=str(tmp_path)))
    if sys.platform != "linux":
        return
    with pytest.raises(InputError, match=r"data.stage /sys: no folder can be made in /sys \(.*\); name another folder"):
        read_datasets(cached(made, made / "cache", data__stage="/sys"))  # where not even root can make one


# ---------------------------------------------------------------------------------------------------------------------
# Many volumes
# ---------------------------------------------------------------------------------------------------------------------

def processor_s():
    """Processor seconds so far of this process and of those children that have ended: a busy machine changes little."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


@pytest.mark.slow
def test_fifteen_thousand_volumes_open_in_seconds(tmp_path):
    rng = np.random.default_rng(0)
    seconds = {}  # of the first batch; two workers take seconds to start
    for count in (16, 15000):
        home = tmp_path / str(count)
        for number in range(count):
            write_raw(home / f"data/imagesTr/v_{number:05d}.nii", rng.integers(0, 99, (16, 16, 16), np.uint8))
        changes = {**EVERYBODY, "data__expect_samples": count}
        assert prepare(home, home / "cache", seconds=600, **changes).returncode == DONE
        for workers in (0, 2):
            cfg = cached(home, home / "cache", data__num_workers=workers, **changes)
            started = processor_s()
            dataset, _, listed = read_datasets(cfg)
            opened = processor_s()
            batches = epoch_batches(cfg, dataset, listed, Progress(), SHARE, Ranks())
            assert next(batches)[0][0][0].shape == (2, 1, 16, 16, 16)
            assert opened - started < 2 and len(dataset) == count
            del dataset, batches  # ends its workers, whose seconds count from then on
            for child in multiprocessing.active_children():
                child.join(60)
            seconds[count, workers] = processor_s() - opened
            print(f"{count} volumes, {workers} workers: opened in {opened - started:.2f} s, first batch after "
                  f"{seconds[count, workers]:.2f} s more")
    assert not multiprocessing.active_children(), "the seconds of all workers were counted"
    assert seconds[15000, 0] < 5 and seconds[15000, 2] < 2 * seconds[16, 2] + 3
