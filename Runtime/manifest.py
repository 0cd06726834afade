"""The list of a run's checkpoints, `<run>/manifest.json`, and which of them count. Needs no torch.

An entry is written once the file has been read back: {"epoch", "step", "sha256", "bytes", "weights_sha256", "written",
"metrics"}, and "score" if it may be the best. Two marks may be added: "damaged", the fault that the last read of the
file found, and "doubtful", the reason why a run went back one checkpoint. `standing` decides what is kept, where a run
resumes and how far it is.
"""
import json

from Runtime.files import listed, sha256, write_file
from Runtime.run_lock import assert_held

# What `read_manifest` raises if the manifest is missing or damaged. Any other OSError says nothing about it.
LOST = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

KINDS = {"epoch": int, "step": int, "bytes": int, "sha256": str, "weights_sha256": str}  # types of an entry's values


def read_manifest(run):
    """{"checkpoints": {relative path: entry}, "best"}, including a save that was killed after its rename.

    Raises one of LOST if the manifest is missing or damaged, another OSError if the file system does not respond.
    """
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    entries, best = manifest["checkpoints"], manifest["best"]
    pending = manifest.get("pending")
    newest_first(entries)  # a malformed entry counts as damage here, not later
    for name, entry in entries.items():
        if any(type(entry.get(key, kind())) is not kind for key, kind in KINDS.items()):
            raise ValueError(f"the entry of {name} is damaged")
    scores = [entry["score"] for entry in entries.values() if "score" in entry]
    for score in scores if best is None else [best, *scores]:
        if not (type(score["value"]) in (int, float) and isinstance(score["metric"], str)
                and score["checkpoint"] in entries):
            raise ValueError("its best checkpoint is none" if score is best else "a score is damaged")
    if pending and damage(run / pending["checkpoint"], pending["entry"]) is None:
        entries[pending["checkpoint"]] = pending["entry"]
        best = pending["best"] or best
    return {"checkpoints": entries, "best": best}


def newest_first(entries):
    """Names of all entries by (epoch, step), newest first; at the same step, the epoch checkpoint comes first."""
    return sorted(entries, reverse=True, key=lambda name: (
        entries[name]["epoch"], entries[name]["step"], not name.startswith("tmp/"), name))


def standing(run, entries):
    """Names of the checkpoints that count, newest first: not damaged, not doubtful, and the file has its listed size.

    The content is not read here. It is read back after the write, and again when a run resumes from it and marks
    damaged files.
    """
    return [name for name in newest_first(entries)
            if "damaged" not in entries[name] and "doubtful" not in entries[name]
            and wrong_size(run / name, entries[name]) is None]


def durable(run):
    """Entries of the checkpoints that count, newest first. Raises OSError as `read_manifest` does."""
    try:
        entries = read_manifest(run)["checkpoints"]
    except LOST:
        return []
    return [entries[name] for name in standing(run, entries)]


def durable_step(run):
    """Step of the newest checkpoint that counts; 0 if there is none. Raises OSError as `read_manifest` does."""
    return next((entry["step"] for entry in durable(run)), 0)


def checkpoint_files(run):
    """Relative paths of all checkpoint files, in the manifest or not. Raises OSError as `listed` does."""
    paths = [path for path in (*listed(run), *listed(run / "tmp")) if path.name.endswith(".pth")]
    return sorted(path.relative_to(run).as_posix() for path in paths)


def new_best(run, manifest, relative, entry):
    """The manifest's best after `relative` is saved: the highest score with the metric and data of the latest one.

    A score does not count if its weights are gone: the file is lost, or the epoch was trained again. Nor does a Dice of
    labels that were corrected since, which the Dice without registration shows. None without any.
    """
    before, best = manifest["checkpoints"], manifest["best"]
    files = {name: each for name, each in before.items() if not wrong_size(run / name, each)} | {relative: entry}
    scores = [each["score"] for each in files.values() if "score" in each]
    # Older versions stored the best score in no entry. It stays valid while its file holds the same weights.
    name = best and best["checkpoint"]
    if name in files and files[name].get("weights_sha256") == before[name].get("weights_sha256"):
        scores = [best, *scores]
    last = entry.get("score") or best or {}
    metrics = {name: each.get("metrics") or {} for name, each in {**before, relative: entry}.items()}
    alike = [score for score in scores if all(score.get(key) == last.get(key) for key in ("metric", "measured_on"))
             and (last["metric"] != "val_dice"
                  or is_near(*(metrics[one["checkpoint"]].get("val_dice_before") for one in (score, last))))]
    return max(alike, key=lambda score: score["value"], default=None)


def is_near(one, other):
    """Whether two numbers differ by no more than the rounding of another machine; True if either is None."""
    return None in (one, other) or abs(one - other) < 1e-4


def trust_again(run, reason):
    """Remove the marks "doubtful" with this reason. Only for the process that holds the folder's lock."""
    try:
        manifest = read_manifest(run)
    except LOST:
        return
    marked = [entry for entry in manifest["checkpoints"].values() if entry.get("doubtful") == reason]
    for entry in marked:
        del entry["doubtful"]
    if marked:
        write_manifest(run, manifest)


def write_manifest(run, manifest):
    """Write the manifest atomically. Raises TakenOver if another launch has the folder."""
    assert_held(run)
    write_file(run / "manifest.json", json.dumps(manifest, indent=2, allow_nan=False))


def wrong_size(path, entry):
    """None if a file has the size of its entry, else a phrase. Raises OSError as `damage` does."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    if size == entry["bytes"]:
        return None
    return f"{'truncated' if size < entry['bytes'] else 'too long'}: {size} of {entry['bytes']} bytes"


def damage(path, entry):
    """None if a file has the size and SHA-256 of its entry, else a phrase that says what is wrong.

    Raises OSError if the file system does not deliver the file: that says nothing about its content.
    """
    if wrong := wrong_size(path, entry):
        return wrong
    return None if sha256(path) == entry["sha256"] else "SHA-256 differs"
