"""The one exception for bad input, the test for exhausted memory, and the exit codes of all programs."""
import contextlib
import ctypes
import errno
import functools
import os
import signal
import sys

# Any other exit code is a crash, after which the launcher tries again.
DONE = 0
PLANNED_RESTART = 42
STOP = 43  # a person is needed
INTERRUPTED = "interrupted: run the same command again to continue"

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


class InputError(ValueError):
    """Something the user gave us is wrong: a file, a key, a checkpoint.

    The message is one sentence that names the input and says what to do. Programs print it without a traceback and
    exit with STOP, which the restart loop does not retry.
    """

    def __init__(self, sentence):
        # Text from a file may contain characters that break the line or move the terminal's cursor.
        super().__init__("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in sentence))


class MemoryShort(InputError):
    """There is not enough memory for an input now; there may be later, or on another machine."""


def parse_options(parser, argv=None, subcommands=()):
    """Parse a command line. What argparse refuses ends like all bad input: with STOP, not with argparse's code 2.

    parser: an ArgumentParser. argv: words, None for sys.argv. subcommands: the parsers of its subcommands, if any.
    """
    def refuse(program, message):
        print(f"error: {message}; see {program} --help.", file=sys.stderr)
        sys.exit(STOP)

    for each in (parser, *subcommands):
        each.error = functools.partial(refuse, each.prog)
    with unbreakable_output():  # --help | true, or a refusal onto a full disk
        return parser.parse_args(argv)


def is_out_of_memory(error):
    """Whether an exception means exhausted memory: MemoryError of Python and numpy, RuntimeError of torch's devices."""
    if isinstance(error, MemoryError):
        return True
    phrases = ("out of memory", "can't allocate memory", "not enough memory", "out_of_resources",
               "out_of_device_memory", "status_alloc_failed")
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in phrases)


def first_line(error):
    """The first line of an exception's message, since torch adds whole stacks; the type's name if it is empty."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def fault_of(error, what):
    """"path: reason" of an OSError, for a message. what: stands for the path if the error has none."""
    path = error.filename
    if isinstance(error, FileExistsError) and path and os.path.islink(path):  # for a folder that makedirs should make
        return f"{path}: a link to {os.readlink(path)}, which is no folder"
    return f"{path or what}: {error.strerror or error}"


def ranges(numbers):
    """[0, 1, 2, 5] becomes "0-2, 5"."""
    parts = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def attempt(name, function, *args):
    """Call function(*args) so that one bad input does not stop the work on the others.

    name: name of the input, for the sentence.
    Returns: the result, or a sentence if the input is bad or memory runs out. Raises other exceptions.
    """
    try:
        return function(*args)
    except InputError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if "busy or unavailable" in str(error):  # of a GPU in the mode "exclusive process"
            return f"{name}: another process holds the GPU ({first_line(error)}); wait for it, or name --device cpu."
        if not is_out_of_memory(error):
            raise
        return (f"{name}: there is not enough memory ({first_line(error)}); use a smaller volume, fewer workers, or a "
                "device or machine with more.")


class OutputFault(Exception):
    """Standard output cannot be written. Not an OSError, which `run_program` would blame on the results."""


class Unbreakable:
    """A stream that drops what a full disk or a closed terminal refuses, instead of raising OSError.

    fault: exception to raise from that OSError instead of dropping the text; None drops it.
    """

    def __init__(self, stream, fault=None):
        self.stream, self.fault = stream, fault

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self):
        self._attempt(self.stream.flush)

    def _attempt(self, action, *words):
        try:
            action(*words)
        except OSError as error:
            if self.fault:
                raise self.fault from error


def take_all_names():
    """Have standard output escape characters that its encoding lacks, so that printing a file name never fails.

    A missing stream, as under pythonw.exe, is replaced by one that discards everything.
    """
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w", errors="replace") for stream in (sys.stdout, sys.stderr))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def unbreakable_output(fault=None):
    """Context in which output that a full disk or a closed terminal refuses does not end the program. fault: exception
    to raise if that happens to standard output, which is the result of some programs."""
    take_all_names()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Unbreakable(sys.stdout, fault), Unbreakable(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:  # Python would try again when it ends, and exit with 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def keep_freed_memory(keep=True):
    """Have glibc keep freed memory for this process's next tensors or, with keep=False, return it as usual.

    By default glibc returns each block of 32 MiB or more to Linux at once and gets it back page by page, which takes a
    tenth of the time for a pair of brains and a fifth of a training step at 96^3. Keeping it costs up to 50 % more
    memory.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0 if keep else 65536)
        libc.mallopt(M_TRIM_THRESHOLD, -1 if keep else 2 ** 17)


@unbreakable_output(OutputFault)
def run_program(run, args, out=None):
    """Call run(args) and turn errors into one sentence. Returns the exit code.

    out: where the results go, for the messages; None takes args.out.
    """
    keep_freed_memory()
    out = str(args.out if out is None else out)
    # Read when numpy is imported, which is later. The threads of OpenBLAS wait for each other ten times longer than the
    # small matrices of scipy's optimiser take: half a second of a pair on two cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = attempt(out, run, args)
        if isinstance(code, str):
            print(f"error: {code}", file=sys.stderr)
            code = STOP
        sys.stdout.flush()  # not after this function, where a fault would have no sentence
        return code
    except OutputFault as fault:
        error = fault.__cause__
        if isinstance(error, BrokenPipeError):  # the reader of the output, such as head, has closed it
            return 128 + getattr(signal, "SIGPIPE", 13)  # Windows has none
        print(f"error: standard output: {error.strerror or error}; make room, or redirect it elsewhere.",
              file=sys.stderr)
    except OSError as error:
        named = error.filename2 or error.filename
        path = str(named or out)
        out, where = (os.path.join(os.path.abspath(name), "") for name in (out, path))
        full, own = error.errno in (errno.ENOSPC, errno.EDQUOT), bool(named) and where.startswith(out)
        of_disk = full or error.errno == errno.EROFS  # met by what is written alone
        cannot = "results cannot be written there" if own or of_disk else "it cannot be read or written"
        remedies = ["make room"] * full
        if hasattr(args, "out") and (own or of_disk and out.startswith(where)):  # the place, or a folder above it
            remedies.append("name another --out")
        if error.errno == errno.ENAMETOOLONG:  # a result is named after its volumes
            remedies = ["shorten the names of the volumes"]
        if error.errno == errno.EFBIG:
            remedies = ["raise this shell's limit on the size of a file (ulimit -f), or use a file system without one"]
        advice = f"; {' or '.join(remedies)}" if remedies else ""
        print(f"error: {path}: {error.strerror or error}; {cannot}{advice}.", file=sys.stderr)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 128 + signal.SIGINT
    return STOP
