"""One atomic write: the old content or the new one, nothing between, whatever ends the writer."""
import contextlib
import errno
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from Runtime.errors import InputError
from Runtime.files import (
    append_line,
    is_there,
    partial_path,
    patiently,
    read_lines,
    remove_leftovers,
    require_apart,
    unfit_for_a_file,
    write_file,
)
from tests import launching
from tests.tiny import ROOT


@pytest.mark.parametrize("content", [b"new", "new", lambda file: file.write(b"new")])
def test_bytes_text_and_functions_are_written_into_a_folder_that_is_made(tmp_path, content):
    path = tmp_path / "a/b/file.txt"
    write_file(path, content)
    write_file(path, content)
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count characters")
def test_the_longest_names_that_a_disk_takes_are_written_and_leave_nothing(tmp_path):
    for name in ("x" * 255, "\u00e9" * 127, "x" * 254 + "y"):
        write_file(tmp_path / name, name)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: name for name in ("x" * 255, "\u00e9" * 127, "x" * 254 + "y")}
    partial = partial_path(tmp_path / ("x" * 255))
    assert partial != partial_path(tmp_path / ("x" * 254 + "y")) and partial.name.startswith(".")
    old = partial.with_name(f"{partial.name.rpartition('-')[0]}-999999999")  # of a process that no machine has
    old.touch()
    assert remove_leftovers(tmp_path) == [old]


@pytest.mark.parametrize("system, name, found", [
    ("linux", "T1:T2", None), ("linux", "a/b", "a slash"), ("win32", "a/b", "a slash"), ("win32", "T1:T2", ":"),
    ("win32", r"C:\pair", ":"), ("win32", r"x\..\y", "\\"), ("win32", "what?", "?"), ("win32", "sub-01_T1 (2)", None),
    ("linux", ".", "only dots"), ("linux", "..", "only dots"), ("linux", "..x", None)])
def test_names_that_the_system_lets_no_file_have(monkeypatch, system, name, found):
    monkeypatch.setattr(sys, "platform", system)
    assert unfit_for_a_file(name) == found


def test_a_writer_that_fails_leaves_the_old_content_and_no_partial_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fill(file):
        file.write(b"half of the new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_file(path, fill)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("number, passes", [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_flush_a_folder_takes_files(tmp_path, monkeypatch, number, passes):
    sizes = []

    def flush(descriptor, flush=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sizes.append(os.fstat(descriptor).st_size)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    with contextlib.nullcontext() if passes else pytest.raises(OSError, match=os.strerror(number)):
        write_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and os.listdir(tmp_path) == ["file"]
    assert sizes == [3], "the file is flushed, once all of it is written"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("write, link", [(write_file, partial_path), (append_line, Path)])
def test_a_full_disk_names_the_file_that_was_wanted(tmp_path, write, link):
    path = tmp_path / "file"
    link(path).symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write(path, "new")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_a_disk_that_becomes_full_in_the_middle_of_an_array_says_so(tmp_path):
    program = ("import resource, signal, sys\nimport numpy as np\nfrom Runtime.files import save_array\n"
               "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
               "resource.setrlimit(resource.RLIMIT_FSIZE, (40000, resource.RLIM_INFINITY))\n"
               "try:\n    save_array(sys.argv[1], np.zeros(10000))\n"
               "except OSError as error:\n    print(error.errno, error.filename)")
    done = launching.run([sys.executable, "-c", program, str(tmp_path / "field.npy")], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"{errno.EFBIG} {tmp_path / 'field.npy'}\n"), done.stderr


def test_a_file_beside_that_cannot_be_written_names_the_file_that_was_wanted(tmp_path):
    """Nor can it be removed, as on a read-only file system."""
    path = tmp_path / "file"
    partial_path(path).mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_file(path, "new")
    assert caught.value.filename == str(path)


def test_a_writer_that_is_killed_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = (f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from Runtime.files import write_file\n"
               "def fill(file):\n    file.write(b'half'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
               f"write_file({str(path)!r}, fill)")
    writer = launching.start([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    left = tmp_path / f".file.tmp-{socket.gethostname()}-{writer.pid}"
    assert left.read_bytes() == b"half" and remove_leftovers(tmp_path) == []  # its owner lives
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert path.read_bytes() == b"old"
    assert remove_leftovers(tmp_path) == [left] and os.listdir(tmp_path) == ["file"]


def test_only_partial_files_without_an_owner_are_removed(tmp_path):
    gone = subprocess.run(["sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True)
    (tmp_path / "tmp").mkdir()
    dead = tmp_path / f".a.pth.tmp-{socket.gethostname()}-{int(gone.stdout)}"
    alive, other_host = partial_path(tmp_path / "tmp/b.pth"), tmp_path / f".d.pth.tmp-other-node-{int(gone.stdout)}"
    old, notes = partial_path(tmp_path / "c.pth"), tmp_path / "notes.tmp-mine"
    for path in (dead, alive, old, notes, other_host):
        path.write_bytes(b"x")
        # One of another host has the number of some process here, but no process writes a file for a day.
        os.utime(path, (time.time() - 90000 * (path in (old, notes)),) * 2)
    assert sorted(remove_leftovers(tmp_path)) == sorted([dead, old])
    assert alive.exists() and other_host.exists() and notes.exists() and not dead.exists() and not old.exists()


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    """A disk that is full in the middle of a line: what was there stays, and a second try adds it once."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"cut')
    program = (f"import resource, sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
               "from Runtime.files import append_line\npath = Path(sys.argv[1])\nbefore = path.read_bytes()\n"
               "resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, resource.RLIM_INFINITY))\n"
               "try:\n    append_line(path, {'b': 'x' * 100})\nexcept OSError as error:\n    print(error.errno)\n"
               "assert path.read_bytes() == before\n"
               "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
               "append_line(path, {'b': 'x' * 100})")
    done = launching.run([sys.executable, "-c", program, str(path)])
    assert (done.returncode, done.stdout.strip()) == (0, str(errno.ENOSPC)), done.stderr
    assert read_lines(path) == [{"a": 1}, {"b": "x" * 100}]


def test_lines_are_read_from_the_end_on_request(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"a": 1}\n{"b": "\xff"}\n{"c": 3}\n{"cut')
    assert read_lines(path) == [{"a": 1}, {"b": "\ufffd"}, {"c": 3}] == read_lines(path, 1000)
    assert read_lines(path / "below a file") == []
    assert read_lines(path, len('{"c": 3}\n{"cut') + 5) == [{"c": 3}], "the line cut by the tail is left out"


def test_only_faults_that_pass_are_waited_for(capsys):
    said = []

    def fails(*errors):
        said.append(len(errors))
        if len(said) <= len(errors):
            raise OSError(errors[len(said) - 1], "it says")
        return "done"

    assert patiently(lambda: fails(errno.ENOSPC, errno.ESTALE), 20, "the disk") == "done"
    assert capsys.readouterr().err == "the disk: it says; tried again for up to 20 s\n"
    for error, seconds, tries in ((errno.EACCES, 20, 1), (errno.EIO, 0, 1), (errno.EIO, 1.2, 3)):
        said.clear()
        with pytest.raises(OSError, match="it says"):
            patiently(lambda error=error: fails(*[error] * 9), seconds, "the disk")
        assert len(said) == tries


def test_a_file_system_that_does_not_answer_is_no_missing_file(tmp_path, monkeypatch):
    """Path.exists says no to a stale handle on Python 3.14, after which the file would be written anew."""
    def stale(path, **options):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    assert not is_there(tmp_path / "none") and not is_there(tmp_path / "none/below") and is_there(tmp_path)
    monkeypatch.setattr(os, "stat", stale)
    with pytest.raises(OSError, match="Stale"):
        is_there(tmp_path)


def test_results_replace_no_input_under_any_name_and_no_file_of_others(tmp_path):
    path, link, hard, gone = [tmp_path / name for name in ("warped.nii.gz", "link", "hard", "gone")]
    path.touch()
    link.symlink_to(path)
    os.link(path, hard)
    gone.symlink_to("nowhere")
    require_apart([path, None, tmp_path / "new"], lambda _: True, [None, tmp_path / "nowhere", gone, tmp_path])
    require_apart([tmp_path, gone], inputs=[path])
    (tmp_path / "other").mkdir()
    elsewhere, copy = tmp_path / "other/link", tmp_path / "other/hard"
    elsewhere.symlink_to(path)
    os.link(path, copy)
    for name in (path, link, hard, elsewhere):
        with pytest.raises(InputError, match=f"{name}: a result with the same name would overwrite this input"):
            require_apart([gone, path], inputs=[name])
    require_apart([path], inputs=[copy])  # the file stays there when a result is renamed into its place
    require_apart([elsewhere], inputs=[path])  # and so does what a link shows
    with pytest.raises(InputError, match="it is a folder of images, and a later run would take the results in it"):
        require_apart([tmp_path], inputs=[tmp_path / "."])
    for theirs, is_own in ((path, lambda _: False), (gone, lambda _: True), (tmp_path, lambda _: True)):
        with pytest.raises(InputError, match=f"{theirs}: it is not of an earlier run, .* and would be replaced"):
            require_apart([theirs], is_own)


def test_a_system_that_lacks_some_errors_has_the_others(monkeypatch):
    """macOS has no EREMOTEIO, Windows no EHOSTDOWN either."""
    for name in ("EREMOTEIO", "EHOSTDOWN"):
        monkeypatch.delattr(errno, name)
    assert errno.EIO in runpy.run_path(str(ROOT / "Runtime/files.py"))["PASSING"]


def test_a_file_that_may_not_be_read_is_named():
    program = """if True:
        import os, sys
        from Runtime.errors import InputError
        from Runtime.files import require_file
        if os.geteuid() == 0:
            os.setuid(65534)  # root may read everything
        for path in sys.argv[1:]:
            try:
                require_file(path)
            except InputError as error:
                print(error)
        """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        paths = [Path(folder) / name for name in ("scan.nii.gz", "closed/scan.nii.gz")]
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"scan")
        paths[0].chmod(0)
        paths[1].parent.chmod(0)
        done = subprocess.run([sys.executable, "-c", program, *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == (
        f"{paths[0]}: this user may not read it; ask its owner to allow it (chmod a+r).\n"
        f"{paths[1]}: this user may not enter its folder or one above it; ask the owner to allow it (chmod a+x).\n")
