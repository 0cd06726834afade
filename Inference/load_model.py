"""A trained network from its file, for registration, augmentation and other uses after training."""
import functools
import json
import sys
import zipfile
import zlib
from pathlib import Path

import torch

from Dataloader.volume import is_path
from Diffusion.networks import build_network
from Inference.choices import DEFAULTS, EXPORTED, HUB, no_model
from Runtime import checkpoint
from Runtime.config import MODEL_KEYS, check_config, load_config, overridden
from Runtime.device import own_settings, pick_device, precision
from Runtime.errors import InputError
from Runtime.weights_file import read_weights

# Keys that identify weights of the published method: the network's first table and last layer.
PUBLISHED = ("time_embed.weight", "conv_out.weight")
PUBLISHED_CONFIGS = {2: DEFAULTS.with_name("config_cmr.yaml"), 3: DEFAULTS.with_name("config_lung_ct.yaml")}
# Keys with another meaning in a checkpoint that has refine.lr: refinement then optimised a velocity with Adam.
OTHER_REFINEMENT = ("refine.stride", "refine.smooth", "refine.weight")
# What "universal" stands for: a network for volumes of any kind, trained only on synthetic anatomies.
UNIVERSAL = Path(__file__).parent / "universal.safetensors"


@functools.cache
def default_config(dims):
    """The config without a model, for volumes of `dims` axes, 2 or 3: a flat dict."""
    return load_config(DEFAULTS, [f"model.dims={dims}"])


def changed_config(dims, changes):
    """`default_config` with some keys changed; None changes none. Raises InputError for anything but a dict of keys."""
    if changes is None:
        return default_config(dims)
    if not isinstance(changes, dict):
        raise InputError(f"config: give a flat dict of keys, such as {{'refine.levels': 2}} or what load_config "
                         f"returns, not {changes!r}.")
    return check_config({**default_config(dims), **changes}, "config")


def find_checkpoint(path):
    """The checkpoint file that `path` names, verified.

    path: a file; a run's folder, whose best checkpoint is used, else the newest; a folder of OM_export.py, or
    hf:OWNER/NAME for one on huggingface.co, maybe with @REVISION; or the word "universal" for the bundled file,
    UNIVERSAL.
    A checkpoint must match its SHA-256 in the manifest, because torch reads flipped bits without an error; one copied
    out of its run, the checksums of its own zip archive. If the best checkpoint of a folder is damaged, the newest
    intact one is used, with a warning.
    Returns: Path. Raises InputError for a damaged file and for a folder without an intact checkpoint.
    """
    if not is_path(path):
        raise InputError("model: give a checkpoint (.pth), a .safetensors file, a run's folder or the word universal, "
                         f"not {path!r}.")
    if path == "universal":
        if not UNIVERSAL.is_file():
            raise InputError(f"universal: its weights are missing ({UNIVERSAL} does not exist); restore that file, "
                             "train it again with `bash Scripts/bash_train_universal.sh`, which takes hours, or "
                             "register without this network.")
        path = UNIVERSAL
    if str(path).startswith(HUB):
        path = _from_hub(path)
    path = Path(path)
    if path.is_dir():
        exported = path / EXPORTED
        return exported if exported.is_file() else path / _best_or_newest(path)
    if not path.is_file():
        raise no_model(path)
    run = path.parent.parent if path.parent.name == "tmp" else path.parent
    relative = path.relative_to(run).as_posix()
    known = relative in _manifest(run).get("checkpoints", {})
    problem = checkpoint.verify(run, relative) if known else _damage(path)
    if problem:
        raise InputError(f"{path} is damaged ({problem}): restore the file or use another checkpoint.")
    return path


def _from_hub(name):
    """The weights that hf:OWNER/NAME@REVISION names; downloaded only once, because the library caches them."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise InputError(f"{name}: networks of a hub need a package: pip install huggingface_hub") from None
    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return hf_hub_download(repository, EXPORTED, revision=revision or None)
    except (OSError, ValueError) as error:  # no such repository, file or revision; no network; an invalid name
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{name}: {EXPORTED} cannot be downloaded from the hub ({reason}); check the name, or "
                         "download its folder by hand and give that.") from None


def _best_or_newest(run):
    """The best checkpoint of a run's folder if it is intact, else the newest intact one: its path within the folder."""
    best = (_manifest(run).get("best") or {}).get("checkpoint")
    problem = checkpoint.verify(run, best) if best else None
    if best and not problem:
        return best
    sentences = []
    newest = checkpoint.newest(run, sentences.append)
    if not newest:
        raise InputError(f"{run}: no checkpoint in this folder; give a run's folder, such as Models/all_om_net, or a "
                         "file.")
    if best:
        others = [sentence for sentence in sentences if not sentence.startswith(f"{run / best} ")]
        sentences = [f"{run / best}, the best checkpoint of its run, cannot be used ({problem}); using {newest}, "
                     "the newest intact one", *others]
    for sentence in sentences:
        print(f"warning: {sentence}", file=sys.stderr)
    return newest


def _damage(path):
    """The damage that the checksums of a .pth file's zip archive reveal: a phrase, or None."""
    if path.suffix == ".safetensors" or not zipfile.is_zipfile(path):
        return None  # loading reports any damage
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                return "its archive is compressed, as torch never saves one"
            damaged = archive.testzip()
    except (*checkpoint.UNREADABLE, zlib.error) as error:
        return f"its archive cannot be read: {error}"
    return f"CRC of {damaged} differs" if damaged else None


def _manifest(run):
    """The manifest.json of a run's folder, a dict; empty if it cannot be read."""
    try:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


@own_settings()
def load_model(path, device="cpu", overrides=()) -> tuple[torch.nn.Module, dict]:
    """A network in evaluation mode with the weights of `path`, and the config it was trained with.

    path: checkpoint (.pth), .safetensors file, run folder, hf:OWNER/NAME or "universal", see `find_checkpoint`.
    device: auto, cpu, cuda, xpu, or a torch.device. overrides: one or more "key=value" that change the config.
    The averaged weights are used if the training kept them (optim.average). The precision suits this device and may
    differ from training, unless overrides name run.amp.
    Returns: network on `device`, flat config dict. Raises InputError naming the file for one that cannot be used.
    """
    device, path = pick_device(device), find_checkpoint(path)
    overrides = [overrides] if isinstance(overrides, str) else overrides
    state = load_state(path, device)
    if not isinstance(state.get("config"), dict):
        raise InputError(f"{path} has no config: use a checkpoint that OM_train_3modes.py wrote.")
    known = load_config(DEFAULTS)
    left = {"run.amp", *(OTHER_REFINEMENT if "refine.lr" in state["config"] else ())}
    kept = {key: value for key, value in state["config"].items() if key in known and key not in left}
    cfg = check_config({**known, **kept, **overridden(overrides)}, path)
    cfg["run.amp"] = precision(cfg["run.amp"], device)
    net = build_network(cfg, device)
    checkpoint.load_weights(net, {"model": state.get("ema") or state["model"]}, path)
    return net.eval(), cfg


def loaded(model, device="cpu"):
    """(network, config) of a model's path, loaded here, or as `load_model` returned it; None stays None.

    Raises InputError for anything else.
    """
    if is_path(model):
        return load_model(model, device)
    if model is None or (isinstance(model, tuple | list) and len(model) == 2 and callable(model[0])
                         and isinstance(model[1], dict)):
        return model
    raise InputError(f"model: give a path, \"universal\" or what load_model returned, (network, config), not a "
                     f"{type(model).__name__}.")


def load_state(path, device="cpu"):
    """The content of a file of `find_checkpoint` or of a run: a dict with at least "model", the weights, and "config".

    A .safetensors file has the averaged weights if the training kept them; a checkpoint has these as "ema". The bare
    weights of the published method, such as 000000_cmr_recresacnet.pth of github.com/jianqingzheng/def_diff_rec, get
    the config of PUBLISHED_CONFIGS, and "published". Raises InputError for an unusable file, OSError for a fault that
    may be temporary.
    """
    if path.suffix == ".safetensors":  # of OM_export.py
        weights, metadata = read_weights(path, device)
        try:
            config = json.loads(metadata.get("config", "null"))
        except (ValueError, RecursionError):
            raise InputError(f"{path}: its config is not valid JSON; export the model again.") from None
        if metadata.get("weights_sha256") not in (None, checkpoint.weights_sha256(weights)):
            raise InputError(f"{path}: its weights differ from those that were exported; copy the file again.")
        return _completed({"model": weights, "config": config})
    state = checkpoint.read(path, device)
    if isinstance(state, dict) and all(isinstance(state.get(key), torch.Tensor) for key in PUBLISHED):
        times, last = (state[key] for key in PUBLISHED)
        config = load_config(PUBLISHED_CONFIGS.get(last.dim() - 2, DEFAULTS), [f"diffusion.timesteps={len(times)}"])
        return {"model": dict(state), "config": config, "published": True}
    return _completed(checkpoint.require_own(state, path))


def _completed(state):
    """The content of a file, with today's defaults for network keys that are newer than the file."""
    if isinstance(state.get("config"), dict) and not state["config"].keys() >= set(MODEL_KEYS):
        known = load_config(DEFAULTS)
        state["config"] = {**{key: known[key] for key in MODEL_KEYS}, **state["config"]}
    return state
