"""The list of a run's checkpoints, `<run>/manifest.json`, and which of them count. Needs no torch.

An entry is written once the file has been read back: {"epoch", "step", "sha256", "bytes", "weights_sha256", "written",
"metrics"}. Two marks may follow: "damaged", what was wrong when the file was last read, and "doubtful", why a run went
one checkpoint back. What is kept, where a run continues and how far it has come all go by `standing`.
"""
import json
from pathlib import Path

from Runtime.files import sha256


def read_manifest(run):
    """{"checkpoints": {relative path: entry}, "best"}, with a save that was killed after its rename counted in.

    Raises FileNotFoundError where there is none, another OSError where the file system does not answer, and ValueError,
    LookupError, TypeError or AttributeError where the content is damaged.
    """
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    entries, best, pending = manifest["checkpoints"], manifest["best"], manifest.get("pending")
    newest_first(entries)  # an entry without epoch or step makes the manifest unreadable here, not later
    if pending and damage(run / pending["checkpoint"], pending["entry"]) is None:
        entries[pending["checkpoint"]] = pending["entry"]
        best = pending["best"] or best
    return {"checkpoints": entries, "best": best}


def newest_first(entries):
    """Names of all entries by (epoch, step), the newest first; of two at the same step the epoch's comes first."""
    return sorted(entries, reverse=True, key=lambda name: (entries[name]["epoch"], entries[name]["step"],
                                                           not name.startswith("tmp/"), name))


def standing(run, entries):
    """Names of the checkpoints that count, newest first: the file is there in its size, not damaged, not doubtful.

    The content is not read: it was when it was written, and is again when a run continues from it, which then marks
    what it finds damaged.
    """
    return [name for name in newest_first(entries)
            if "damaged" not in entries[name] and "doubtful" not in entries[name]
            and wrong_size(Path(run) / name, entries[name]) is None]


def durable_step(run):
    """Steps of the newest checkpoint that counts; 0 where there is none. Raises OSError as `read_manifest` does."""
    try:
        entries = read_manifest(Path(run))["checkpoints"]
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return 0
    return next((entries[name]["step"] for name in standing(run, entries)), 0)


def wrong_size(path, entry):
    """None where a file is there in the size of its entry, else what is wrong. Raises OSError as `damage` does."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    if size == entry["bytes"]:
        return None
    return f"{'truncated' if size < entry['bytes'] else 'too long'}: {size} of {entry['bytes']} bytes"


def damage(path, entry):
    """None where a file has the size and SHA-256 of its entry, else what is wrong with it.

    Raises OSError where the file system does not give it: that says nothing about the file.
    """
    if wrong := wrong_size(path, entry):
        return wrong
    return None if sha256(path) == entry["sha256"] else "SHA-256 differs"
