"""Curves and pictures of a run for TensorBoard. What cannot be written waits, and never ends a training."""
import io
import os
import socket
import sys
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from Runtime.files import append_bytes

WAITING = 64 * 2 ** 20  # bytes that wait for room on a full disk; beyond that the oldest are given up


def new_writer(folder, step):
    """A new event file in `folder` that replaces what earlier launches showed from `step` on."""
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    writer = {"path": Path(folder) / name, "waiting": [], "told": False}
    _add(writer, file_version="brain.Event:2")
    _add(writer, step=step, session_log=SessionLog(status=SessionLog.START))
    return writer


def add_scalar(writer, tag, value, step):
    _add(writer, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=float(value))]))


def add_figure(writer, tag, figure, step):
    """A picture of a matplotlib figure."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    width, height = (int(side) for side in figure.get_size_inches() * figure.dpi)
    image = Summary.Image(encoded_image_string=picture.getvalue(), width=width, height=height, colorspace=3)
    _add(writer, step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))


def flush(writer):
    """Write what waits. Where that fails, one line says so, and it is tried again at the next flush."""
    try:
        append_bytes(writer["path"], b"".join(writer["waiting"]))
    except OSError as error:
        if not writer["told"]:
            print(f"TensorBoard: {writer['path']} cannot be written ({error.strerror or error}): the curves wait, the "
                  "training goes on", file=sys.stderr, flush=True)
        writer["told"] = True
        while sum(map(len, writer["waiting"])) > WAITING:
            writer["waiting"].pop(0)
    else:
        writer.update(waiting=[], told=False)


def _add(writer, **content):
    framed = io.BytesIO()
    RecordWriter(framed).write(Event(wall_time=time.time(), **content).SerializeToString())
    writer["waiting"].append(framed.getvalue())
