"""The one exception for bad input, the test for exhausted memory, and the exit codes of all programs."""
import signal
import sys

# Any other exit code is a crash, after which the launcher tries again.
DONE = 0
PLANNED_RESTART = 42
STOP = 43  # a person is needed


class InputError(ValueError):
    """Something the user gave us is wrong: a file, a key, a checkpoint.

    The message is one sentence that names the input and says what to do. Programs print it without a traceback and
    exit with STOP, which the restart loop does not retry.
    """


def parse_options(parser, argv=None):
    """The options of a command line; what argparse does not understand ends like all bad input, not with its code 2.

    parser: an ArgumentParser. argv: words, None for those of the process.
    """
    def refuse(message):
        print(f"error: {message}; see {parser.prog} --help.", file=sys.stderr)
        sys.exit(STOP)

    parser.error = refuse
    return parser.parse_args(argv)


def is_out_of_memory(error):
    """Whether an exception means exhausted memory: MemoryError of Python and numpy, RuntimeError of torch's devices."""
    if isinstance(error, MemoryError):
        return True
    phrases = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def first_line(error):
    """The first line of an exception's message, since torch adds whole stacks; its type's name if there is none."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def attempt(name, function, *args):
    """Call function(*args), so that one bad input of many does not end the work on the others.

    name: of the input, for the sentence.
    Returns: the result; or the error's sentence where the input is bad or memory too small. Raises other exceptions.
    """
    try:
        return function(*args)
    except InputError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (f"{name}: there is not enough memory ({first_line(error)}); use a smaller volume, fewer workers, or a "
                "device or machine with more.")


def run_program(run, args):
    """Call run(args), a program with its options, of which `out` is where its results go. Returns the exit code."""
    try:
        code = attempt(args.out, run, args)
        if not isinstance(code, str):
            return code
        print(f"error: {code}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror or error}; results cannot be written there.",
              file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: run the same command again, it goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return STOP
