"""Runtime/progress.py: TensorBoard reads what it writes, and a training outlives a folder that takes nothing."""
import os

import numpy as np
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import OM_train_3modes as om
from Runtime import progress
from tests.tiny import QUICK, log_lines, options


def read(folder):
    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_shows_the_curves_and_the_picture(tmp_path):
    curves = progress.new_writer(tmp_path / "deep/run", 0)
    for step in (10, 20):
        progress.add_scalar(curves, "train/ang", -step / 100, step)
        progress.flush(curves)
    figure = Figure(figsize=(3, 2), dpi=50)
    figure.subplots().imshow(np.eye(4))
    progress.add_figure(curves, "registration", figure, 20)
    progress.flush(curves)
    found = read(tmp_path / "deep/run")
    assert [(event.step, event.value) for event in found.Scalars("train/ang")] == [
        (10, pytest.approx(-0.1)), (20, pytest.approx(-0.2))]
    picture, = found.Images("registration")
    assert (picture.step, picture.width, picture.height) == (20, 150, 100)
    assert picture.encoded_image_string.startswith(b"\x89PNG")


def test_a_later_launch_replaces_what_it_does_again(tmp_path):
    for first, value in ((0, 1.0), (30, 2.0)):
        curves = progress.new_writer(tmp_path / "run", first)
        curves["path"] = curves["path"].with_name(f"events.out.tfevents.{1000 + first}.host")
        for step in range(first, 60, 10):
            progress.add_scalar(curves, "loss", value, step)
        progress.flush(curves)
    assert [(event.step, event.value) for event in read(tmp_path / "run").Scalars("loss")] == [
        (0, 1.0), (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]


def test_what_cannot_be_written_waits_and_is_said_once(tmp_path, capsys):
    curves = progress.new_writer(tmp_path / "run", 0)
    progress.add_scalar(curves, "loss", 1, 1)
    (tmp_path / "run").mkdir()
    curves["path"].symlink_to("/dev/full")
    for step in (2, 3):
        progress.add_scalar(curves, "loss", step, step)
        progress.flush(curves)
    said = capsys.readouterr().err
    assert said == f"TensorBoard: {curves['path']} cannot be written (No space left on device): the curves " \
                   "are written later, and training continues\n"
    curves["path"].unlink()
    progress.flush(curves)
    assert [event.step for event in read(tmp_path / "run").Scalars("loss")] == [1, 2, 3]
    size = curves["path"].stat().st_size
    progress.flush(curves)
    assert curves["path"].stat().st_size == size, "and it is written once"


def test_what_waits_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "WAITING", 1000)
    curves = progress.new_writer(tmp_path / "run", 0)
    (tmp_path / "run").write_text("in the way")
    for step in range(100):
        progress.add_scalar(curves, "loss", step, step)
        progress.flush(curves)
    os.remove(tmp_path / "run")
    progress.flush(curves)
    steps = [event.step for event in read(tmp_path / "run").Scalars("loss")]
    assert steps[-1] == 99 and 5 < len(steps) < 30 and steps == list(range(steps[0], 100))


def test_a_training_outlives_a_logs_folder_that_takes_nothing(data, tmp_path, capfd):
    (tmp_path / "Logs").write_text("in the way")
    assert om.main(options(data, tmp_path, **QUICK, run__epochs=1, data__repeats=1)) == 0
    said = capfd.readouterr()
    assert said.err.count("TensorBoard: ") == 1 and "Traceback" not in said.err and "done: 1 epochs" in said.out
    assert log_lines(tmp_path, "epoch")
