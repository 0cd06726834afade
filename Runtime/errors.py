"""The one exception for bad input; and how to know a want of memory."""


class InputError(ValueError):
    """Something the user gave us is wrong: a file, a key, a checkpoint.

    The message is one sentence that names the thing and says what to do. The scripts print it without a
    traceback and exit with STOP, which the restart loop does not retry.
    """


def is_out_of_memory(error):
    """Whether an exception says that memory could not be had: Python's and numpy's own, and torch's on any device."""
    said = str(error)
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(
        words in said for words in ("out of memory", "can't allocate memory", "not enough memory"))


def first_line(error):
    """What an exception says, as one line: torch adds whole stacks. Of one that says nothing, its name."""
    return str(error).strip().split("\n")[0] or type(error).__name__


DONE = 0
PLANNED_RESTART = 42
STOP = 43
