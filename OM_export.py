"""Export a trained network: a folder with its weights, config and model card, laid out for a model hub.

    python OM_export.py --model Models/all_om_net [--out FOLDER] [--licence "CC-BY-SA 4.0"]

From a run's folder it takes the best checkpoint, else the newest. It exports the weights that registration and
augmentation use: the averaged ones, if the training kept them. The file also holds the config, so every tool accepts
it, or the folder, as --model; the keys in PLACES, which belong to this machine, are left out. Needs safetensors
(requirements-export.txt). Exit codes: 0 done, 43 bad input.
"""
import Runtime.unix  # noqa: F401  first: an outdated Python, or Windows, stops here with one sentence

# isort: split
import argparse
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
from pathlib import Path

from Inference.choices import EXPORTED, HUB, no_model
from Report.page import markdown_table
from Report.run import differing_keys
from Report.run_logs import launches_behind, lines_of, read_launches
from Runtime.config import modes_of, overridden
from Runtime.errors import DONE, InputError, parse_options, run_program
from Runtime.files import (
    beside,
    is_unedited,
    remove_leftovers,
    replace,
    require_apart,
    sha256,
    signed,
    write_file,
    write_flushed,
)
from Runtime.manifest import LOST, read_manifest
from Runtime.provenance import began_from
from Runtime.run_lock import settings_in

UNSTATED = "not stated; name it with --licence, and check the terms of the training data"
PUBLISHED_LICENCE = "Apache-2.0"  # of the published method's repository, its weights included
PUBLISHED = """Trained by its authors: Zheng, Mo, Sun, Li, Wu, Wang, Vincent, Papież, "Deformation-recovery diffusion
model (DRDM): instance deformation for image manipulation and synthesis", Medical Image Analysis 110 (2026) 103987;
weights from github.com/jianqingzheng/def_diff_rec. The file does not record how long and on which data."""
REGISTER = """\
    omnimorph register {pair} --model FOLDER --affine none --refine 0 --out Results/fast
    omnimorph register {pair} --model FOLDER --out Results/pair
"""
CONFIG, PAGE = "config.json", "README.md"  # beside EXPORTED; a hub displays PAGE and counts downloads by CONFIG
# The last one may hold a secret address.
PLACES = ("data.root", "data.cache", "data.pair_list", "data.stage", "run.models", "run.logs", "run.notify")
# What the card says about each mode of a training.
SENTENCES = {"diffusion": "Diffusion: a volume is deformed at random, and the network undoes the deformation, seeing "
             "{condition}.",
             "contrastive": "Contrastive: the embedding of a deformed volume is close to that of its own condition, "
             "far from other subjects'.",
             "registration": "Registration: two volumes are aligned, the network seeing all of the fixed one. {labels}"}
FIGURES = "On volumes that the training has not seen, found by the training itself at this checkpoint."
OF_LABELS = " Dice needs labels of\nthese volumes, which also choose the best checkpoint."
CARD = """---
{licence_keys}
library_name: omnimorph
tags: [image-registration, medical-imaging, deformation]
---
# {data}: a deformation network

One network for deformable registration of medical images and for realistic random deformations (augmentation). Given a
volume, a time and a condition, it predicts a displacement field.

## Architecture
{architecture}

## Training
{modes}

{training}

## Validation
{figures}

## Intended use
Research: aligning images of the kind it was trained on (same modality and anatomy), carrying labels and points over,
drawing deformed copies of labelled images for the training of other networks.

## Limits
- Not a medical device; not for diagnosis, nor for decisions about a patient.
- Trained on {trained_on}: other anatomy, modality, resolution or pathology needs a check first.
- It finds deformations, not positions: with `--affine none`, volumes must already overlap.
- Folding is discouraged in the training, not impossible: every tool reports it for each field.

## Use
FOLDER is the folder of this page, or {hub}OWNER/NAME where it lies on huggingface.co.

{register}    omnimorph augment {image} --model FOLDER --out Results/augmented
    python -c "import omnimorph; net, cfg = omnimorph.load_model('FOLDER')"

`pip install .` in the repository provides these commands; there, `python OM_register.py` and `python OM_augment.py` do
the same.

## File
{file}
"""


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Write a trained network, its config and a model card to a folder, "
                                                 "in the layout that model hubs expect.")
    parser.add_argument("--model", required=True, metavar="F", help="a checkpoint (.pth) or the folder of a run")
    parser.add_argument("--out", metavar="FOLDER", help="where the files go (default: a folder named hub "
                        "in the run's folder, or beside a checkpoint without a run)")
    parser.add_argument("--licence", metavar="TEXT", help="licence of the weights, for the card")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="set keys of the config that is stored in the file, such as one of refine.* that was "
                        "tuned after training")
    return parse_options(parser, argv)


def run_of(path):
    """The folder of the run that a checkpoint belongs to, or the folder in which it lies."""
    above = path.parent.parent
    return above if path.parent.name == "tmp" and (above / "manifest.json").is_file() else path.parent


def about_run(path, state):
    """What the run's folder records about a checkpoint: dict of metrics (may be empty), commit, torch and samples (of a
    step, None if not recorded), changed (text on the settings that were), and began, the name of the network it began
    from or "" (None if not recorded)."""
    run, step = run_of(path), state.get("step", 0)
    began = began_from(run)
    # Of a path the name alone, since folders of this machine are nobody else's business; "." has none.
    began = began if not began or began.startswith(HUB) else Path(began).name or "another network"
    about = {"metrics": {}, "commit": None, "torch": None, "samples": None, "began": began}
    try:
        about["metrics"] = read_manifest(run)["checkpoints"][path.relative_to(run).as_posix()]["metrics"] or {}
    except (OSError, *LOST):
        pass  # a checkpoint copied out of its run has no metrics
    launches = launches_behind(read_launches(run), step)
    for launch in launches[-1:]:
        commit = launch.get("commit")
        about.update(commit=f"{commit} with local changes" if commit and launch.get("changed") else commit,
                     torch=launch.get("packages", {}).get("torch"))
    for line in lines_of(run / "rank0.jsonl"):  # the step stays when data.batchsize or the number of ranks changes
        if line["event"] == "step" and line.get("step") == step - 1:
            about["samples"] = line.get("samples")
    configs = [{key: launch["config"][key] for key in settings_in(launch["config"])} for launch in launches]
    about["changed"] = "; ".join(f"{key} {values}" for key, values, _ in differing_keys([configs, configs[-1:]]))
    return about


def write_weights(path, weights, config, commit, licence):
    """Write `path` (.safetensors) and read it back before it gets its name.

    weights: {name: tensor}. config: flat dict. commit: text or None. licence: text. Returns: the SHA-256 of the file.
    Raises OSError if the file reads back differently.
    """
    from safetensors import safe_open
    from safetensors.torch import save

    from Runtime.checkpoint import weights_sha256
    digest = weights_sha256(weights)
    metadata = {"format": "pt", "config": json.dumps(config), "commit": commit or "", "weights_sha256": digest,
                "license": licence}
    with beside(path) as partial:
        # Clones, because safetensors refuses tensors that share memory.
        clones = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
        write_flushed(partial, with_metadata_in_order(save(clones, metadata)))
        with safe_open(partial, "pt") as file:
            if weights_sha256({name: file.get_tensor(name) for name in file.keys()}) != digest:
                raise OSError(f"{path} reads back differently")
        replace(partial, path)
    return sha256(path)


def with_metadata_in_order(content):
    """The bytes of a .safetensors file with its metadata sorted, so that one network has one SHA-256.

    `safetensors.torch.save` writes metadata in a random order. The header is the length of a JSON object in 8 bytes,
    and that object, padded to a multiple of 8.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(content)[end:]))


def is_export(path):
    """Whether a .safetensors file is one of `write_weights`, by its metadata."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "np") as file:
            return "weights_sha256" in (file.metadata() or {})
    except SafetensorError:
        return False


def training_volumes(state):
    """Numbers of training and validation volumes, in words."""
    from Dataloader.dataset import rows_of
    rows, counts = rows_of(state["data"]), {}
    for side, splits in (("train", ("train", "gone")), ("val", ("val",))):
        own = [row for row in rows if row[2] in splits]
        counts[side] = f"{len(own)} (subjects: {len({row[1] for row in own})})"
    gone = sum(row[2] == "gone" for row in rows)
    removed = f", {gone} of them removed during the training" if gone else ""
    return f"volumes: {counts['train']}{removed}; held out for validation: {counts['val']}"


def architecture(net, cfg):
    """The card's table about the network."""
    parameters = sum(parameter.numel() for parameter in net.parameters())
    spacing = f"{cfg['data.spacing_mm']:g} mm" if cfg["data.spacing_mm"] else "as large as the field of view needs"
    range_of = (f"the values {cfg['data.window']}" if any(cfg["data.window"]) else
                f"the percentiles {cfg['data.percentiles']}")
    named = inspect.signature(type(net)).parameters  # other networks have other settings, see network_arguments
    stride = cfg["model.field_stride"] if "field_stride" in named else 1
    levels = [("Channels of the levels", cfg["model.channels"])] if "channels" in named else []
    if "attention_width" in named:
        levels += [("Attention at the bottom", f"{cfg['model.attention_depth']} layers, width "
                                               f"{cfg['model.attention_width']}, {cfg['model.attention_heads']} heads")]
    return markdown_table(["", ""], [
        ("Network", f"`{cfg['model.name']}`, {cfg['model.dims']}D, {parameters:,} parameters"),
        ("Channels of a volume", cfg["data.channels"]),
        *levels,
        ("Field", f"at 1/{stride} of the resolution, {cfg['model.rec_num']} passes"),
        ("Input", f"grid of {' x '.join(map(str, cfg['data.img_size']))} voxels, {spacing}; intensities as 0 to 1 "
                  f"between {range_of}"),
        ("Output", "displacement in voxels of the fixed grid; warped(x) = moving(x + field(x))")])


def training(state, cfg, about):
    """The card's table about the training. state: content of the checkpoint. about: from `about_run`."""
    losses = ", ".join(f"{key.removeprefix('loss.')} {value:g}" for key, value in cfg.items()
                       if key.startswith("loss."))
    samples = cfg["data.global_batchsize"] or about["samples"]
    changed = [("Changed during the training", about["changed"])] if about["changed"] else []
    return markdown_table(["", ""], [
        ("Data", f"{cfg['data.name']}, {training_volumes(state)}"),
        ("Initial weights", about["began"] or ("random" if about["began"] == "" else "not recorded")),
        ("Length", f"{state['epoch']} epochs and {state['step_in_epoch']} steps, {state['step']} steps in all"),
        ("Batch", f"{samples} (of all ranks)" if samples else f"{cfg['data.batchsize']} (on each rank)"),
        ("Optimizer", f"Adam, learning rate {cfg['optim.lr']:g}"),
        ("Weights exported", "moving average" if state.get("ema") else "as the last step left them"),
        ("Weights of the losses", losses),
        *changed,
        ("Precision", {"off": "float32"}.get(state["config"]["run.amp"], state["config"]["run.amp"])),
        ("torch", about["torch"] or "not recorded"),
        ("Seed", cfg["run.seed"]),
        ("Commit", about["commit"] or "not recorded")])


def licence_keys(licence):
    """The licence lines of a card's header: hubs know licences by lower-case names such as cc-by-sa-4.0."""
    name = "unknown" if licence == UNSTATED else licence.lower().replace(" ", "-")
    if re.fullmatch(r"[a-z0-9.-]+", name):
        return f"license: {name}"
    return f"license: other\nlicense_name: {json.dumps(licence)}"


def card(source, net, state, cfg, about, digest, licence):
    """The text of the model card. source: name of the checkpoint. state: its content. digest: of the weights' file."""
    from OM_train_3modes import MODES
    shown = {"none": "nothing else", "slice": "one to several slices of the original",
            "volume": "slices of the original, or all of it"}[cfg["model.condition_type"]]
    labels = "Its loss has the Dice of label maps too." if cfg["loss.dice"] else "No labels are used."
    modes = [SENTENCES.get(mode.name, f"{mode.name.capitalize()}.").format(condition=shown, labels=labels)
             for mode in modes_of(cfg, MODES)]
    published = state.get("published", False)
    figures = "No figures were recorded for this checkpoint."
    if about["metrics"]:
        figures = FIGURES + OF_LABELS * ("val_dice" in about["metrics"])
        figures += "\n\n" + markdown_table(["", ""], about["metrics"].items())
    # Training data of the network it began from are unknown here.
    trained_on = cfg["data.name"] + {"": " alone", None: ""}.get(about["began"], f", from {about['began']}")
    pair, image = "--fixed F.nii.gz --moving M.nii.gz", "--image I.nii.gz --label L.nii.gz"
    if cfg["data.channels"] > 1:
        further = {side: " ".join(f"{side}{number}.nii.gz" for number in range(2, cfg["data.channels"] + 1))
                   for side in "FM"}
        pair += f" --fixed-channels {further['F']} --moving-channels {further['M']}"
        image = "--data FOLDER_OF_IMAGES"
    return CARD.format(
        licence_keys=licence_keys(licence), data=cfg["data.name"], trained_on=trained_on, hub=HUB,
        architecture=architecture(net, cfg), modes="\n".join(f"- {sentence}" for sentence in modes),
        training=PUBLISHED if published else training(state, cfg, about),
        register="" if cfg["model.condition_type"] == "none" else REGISTER.format(pair=pair),
        image=image, figures=figures,
        file=markdown_table(["", ""], [("File", f"`{EXPORTED}`, of `{source}`"), ("SHA-256", f"`{digest}`"),
                                       ("Licence", licence)]))


def export(model, out=None, licence=None, overrides=()):
    """Write the weights, EXPORTED, with CONFIG and PAGE beside them. Returns: the paths of the weights and the card.

    model: checkpoint, run folder or the published method's weights. out: folder, default hub in the run's folder, or
    beside a checkpoint without a run. licence: of the weights, for the card. overrides: list of "key=value".
    Raises InputError for a file that is no checkpoint of this project, for weights that do not fit the config, for a
    file in `out` that an export would replace and that no export has left as it is, for the folder of a run as `out`,
    and without safetensors.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise InputError("writing .safetensors files needs a package: pip install safetensors")
    from Inference.load_model import find_checkpoint, load_model, load_state  # here, because torch takes seconds
    source = find_checkpoint(model)
    if source.suffix == ".safetensors":
        raise InputError(f"{source} is exported already; give the checkpoint (.pth) or the run's folder.")
    state = load_state(source)
    net, cfg = load_model(source, overrides=overrides)  # refuses weights that do not fit the config
    config = {**state["config"], **{key: cfg[key] for key in overridden(overrides)}}
    config = {key: value for key, value in config.items() if key not in PLACES}
    folder = Path(out or run_of(source) / "hub")
    if (folder / "manifest.json").exists():
        raise InputError(f"{folder}: the folder of a run; an exported network in it would be used in place of its "
                         "checkpoints, also of later ones: choose another --out, or leave it out.")
    page, target = folder / PAGE, folder / EXPORTED
    require_apart([page], is_unedited)
    require_apart([folder / CONFIG], lambda path: page.is_file() and sha256(path).encode() in page.read_bytes())
    require_apart([target], is_export)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)  # of an export that was killed
    about = about_run(source, state)
    licence = licence or (PUBLISHED_LICENCE if state.get("published") else UNSTATED)
    digest = write_weights(target, state.get("ema") or state["model"], config, about["commit"], licence)
    settings = json.dumps(config, indent=1) + "\n"
    text = card(source.name, net, state, cfg, about, digest, licence)
    text = f"{text}\n<!-- SHA-256 of {CONFIG}: {hashlib.sha256(settings.encode()).hexdigest()} -->\n"
    (folder / CONFIG).unlink(missing_ok=True)  # in this order, a killed export leaves nothing that looks edited
    write_file(page, signed(text, "<!-- SHA-256 of all above, by which a later export sees if it was edited: {} -->"))
    write_file(folder / CONFIG, settings)
    return target, page


def run(args):
    """Run the command line. Returns the exit code."""
    if args.model != "universal" and not args.model.startswith(HUB) and not os.path.exists(args.model):
        raise no_model(args.model)  # before torch is imported
    target, page = export(args.model, args.out, args.licence, args.overrides)
    print(f"weights: {target} ({target.stat().st_size / 2**20:.1f} MiB)\nmodel card: {page}")
    return DONE


def main(argv=None):
    args = parse_arguments(argv)
    beside_model = args.model if os.path.isdir(args.model) else os.path.dirname(args.model) or "."
    return run_program(run, args, args.out or beside_model)


if __name__ == "__main__":
    sys.exit(main())
