"""Curves and pictures of a run for TensorBoard. If they cannot be written they wait, and training continues."""
import io
import os
import socket
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from Runtime.files import append_bytes, write_file

WAITING = 64 * 2 ** 20  # most bytes that wait for space on a full disk; beyond that the oldest are dropped
PICTURES = 4  # the newest ones, which stay in the run folder


def new_writer(folder, step, pictures=None):
    """Begin an event file. TensorBoard then ignores events of earlier launches from `step` on.

    folder: for the events, created at the first `flush`. pictures: a folder for the newest pictures as files, which
    the run's report shows; None for none. Returns: the dict that the functions below take.
    """
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    writer = {"path": Path(folder) / name, "waiting": [], "told": False, "pictures": pictures}
    _add(writer, file_version="brain.Event:2")
    _add(writer, step=step, session_log=SessionLog(status=SessionLog.START))
    return writer


def add_scalar(writer, tag, value, step):
    """Add a point to the curve `tag`. It is written by the next `flush`."""
    _add(writer, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=float(value))]))


def add_figure(writer, tag, figure, step):
    """Add a matplotlib figure as a picture. It is written by the next `flush`, and as one of the newest files now.

    If the disk refuses the file, training continues.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    width, height = (int(side) for side in figure.get_size_inches() * figure.dpi)
    image = Summary.Image(encoded_image_string=picture.getvalue(), width=width, height=height, colorspace=3)
    _add(writer, step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))
    if writer["pictures"] is None:
        return
    path = writer["pictures"] / f"{tag}_{step:08d}.png"
    try:
        write_file(path, picture.getvalue())
        for old in sorted(path.parent.glob("*.png"))[:-PICTURES]:
            old.unlink()
    except OSError as error:
        print(f"{path} was not written ({error.strerror or error}); training continues", file=sys.stderr, flush=True)


def flush(writer):
    """Write all that waits. If that fails, one line on standard error says so, and the next flush retries."""
    try:
        append_bytes(writer["path"], b"".join(writer["waiting"]))
    except OSError as error:
        if not writer["told"]:
            print(f"TensorBoard: {writer['path']} cannot be written ({error.strerror or error}): the curves are "
                  "written later, and training continues", file=sys.stderr, flush=True)
        writer["told"] = True
        while sum(map(len, writer["waiting"])) > WAITING:
            writer["waiting"].pop(0)
    else:
        writer.update(waiting=[], told=False)


def _add(writer, **content):
    framed = io.BytesIO()
    RecordWriter(framed).write(Event(wall_time=time.time(), **content).SerializeToString())
    writer["waiting"].append(framed.getvalue())
