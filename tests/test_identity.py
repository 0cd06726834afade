"""A run knows its data: it goes on with those it was trained on, with more of them, and not with others."""
import json
import re
import shutil

import pytest
import torch

import OM_train_3modes as om
from Dataloader.datalist import subject_key
from Dataloader.dataset import (
    as_csv,
    compare_data,
    describe_data,
    read_datasets,
    require_same_everywhere,
    with_gone,
)
from Dataloader.synthetic import write_dataset
from Runtime import checkpoint, launch
from Runtime.errors import InputError
from tests import warm
from tests.tiny import QUICK, arguments, config, log_lines, make_data, prepare


def join_and_compare():
    """What two ranks do that read the same data, and then others."""
    ranks = launch.environment()
    launch.rendezvous(ranks, 60)
    launch.join(ranks, torch.device("cpu"), config())
    require_same_everywhere(ranks, "these")
    try:
        require_same_everywhere(ranks, f"those of rank {ranks.rank}")
    except ValueError as error:
        print(error, flush=True)
    launch.leave(ranks)


def data_of(train, val=(), name="brains"):
    """What a checkpoint keeps of data. train, val: lists of (id, bytes); the subject is the id before its last _."""
    rows = [[identity, identity.rpartition("_")[0] or identity, split, size]
            for split, volumes in (("train", train), ("val", val)) for identity, size in volumes]
    return json.dumps({"name": name, "volumes": rows})


SOME = [(f"p{number}_1", 100 + number) for number in range(8)]


def test_the_same_data_say_nothing_and_added_ones_say_what():
    before = data_of(SOME, [("q_1", 7)])
    assert compare_data(before, before, "F") == (False, [])
    more = data_of([*SOME, ("r_1", 5), ("r_2", 5)], [("q_1", 7)])
    assert compare_data(before, more, "F") == (True, ["volumes added: 2 (r_1, r_2)"])
    assert compare_data(more, before, "F") == (True, ["volumes gone: 2 (r_1, r_2)"])
    assert compare_data(before, data_of(SOME, [("q_1", 7), ("q_2", 7)]), "F") == (False, ["volumes added: 1 (q_2)"])
    changed = data_of([("p0_1", 999), *SOME[1:]], [("q_1", 7)])
    assert compare_data(before, changed, "F") == (False, ["volumes of other content: 1 (p0_1)"])
    assert compare_data(before, data_of([*SOME, ("q_1", 7)]), "F") == (
        True, ["volumes trained on instead of held out: 1 (q_1)"])


@pytest.mark.parametrize("now, said", [
    ([(name, size + 1) for name, size in SOME], "of its 8 volumes, 0 are among the 8 of this data set"),
    ([(f"other_{number}", 100) for number in range(9)], "of its 8 volumes, 0 are among the 9"),
    (SOME[:3], "of its 8 volumes, 3 are among the 3"),
])
def test_other_data_of_the_same_name_are_refused(now, said):
    with pytest.raises(InputError, match=f"F was trained on different data with the same name brains: {said}.*--fresh"):
        compare_data(data_of(SOME), data_of(now), "F")
    assert compare_data(data_of(SOME), data_of(SOME[:4]), "F")[0], "half of them is enough"


def test_whoever_was_trained_on_is_not_held_out_later():
    with pytest.raises(InputError, match="F was trained on p1, p2, which would now be held out for validation"):
        compare_data(data_of(SOME), data_of([*SOME[:1], *SOME[3:]], SOME[1:3]), "F")
    with pytest.raises(InputError, match="F was trained on p1, which would now"):  # another scan of the same subject
        compare_data(data_of(SOME), data_of(SOME[2:], [("p1_2", 5)]), "F")


def test_nor_is_one_that_left_the_training_in_between():
    seen = with_gone(data_of(SOME), data_of(SOME[1:]))
    seen = with_gone(seen, data_of(SOME[1:], [("q_1", 7)]))
    assert compare_data(seen, data_of(SOME[1:]), "F") == (False, ["volumes gone: 1 (q_1)"])
    with pytest.raises(InputError, match="F was trained on p0, which would now be held out for validation"):
        compare_data(seen, data_of(SOME[1:], SOME[:1]), "F")
    assert compare_data(seen, data_of(SOME), "F") == (True, ["volumes added: 1 (p0_1)", "volumes gone: 1 (q_1)"])
    assert with_gone(seen, data_of(SOME)) == data_of(SOME)


def test_nor_is_a_volume_that_has_another_subject_by_then():
    before = json.dumps({"name": "brains", "volumes": [[one, one, "train", size] for one, size in SOME]})
    with pytest.raises(InputError, match="F was trained on p1_1, p2_1, which would now be held out for validation: "
                       r"subjects have other names now \(.* is of p., and was of p._.\), from another data.sub"):
        compare_data(before, data_of([*SOME[:1], *SOME[3:]], SOME[1:3]), "F")
    reordered, said = compare_data(before, data_of(SOME, [("q_1", 7)]), "F")
    assert not reordered and [line.split(" (")[0] for line in said] == [
        "volumes added: 1", f"volumes of another subject: {len(SOME)}"]


def test_what_is_kept_does_not_depend_on_where_the_files_are(data, tmp_path):
    shutil.copytree(data, tmp_path / "copy")
    cfg, cache = config(data), prepare(data, tmp_path / "cache")
    kept, copied, cached = (describe_data(cfg, *read_datasets(other)[:2]) for other in (
        cfg, config(tmp_path / "copy"), config(data, data__cache=cache)))
    assert kept == copied == cached and json.loads(kept)["name"] == "demo"
    lines = as_csv(kept).splitlines()
    size = (data / "data/imagesTr/subject_0006.nii.gz").stat().st_size
    assert lines[0] == "id,subject,split,bytes" and lines[7] == f"subject_0006,subject_0006,val,{size}"
    assert len(lines) == 9


def train(folder, *more, **changes):
    return om.main(arguments(folder, *more, **{**QUICK, **changes}))


@pytest.mark.slow
def test_a_data_set_that_grew_goes_on_with_the_next_epoch_and_another_is_refused(tmp_path, capfd):
    make_data(tmp_path, 8, 8)
    assert train(tmp_path, "--max-steps-before-restart", "2", data__train_ids="0-5,8-9") == 42
    run = tmp_path / "Models/demo_om_net"
    assert (run / "data.csv").read_text() == as_csv(checkpoint.load(run / checkpoint.newest(run))["data"])
    write_dataset(tmp_path / "data", range(10), 8)
    capfd.readouterr()
    assert train(tmp_path, "--max-steps-before-restart", "1", data__train_ids="0-5,8-9") == 42
    out = capfd.readouterr().out
    assert re.search(r"continuing from .*, epoch 2, step 2\n", out), "counted as in the bars"
    assert "changed since the checkpoint: volumes added: 2 (subject_0008, subject_0009)" in out
    assert "changed since the checkpoint: the order of the volumes: training continues from the start of epoch 2" in out
    assert [(line["epoch"], line["step"]) for line in log_lines(tmp_path, "step")] == [(0, 0), (0, 1), (1, 2)]
    state = checkpoint.load(run / checkpoint.newest(run))
    assert (state["epoch"], state["step_in_epoch"], state["samples"]) == (1, 1, 2)
    assert len((run / "data.csv").read_text().splitlines()) == 11
    another = {"run__epochs": 3, "run__seed": 7}
    assert train(tmp_path, "--max-steps-before-restart", "1", data__train_ids="0-5,8-9", **another) == 42
    assert "training continues from the start of epoch 3" in capfd.readouterr().out, "another seed, another order"
    shutil.rmtree(tmp_path / "data")
    write_dataset(tmp_path / "data", range(8), 9)  # the same names
    assert train(tmp_path, data__train_ids="0-5") == 43
    said = capfd.readouterr().err
    assert "was trained on different data with the same name demo: of its 10 volumes, 0 are among the 8" in said
    assert train(tmp_path, "--fresh", "--max-steps-before-restart", "1") == 42


def test_without_ids_some_subjects_are_held_out_and_the_run_has_the_name_of_its_data(tmp_path):
    make_data(tmp_path, 12, 8)
    changes = {"data__name": "", "data__train_ids": "", "data__val_ids": "", "data__val_fraction": 0.05}
    assert train(tmp_path, "--max-steps-before-restart", "1", **changes) == 42
    run = tmp_path / "Models/data_om_net"
    assert checkpoint.newest(run) == "tmp/000000_step0001_data_om_net.pth"
    rows = [line.split(",") for line in (run / "data.csv").read_text().splitlines()]
    assert sorted(row[2] for row in rows[1:]) == ["train"] * 10 + ["val"] * 2


def test_other_volumes_of_a_subject_are_no_negatives(tmp_path):
    """A queue full of other scans of the batch's subject is as good as empty; one of another subject's is not."""
    make_data(tmp_path, 6, 8)
    rows = [f"data/imagesTr/subject_000{number}.nii.gz,{'ab'[number // 3]}" for number in range(6)]
    (tmp_path / "list.csv").write_text("\n".join(["image,subject", *rows]) + "\n")
    cfg = config(tmp_path, data__root=tmp_path / "list.csv", data__val_ids="", data__train_ids="0-5", **QUICK)
    dataset = read_datasets(cfg)[0]
    assert dataset.subjects.tolist() == [subject_key("a")] * 3 + [subject_key("b")] * 3
    net, ddpm = om.build_network(cfg), om.DeformDDPM(cfg)
    batch = om.deform_batch(torch.stack([dataset.image(0), dataset.image(1)]), [(0, 0, 0), (0, 0, 1)], ddpm, cfg)
    for subject, lost in (("a", True), ("b", False)):
        queue, filled = om.embeddings.new_queue(cfg, "cpu"), torch.nn.functional.normalize(torch.randn(2, 2, 8), dim=2)
        om.embeddings.push(queue, *filled, torch.tensor([subject_key(subject)] * 2))
        known = {**batch, "subjects": dataset.subjects[:2], "queue": queue, "targets": None}
        loss = om.step_contrastive(net, known, cfg)[0].item()
        assert (loss == 0.0) is lost


def test_ranks_that_read_other_data_are_named(tmp_path):
    said = "rank 1 of 2 reads different data from rank 0: data.root and data.cache must be the same on"
    with warm.ranks(2, tmp_path / "log", [], target=join_and_compare) as ranks:
        assert warm.codes(ranks, 90) == [0, 0], (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count(said) == 2
