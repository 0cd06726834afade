"""Configuration: one YAML file, flattened to a plain dict of dotted keys, every one checked.

A config file holds every key of KEYS and no other. config_om.yaml explains them.
"""
import difflib
from pathlib import Path

import yaml

from Runtime.errors import InputError

# key: (type, lowest, highest) for numbers, (type, choices) for words, (type,) for the rest.
# "int+" is a list of ints, "int or int+" one int or a list of them.
KEYS = {
    "model.name": ("str",),
    "model.dims": ("int", 2, 3),
    "model.channels": ("int+", 1, None),
    "model.attention_width": ("int", 8, None),
    "model.attention_depth": ("int", 0, None),
    "model.attention_heads": ("int", 1, None),
    "model.rec_num": ("int", 1, None),
    "model.detach_recovery": ("bool",),
    "model.condition_type": ("str", ("none", "slice", "volume")),
    "model.condition_dropout": ("float", 0, 1),
    "model.field_stride": ("int", 1, 2),
    "model.use_checkpoint": ("bool",),
    "diffusion.timesteps": ("int", 2, None),
    "diffusion.grids": ("int+", 4, None),
    "diffusion.v_scale": ("float", 1e-12, None),
    "diffusion.noise_ratio": ("float", 0, None),
    "contrastive.embedding": ("int", 2, None),
    "contrastive.temperature": ("float", 1e-6, None),
    "contrastive.queue": ("int", 1, None),
    "contrastive.clip_norm": ("float", 1e-12, None),
    "registration.gate": ("float", -1, 2),
    "registration.window": ("int", 3, None),
    "registration.scales": ("int", 1, None),
    "registration.squared": ("bool",),
    "registration.clip_norm": ("float", 1e-12, None),
    "loss.dist": ("float", 0, None),
    "loss.ang": ("float", 0, None),
    "loss.regul": ("float", 0, None),
    "loss.contrastive": ("float", 0, None),
    "loss.imgsim": ("float", 0, None),
    "loss.imgmse": ("float", 0, None),
    "loss.ddf": ("float", 0, None),
    "loss.waiver": ("float", 0, None),
    "loss.folding": ("float", 0, None),
    "data.name": ("str",),
    "data.root": ("str",),
    "data.train_ids": ("str",),
    "data.val_ids": ("str",),
    "data.img_size": ("int or int+", 4, None),
    "data.spacing_mm": ("float", 0, None),
    "data.batchsize": ("int", 1, None),
    "data.global_batchsize": ("int", 0, None),
    "data.diff_reg_batch_ratio": ("int", 1, None),
    "data.repeats": ("int", 1, None),
    "data.pairs": ("int", 0, None),
    "data.pair_list": ("str",),
    "data.in_memory": ("bool",),
    "data.num_workers": ("int", 0, None),
    "data.prefetch_factor": ("int", 1, None),
    "data.expect_samples": ("int", 0, None),
    "augment.rotation": ("float", 0, 180),
    "augment.scaling": ("float", 0, 0.9),
    "augment.shift": ("float", 0, 1),
    "augment.flip": ("float", 0, 1),
    "augment.gamma": ("float", 0, 2),
    "augment.noise": ("float", 0, 1),
    "optim.lr": ("float", 1e-12, None),
    "optim.warmup_steps": ("int", 0, None),
    "run.seed": ("int", 0, None),
    "run.epochs": ("int", 1, None),
    "run.device": ("str", ("auto", "cpu", "cuda", "xpu")),
    "run.amp": ("str", ("bf16", "off")),
    "run.channels_last": ("bool",),
    "run.threads": ("int", 0, None),
    "run.models": ("str",),
    "run.logs": ("str",),
    "run.checkpoint_steps": ("int", 0, None),
    "run.checkpoint_minutes": ("float", 0, None),
    "run.keep_last": ("int", 1, None),
    "run.keep_every": ("int", 0, None),
    "run.val_every": ("int", 1, None),
    "run.val_pairs": ("int", 1, None),
    "run.picture_every": ("int", 0, None),
    "run.max_nonfinite": ("int", 1, None),
    "run.empty_cache": ("bool",),
    "run.exact_sums": ("bool",),
    "run.checksum_every": ("int", 0, None),
    "run.refresh_process_group_every": ("int", 0, None),
    "run.memory_limit_gb": ("float", 0, None),
    "run.deadline_floor_s": ("float", 0.1, None),
    "run.deadline_factor": ("float", 1, None),
    "run.deadline_first_s": ("float", 1, None),
    "run.join_s": ("float", 1, None),
    "run.round_seconds": ("float", 1, None),
    "run.max_rounds": ("int", 1, None),
    "run.pause_planned_s": ("float", 0, None),
    "run.pause_crash_s": ("float", 0, None),
    "run.grace_s": ("float", 0, None),
}

# What a checkpoint's weights depend on: these must agree for it to be continued.
MODEL_KEYS = [key for key in KEYS if key.startswith("model.") and key not in (
    "model.detach_recovery", "model.condition_dropout", "model.use_checkpoint")] + [
    "diffusion.timesteps", "contrastive.embedding"]


def load_config(path, overrides=()):
    """Read a YAML config and apply `key=value` overrides.

    Returns a flat dict {dotted key: value} with every key of KEYS, converted and checked.
    Raises InputError with one sentence for a missing file, bad YAML, or an unknown, missing or mistyped key.
    """
    try:
        nested = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such config file; see Config/ for those of the project.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}).") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise InputError(f"{path}: not valid YAML{line}: {getattr(error, 'problem', error)}.") from None
    flat = flatten(nested, path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InputError(f"--set {override}: write it as key=value, for example --set data.batchsize=1.")
        try:
            flat[key.strip()] = yaml.safe_load(text) if text.strip() else ""
        except yaml.YAMLError:
            flat[key.strip()] = text
    return check_config(flat, path)


def flatten(nested, path):
    """{"model": {"dims": 3}} to {"model.dims": 3}."""
    if not isinstance(nested, dict):
        raise InputError(f"{path}: a config is a YAML mapping of sections, like Config/config_om.yaml.")
    flat = {}
    for section, values in nested.items():
        if isinstance(values, dict):
            flat.update({f"{section}.{key}": value for key, value in values.items()})
        else:
            flat[str(section)] = values
    return flat


def unflatten(cfg):
    """The inverse of `flatten`, for writing a config as YAML."""
    nested = {}
    for key, value in cfg.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    return nested


def check_config(flat, path):
    """Check a flat dict against KEYS, convert the values, and check what holds between keys."""
    for key in flat:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)[0]
            raise InputError(f"{path}: unknown key {key}; did you mean {near}?")
    cfg = {}
    for key, rule in KEYS.items():
        if key not in flat:
            near = difflib.get_close_matches(key, flat, n=1, cutoff=0.0)
            beside = f" (beside {near[0]})" if near else ""
            raise InputError(f"{path}: the key {key} is missing; add it{beside}, config_om.yaml says what it takes.")
        cfg[key] = convert(key, flat[key], rule, path)
    check_together(cfg, path)
    return cfg


def convert(key, value, rule, path):
    """One value to its type and into its range, or InputError. YAML reads 1e-5 as a string: numbers may be strings."""
    kind, limits = rule[0], rule[1:]
    if kind == "int or int+":
        return convert(key, value, ("int+" if isinstance(value, list) else "int", *limits), path)
    if kind == "int+":
        if not isinstance(value, list) or not value:
            raise InputError(f"{path}: {key} is a list of whole numbers such as [8, 16], not {value!r}.")
        return [convert(key, item, ("int", *limits), path) for item in value]
    if kind == "bool":
        if not isinstance(value, bool):
            raise InputError(f"{path}: {key} is true or false, not {value!r}.")
        return value
    if kind == "str":
        # YAML reads the bare word `off` as false.
        value = "off" if value is False and limits and "off" in limits[0] else value
        value = "" if value is None else str(value)
        if limits and value not in limits[0]:
            raise InputError(f"{path}: {key} is one of {', '.join(limits[0])}, not {value!r}.")
        return value
    return convert_number(key, value, kind, *limits, path)


def convert_number(key, value, kind, low, high, path):
    wanted = "a whole number" if kind == "int" else "a number"
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if number != number or (kind == "int" and number != int(number)):
        raise InputError(f"{path}: {key} is {wanted}, not {value!r}.")
    if (low is not None and number < low) or (high is not None and number > high) or abs(number) == float("inf"):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{path}: {key} is {wanted} {limits}, not {value!r}.")
    return int(number) if kind == "int" else number


def check_together(cfg, path):
    """What must hold between keys."""
    dims = cfg["model.dims"]
    size = cfg["data.img_size"]
    cfg["data.img_size"] = size = [size] * dims if isinstance(size, int) else size
    grids = cfg["diffusion.grids"]
    if len(size) != dims:
        raise InputError(f"{path}: data.img_size needs one number or {dims} (model.dims), not {size}.")
    if len(cfg["model.channels"]) < 2:
        raise InputError(f"{path}: model.channels needs at least two levels, not {cfg['model.channels']}.")
    if cfg["model.attention_width"] % cfg["model.attention_heads"]:
        raise InputError(f"{path}: model.attention_width {cfg['model.attention_width']} must be a multiple of "
                         f"model.attention_heads {cfg['model.attention_heads']}.")
    if sorted(set(grids)) != grids or grids[-1] % 4:
        raise InputError(f"{path}: diffusion.grids must ascend and end with a multiple of 4, not {grids}.")
    if grids[-1] > min(size):
        raise InputError(f"{path}: diffusion.grids ends with {grids[-1]}, finer than the image of {size} voxels can "
                         f"show; use smaller grids, for example [4, 8, {min(size) // 8 * 4 or 4}].")
    if cfg["registration.window"] % 2 == 0:
        raise InputError(f"{path}: registration.window must be odd, not {cfg['registration.window']}.")
    if min(size) < 2 ** (cfg["registration.scales"] - 1):
        raise InputError(f"{path}: data.img_size {size} cannot be halved for registration.scales "
                         f"{cfg['registration.scales']}.")


def save_config(cfg, path):
    """Write a config so that `load_config` reads the same values back."""
    Path(path).write_text(yaml.safe_dump(unflatten(cfg), sort_keys=False, default_flow_style=None))
