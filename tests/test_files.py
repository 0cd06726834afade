"""One atomic write: the old content or the new one, nothing between, whatever ends the writer."""
import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from Runtime.files import partial_path, remove_leftovers, sha256, write_file
from tests.tiny import ROOT


@pytest.mark.parametrize("content", [b"new", "new", lambda file: file.write(b"new")])
def test_bytes_text_and_functions_are_written_into_a_folder_that_is_made(tmp_path, content):
    path = tmp_path / "a/b/file.txt"
    write_file(path, content)
    write_file(path, content)
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_writer_that_fails_leaves_the_old_content_and_no_partial_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fill(file):
        file.write(b"half of the new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_file(path, fill)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_writer_that_is_killed_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = (f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from Runtime.files import write_file\n"
               "def fill(file):\n    file.write(b'half'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
               f"write_file({str(path)!r}, fill)")
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    left = tmp_path / f".file.tmp-{writer.pid}"
    assert left.read_bytes() == b"half" and remove_leftovers(tmp_path) == []  # its owner lives
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert path.read_bytes() == b"old"
    assert remove_leftovers(tmp_path) == [left] and os.listdir(tmp_path) == ["file"]


def test_only_partial_files_without_an_owner_are_removed(tmp_path):
    gone = subprocess.run(["sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True)
    (tmp_path / "tmp").mkdir()
    dead, alive = tmp_path / f".a.pth.tmp-{int(gone.stdout)}", partial_path(tmp_path / "tmp/b.pth")
    old, notes = partial_path(tmp_path / "c.pth"), tmp_path / "notes.tmp-mine"
    for path in (dead, alive, old, notes):
        path.write_bytes(b"x")
        # One of another host has the number of some process here, but no process writes a file for a day.
        os.utime(path, (time.time() - 90000 * (path in (old, notes)),) * 2)
    assert sorted(remove_leftovers(tmp_path)) == sorted([dead, old])
    assert alive.exists() and notes.exists() and not dead.exists() and not old.exists()


def test_sha256_is_that_of_the_content(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file").startswith("ba7816bf8f01cfea414140de5dae2223")
