"""Write synthetic anatomies as a data set: several views of each, with labels, in random contrasts.

    python Scripts/make_anatomies.py --out Models/universal/anatomies [--count 200] [--views 4] [--workers 2]

Dataloader/anatomies.py describes them. Each view is deformed by a field of mode 1 (diffusion.* keys of --config) at a
random time. dataset.json names the volumes, their labels, their anatomy as the subject and their contrast as the
modality, so that data.pair_subjects and data.pair_modalities choose the pairs. A volume depends only on the seed, its
numbers, the size and the config. After a kill, run the same command again to continue. Exit codes: 0 done, 43 bad
input.
"""
import argparse
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import Runtime  # noqa: E402, F401  before third-party packages: an outdated Python stops here with one sentence

# isort: split
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from Dataloader.anatomies import LEAST_SIDE, MOST_LABELS, contrast_of, label_map, make_view  # noqa: E402
from Dataloader.nifti import write_volume  # noqa: E402
from Diffusion.diffuser import DeformDDPM  # noqa: E402
from Runtime.config import load_config  # noqa: E402
from Runtime.errors import DONE, InputError, parse_options, run_program  # noqa: E402
from Runtime.files import write_file  # noqa: E402
from Runtime.keyed_random import uniform  # noqa: E402
from Runtime.workers import run_tasks  # noqa: E402

CONFIG = ROOT / "Config/config_universal.yaml"
MADE = "anatomies.json"  # beside dataset.json: the settings of the volumes


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Write synthetic anatomies in several views each, with labels.")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the data set goes")
    parser.add_argument("--count", type=int, default=200, help="anatomies (%(default)s)")
    parser.add_argument("--views", type=int, default=4, help="volumes of each, two in every contrast (%(default)s)")
    parser.add_argument("--size", type=int, nargs="+", default=[80], help="voxels of an anatomy's own grid, one number "
                        "or one per axis (80)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the anatomies (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes with one thread each "
                        "(%(default)s)")
    parser.add_argument("--config", default=CONFIG, help=f"whose model.dims and diffusion.* are taken ({CONFIG.name})")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override keys of it")
    return parse_options(parser, argv)


def check_arguments(args, dims):
    """Raise InputError for numbers that are too small. Returns: the size, one number per axis."""
    for name, value, least in (("--count", args.count, 1), ("--views", args.views, 2), ("--workers", args.workers, 1),
                               ("--seed", args.seed, 0), ("--size", min(args.size), LEAST_SIDE)):
        if value < least:
            raise InputError(f"{name} {value}: give at least {least}.")
    if len(args.size) not in (1, dims):
        raise InputError(f"--size {' '.join(map(str, args.size))}: give one number, or {dims} (model.dims).")
    return args.size * dims if len(args.size) == 1 else args.size


def names(number, views):
    """The file names of the views of an anatomy."""
    return [f"anatomy_{number:05d}_v{view}.nii.gz" for view in range(views)]


def write_anatomy(folder, number, views, size, seed, cfg):
    """Write the missing views of an anatomy. A view with an image is complete, because its label is written first."""
    torch.set_num_threads(1)  # bitwise the same for any number of workers
    label = None
    for view, name in enumerate(names(number, views)):
        if (folder / "imagesTr" / name).exists():
            continue
        label = label_map(seed, number, size) if label is None else label
        key = (seed, number, view)
        time = 1 + int(uniform([key], "time of a view").item() * (cfg["diffusion.timesteps"] - 1))
        field = DeformDDPM(cfg).draw_image_field(size, [time], [key], torch.device("cpu"))[0].numpy()
        made = make_view(label, field, seed, number, view)
        write_volume(folder / "labelsTr" / name, made["label"], made["affine"])
        write_volume(folder / "imagesTr" / name, made["image"], made["affine"])


def content_of(args, dims):
    """The content of dataset.json."""
    rows = [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}", "subject": name.rpartition("_")[0],
             "modality": f"contrast {contrast_of(view)}"}
            for number in range(args.count) for view, name in enumerate(names(number, args.views))]
    labels = {"0": "background", **{str(label): f"structure {label}" for label in range(1, MOST_LABELS + 1)}}
    return {"name": "Anatomies", "description": "Synthetic anatomies, made by Scripts/make_anatomies.py",
            "tensorImageSize": f"{dims}D", "modality": {"0": "synthetic"}, "labels": labels, "numTraining": len(rows),
            "numTest": 0, "test": [], "training": rows}


def write_anatomies(args):
    """Write everything that is missing, then the list. Returns the exit code."""
    cfg = load_config(args.config, args.overrides)
    size = check_arguments(args, cfg["model.dims"])
    drawn_by = {key: value for key, value in cfg.items() if key.startswith("diffusion.")}
    # Not their number: more can be made later, and the first ones stay.
    path, settings = args.out / MADE, json.dumps({"seed": args.seed, "size": size, **drawn_by}, indent=1) + "\n"
    if path.exists() and path.read_text() != settings:
        raise InputError(f"{args.out}: these anatomies were made with other settings ({path}); repeat these, or choose "
                         "another --out.")
    write_file(path, settings)
    tasks = [(args.out, number, args.views, size, args.seed, cfg) for number in range(args.count)
             if not all((args.out / "imagesTr" / name).exists() for name in names(number, args.views))]
    with tqdm(total=args.count, initial=args.count - len(tasks), desc=f"writing {args.out}", unit="anatomy") as bar:
        in_parallel = args.workers > 1 and len(tasks) > 1
        for _ in (run_tasks(write_anatomy, tasks, args.workers, args.out) if in_parallel
                  else itertools.starmap(write_anatomy, tasks)):
            bar.update()
    write_file(args.out / "dataset.json", json.dumps(content_of(args, cfg["model.dims"]), indent=1) + "\n")
    print(f"{args.out / 'dataset.json'}: {args.count} anatomies in {args.views} views each")
    return DONE


def main(argv=None):
    return run_program(write_anatomies, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
