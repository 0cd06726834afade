"""Draws and data sets: all functions of keys, none of what ran before."""
import errno
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import OM_train_3modes as om
from Dataloader.dataset import (
    Files,
    VolumeDataset,
    batch_bytes,
    epoch_batches,
    make_loader,
    read_ahead,
    read_datasets,
)
from Dataloader.sampler import batches, epoch_order
from Diffusion.diffuser import log_uniform, make_condition
from Runtime.errors import InputError
from Runtime.global_batch import split_step
from Runtime.keyed_random import generator, normal, uniform
from Runtime.launch import Ranks
from Runtime.progress import Progress
from Supervisor.verdict import ECHOES, name_error
from tests import launching
from tests.launching import until
from tests.tiny import ROOT, config, make_data

ORPHANS = """
import multiprocessing, os, sys
from pathlib import Path
from Dataloader.dataset import Files, make_loader, read_datasets
from tests.tiny import config
if __name__ == "__main__":
    cfg = config(Path(sys.argv[1]), data__in_memory="false", data__num_workers=1)
    loader = iter(make_loader(read_datasets(cfg)[0], [[(0, 0)]] * 4, cfg))
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), 9)
"""
HAND_OVER = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # in all threads: the death of the worker is heard too late
import multiprocessing, os, sys, time
from pathlib import Path
from Dataloader.dataset import make_loader, read_ahead, read_datasets
from tests.tiny import config
if __name__ == "__main__":
    cfg = config(Path(sys.argv[1]), data__in_memory="false", data__num_workers=1)
    loader = make_loader(read_datasets(cfg)[0], [[(0, 0)]] * 4, cfg)
    found = read_ahead(loader, 0)
    next(found)
    while loader._iterator._data_queue.empty():
        time.sleep(0.01)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    next(found)
"""
KEYS = [(0, 3, position) for position in range(4)]


def test_draws_depend_on_their_key_alone():
    torch.manual_seed(1)
    first = torch.rand(5, generator=generator(0, "x", 1, 2))
    torch.manual_seed(2)
    assert torch.equal(first, torch.rand(5, generator=generator(0, "x", 1, 2)))
    others = [generator(1, "x", 1, 2), generator(0, "y", 1, 2), generator(0, "x", 2, 1), generator(0, "x", 1),
              generator(0, "x", 12)]
    assert all(not torch.equal(first, torch.rand(5, generator=other)) for other in others)


def test_draws_of_a_sample_do_not_depend_on_its_batch():
    assert torch.equal(uniform(KEYS, "a", 3)[2], uniform(KEYS[2:3], "a", 3)[0])
    assert torch.equal(normal(KEYS, "a", 3)[1:], normal(KEYS[1:], "a", 3))
    assert normal([(0, 0, i) for i in range(4000)], "n").std().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_loader_with_a_worker_delivers_what_the_one_without_does(data):
    lists = batches(epoch_order(0, 0, 6), 2, 2)
    found = []
    for workers in (0, 1):
        cfg = config(data, data__in_memory="false", data__num_workers=workers)
        dataset = read_datasets(cfg)[0]
        assert isinstance(dataset.images, Files), "read at each use"
        found.append(list(make_loader(dataset, lists, cfg)))
    assert len(found[0]) == len(found[1]) == 3
    assert all(torch.equal(a, b) for left, right in zip(*found) for a, b in zip(left[:3], right[:3]))
    in_memory = read_datasets(config(data))[0]
    assert isinstance(in_memory.images, list) and torch.equal(in_memory.image(3), dataset.image(3))


def test_only_rank_0_draws_bars(data, capfd):
    for rank, silent in ((1, True), (0, False)):
        read_datasets(config(data), ranks=Ranks(rank=rank, world_size=2))
        assert ("reading training volumes" not in capfd.readouterr().err) is silent


class Slow:
    """Four values a volume; each takes a while to read, and volume 5 cannot be read."""

    def __init__(self):
        self.read = []

    def __getitem__(self, index):
        time.sleep(0.02)
        if index == 5:
            raise InputError("volume 5 is damaged.")
        self.read.append(index)
        return np.full((2, 2), index, np.uint8)


def test_a_thread_reads_ahead_what_the_loader_yields():
    images = Slow()
    loader = make_loader(VolumeDataset([], images, None, None), [[(0, index)] for index in range(5)], config())
    batches_read = read_ahead(loader, 3)
    assert next(batches_read)[0].flatten().tolist() == [0] * 4
    until(lambda: len(images.read) == 4, 30)
    time.sleep(0.1)
    assert images.read == [0, 1, 2, 3], "three more, and no further"
    assert [batch[2].item() for batch in batches_read] == [1, 2, 3, 4]
    loader.batch_sampler[:] = [[(7, 1), (8, 2)]]
    assert [batch[1].tolist() for batch in read_ahead(loader, 3)] == [[7, 8]], "the next epoch, by the same loader"


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_are_prepared_in_order_by_the_thread_that_reads_them(ahead):
    loader = make_loader(VolumeDataset([], Slow(), None, None), [[(0, index)] for index in range(4)], config())
    found = list(read_ahead(loader, ahead, lambda number, batch: (number, batch[2].item(), threading.get_ident())))
    assert [entry[:2] for entry in found] == [(index, index) for index in range(4)]
    assert {entry[2] == threading.get_ident() for entry in found} == {ahead == 0}


def test_what_is_drawn_in_advance_is_what_a_step_would_draw(data):
    """By epoch_batches for volumes only; the deformed batch has the same bits."""
    cfg = config(data)
    dataset, _, listed = read_datasets(cfg)
    ddpm = om.DeformDDPM(cfg)
    volumes, pairs = next(epoch_batches(cfg, dataset, listed, Progress(epoch=1), split_step(cfg, 1), Ranks(),
                                        draw=ddpm.draw))
    assert pairs[0][3] == {}, "no maps where nobody asked for any"
    images, positions, _, drawn = volumes[0]
    rng_keys = [(cfg["run.seed"], 1, position) for position in positions.tolist()]
    ahead, at_once = (om.deform_batch(images, rng_keys, ddpm, cfg, given) for given in (drawn, None))
    assert ahead.keys() == at_once.keys()
    assert all(torch.equal(ahead[name], at_once[name]) for name in ahead) and ahead["target_field"].abs().max() > 0


def test_a_thread_that_reads_ahead_passes_errors_on_and_stops_when_nobody_listens():
    images = Slow()
    loader = make_loader(VolumeDataset([], images, None, None), [[(0, index)] for index in (4, 5, 6)], config())
    found = read_ahead(loader, 3)
    assert next(found)[2].item() == 4
    with pytest.raises(InputError, match="volume 5 is damaged"):
        next(found)
    loader.batch_sampler[:] = [[(0, 0)]] * 500
    images.read.clear()
    found = read_ahead(loader, 400)  # 8 s
    next(found)
    found.close()
    assert len(images.read) < 400, "not until all have been read"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is there on Linux only")
def test_a_worker_ends_whose_parent_was_killed_before_it_had_started(data, tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    with open(tmp_path / "out.txt", "w") as out:  # a pipe would wait for the worker
        launching.start([sys.executable, tmp_path / "orphans.py", data], stdout=out, stderr=out,
                        env={**os.environ, "PYTHONPATH": str(ROOT)}).wait(60)
    worker = int((tmp_path / "out.txt").read_text().split()[-1])
    until(lambda: not Path(f"/proc/{worker}").exists(), 30)


@pytest.mark.slow
def test_a_worker_that_dies_handing_over_a_batch_is_not_taken_for_a_rank(data, tmp_path):
    (tmp_path / "hand_over.py").write_text(HAND_OVER)
    done = launching.run([sys.executable, tmp_path / "hand_over.py", data], timeout=60,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = done.stderr.strip().splitlines()[-1]  # torch's words if the worker has ended, ours if it is about to
    assert name_error(said) == "a loader worker died" and not any(echo in said.lower() for echo in ECHOES), done.stderr
    assert re.search(r"(Connection\w*|EOF)Error", done.stderr), "how it showed stays in the log"


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("error", [ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), EOFError()])
def test_nor_is_one_that_torch_still_holds_for_alive(error, read):
    """What the loader then raises: of some forty real kills one, so it is raised here by hand."""
    class Loader:
        num_workers = 1

        def __iter__(self):
            if not read:
                raise error
            return self.batches()

        def batches(self):
            yield 0
            raise error

    found = read_ahead(Loader(), 0)
    if read:
        assert next(found) == 0
    with pytest.raises(RuntimeError, match="a DataLoader worker was killed while it handed over a batch") as raised:
        next(found)
    assert not any(echo in str(raised.value).lower() for echo in ECHOES) and raised.value.__cause__ is error


def test_a_bad_volume_is_found_before_training_and_named(tmp_path):
    path = make_data(tmp_path, size=8) / "data/imagesTr/subject_0003.nii.gz"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match="subject_0003.*(truncated|not a readable)"):
        read_datasets(config(tmp_path))


def test_one_volume_is_enough_where_no_mode_needs_pairs(data, tmp_path):
    cfg = config(data, data__train_ids="3", data__expect_samples=1, data__pair_list=tmp_path / "no_list.json",
                 registration__masks=True, run__device="cpu")
    with pytest.raises(InputError, match="one training volume is not enough, because mode 3 needs pairs; add volumes"):
        read_datasets(cfg)
    dataset, _, listed = read_datasets(cfg, inputs=["volumes"])
    assert len(dataset) == 1 and listed is None and dataset.masks == [None]
    drawn = []
    split = split_step(cfg, 1)
    steps = list(epoch_batches(cfg, dataset, listed, Progress(), split, Ranks(), drawn.append, ["volumes"]))
    assert [(len(volumes), len(pairs)) for volumes, pairs in steps] == [(1, 0)] and len(drawn) == 1


def test_held_out_volumes_that_cannot_be_paired_are_named_as_such(data, tmp_path):
    rows = [f"{data}/data/imagesTr/subject_000{number}.nii.gz,{'aabbccde'[number]}" for number in range(8)]
    (tmp_path / "list.csv").write_text("\n".join(["image,subject", *rows]))
    cfg = config(data__root=tmp_path / "list.csv", data__pair_subjects="same")
    with pytest.raises(InputError, match="the 2 held-out volumes: data.pair_subjects=same: no pair .*val_fraction=0"):
        read_datasets(cfg, headers_only=True)
    assert len(read_datasets({**cfg, "data.val_ids": ""}, headers_only=True)[0]) == 6


@pytest.mark.parametrize("size", [(18, 22), (12, 16, 20)])
def test_slices_are_whole_planes_and_any_number_of_them(size):
    target = torch.rand(200, 1, *size) + 0.5
    rng_keys = [(0, 0, i) for i in range(200)]
    condition = make_condition(target, "slice", rng_keys)
    values, masks = condition[:, :1], condition[:, 1:]
    assert torch.equal(values, target * masks) and set(masks.unique().tolist()) == {0.0, 1.0}
    counts = []
    for mask in masks[:, 0]:
        planes = [mask.select(axis, i).all() for axis in range(len(size)) for i in range(size[axis])]
        drawn = torch.zeros(size)
        for number, full in enumerate(planes):
            if full:
                axis = next(a for a in range(len(size)) if number < sum(size[:a + 1]))
                drawn.select(axis, number - sum(size[:axis])).fill_(1)
        assert torch.equal(drawn, mask), "a mask is made of whole planes"
        counts.append(int(sum(planes)))
    assert min(counts) == 1 and max(counts) > sum(size) // 2
    assert np.median(counts) < sum(size) ** 0.5 * 2, "few slices are as likely as many, on a log scale"
    assert torch.equal(make_condition(target[7:8], "slice", rng_keys[7:8]), condition[7:8])


@pytest.mark.parametrize("most", [1, 4, 48, 384])
def test_every_number_of_slices_can_be_drawn_all_of_them_too(most):
    draws = 20000
    counts = np.bincount([log_uniform((i + 0.5) / draws, most) for i in range(draws)], minlength=most + 1)
    expected = [0, *[math.log((k + 1) / k) / math.log(most + 1) for k in range(1, most + 1)]]
    assert len(counts) == most + 1 and counts[-1] > 0
    np.testing.assert_allclose(counts / draws, expected, atol=2 / draws)
    assert log_uniform(0.0, most) == 1 and log_uniform(1 - 2 ** -24, most) == most


def test_other_conditions():
    target = torch.rand(2, 1, 6, 7, 8)
    assert make_condition(target, "none") is None
    whole = make_condition(target, "volume")
    assert torch.equal(whole[:, :1], target) and (whole[:, 1:] == 1).all()


@pytest.mark.parametrize("folder, batch, said", [
    ("t" * 130, 1, "TMPDIR is .*too long a path"), ("t", 10 ** 9, "MiB free"),
    pytest.param("/proc", 1, "No usable temporary directory .*export TMPDIR", id="nobody can write there")])
def test_workers_that_could_not_hand_over_a_batch_are_refused(data, tmp_path, monkeypatch, folder, batch, said):
    """torch's feeder thread would fail with no word, and the training wait until its deadline."""
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / folder)])
    cfg = config(data, data__in_memory="false", data__num_workers=1, data__batchsize=batch)
    with pytest.raises(InputError, match=said):
        read_datasets(cfg)
    read_datasets({**cfg, "data.num_workers": 0})


@pytest.mark.slow
def test_a_worker_whose_batch_finds_no_room_says_so():
    """The check at the start counts neither what other programs take later nor the batches that a step still holds."""
    small = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=600k none /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot give a process a small /dev/shm")
    program = ("import numpy as np\nfrom types import SimpleNamespace\nfrom Dataloader.dataset import make_loader\n"
               "from tests.tiny import config\n"
               "data = SimpleNamespace(images=np.zeros((1, 64, 64, 64), np.float32), channels=1)\n"
               "next(iter(make_loader(data, [[(0, 0)]], config(data__in_memory='false', data__num_workers=1))))")
    done = subprocess.run([*small, sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
                          timeout=100)
    assert done.stderr.strip().endswith("InputError: /dev/shm is too small for the batches that loader workers read "
                                        "ahead: make room there, or set data.num_workers to 0."), done.stderr


def test_a_batch_of_pairs_is_counted_with_its_maps():
    cfg = config(data__img_size=10, data__cache="x", data__dtype="uint8", data__channels=2)
    assert batch_bytes(cfg, 4, 1) == 1000 * 4 * 2, "samples"
    assert batch_bytes({**cfg, "loss.dice": 1.0, "registration.masks": True}, 4, 3) == 1000 * 3 * 2 * (2 + 2 * 2)
