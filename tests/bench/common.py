"""What the benchmarks share. Importing it puts the repository on the path."""
import functools
import json
import os
import statistics
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared/data"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the programs set it; scipy is imported later

from Runtime.errors import STOP, InputError  # noqa: E402


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def our_commit(*more):
    """The last commit that changed what registers and draws copies, so that no resumed run mixes two. What is changed
    and not committed adds a number. more: further paths whose code counts."""
    paths = ("Config", "Dataloader", "Diffusion", "Inference", "Runtime/keyed_random.py", "omnimorph", *more)
    changed = git("diff", "HEAD", "--", *paths)
    return git("log", "-1", "--format=%h", "--", *paths) + (f"+{zlib.crc32(changed.encode()):08x}" if changed else "")


def in_one_sentence(main):
    """A main() that ends with STOP and the sentence of an InputError, where it raises one."""
    @functools.wraps(main)
    def ended(argv=None):
        try:
            return main(argv)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return STOP
    return ended


def add_shared(parser, data, name, peers=True, overrides=True):
    """Options that several benchmarks have.

    data: the default of --data. name: of the output folder in Logs. peers, overrides: whether other programs take part,
    and whether our config can be changed.
    """
    if overrides:
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                            help="override a key of our config, such as one of refine.*; may be repeated")
    if peers:
        parser.add_argument("--peers-python", metavar="F", help="interpreter that has requirements-peers.txt")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of every method (%(default)s)")
    parser.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="the volumes (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue what the output folder holds")
    parser.add_argument("--out", type=Path, default=ROOT / "Logs" / name, metavar="FOLDER")


def hippocampus(folder):
    """Overrides that name the hippocampus data, or synthetic volumes of that size, written to `folder`, if absent."""
    if (DATA / "hippocampus").is_dir():
        return [f"data.root={DATA / 'hippocampus'}"]
    from Dataloader.synthetic import write_dataset  # here: an environment of peers lacks what it imports
    write_dataset(folder, range(1, 51), (36, 50, 36))
    return [f"data.root={folder}", "data.train_ids=1-38", "data.val_ids=39-50", "data.expect_samples=38"]


def interval(values):
    """Mean of some numbers, and the ends of its 95 % interval by Student's t; None where there is one number only."""
    from scipy import stats  # here: after OPENBLAS_NUM_THREADS is set, and only where it is needed
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    reach = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean, float(mean - reach), float(mean + reach)


def kept_json(path, settings, resume):
    """The content of a .json file if the same settings made it, else {}."""
    if not (resume and path.is_file()):
        return {}
    found = json.loads(path.read_text())
    return found if found.get("settings") == json.loads(json.dumps(settings)) else {}
