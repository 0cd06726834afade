"""Configuration: one YAML file, flattened to a plain dict of dotted keys, every one checked.

A config holds every key of KEYS (Config/keys.yaml) and no other. config_om.yaml explains them; a file that begins with
`base: config_om.yaml` inherits what it does not list.
"""
import contextlib
import difflib
import os
import re
import reprlib
from pathlib import Path

import yaml

from Runtime.errors import InputError, first_line
from Runtime.files import write_file

# {key: [type, limits ...]}; keys.yaml explains the notation, and `check_rule` checks it.
CONFIGS = Path(__file__).parent.parent / "Config"
KEYS = yaml.safe_load((CONFIGS / "keys.yaml").read_text())

# The weights depend on these keys: a checkpoint and the config of the run that resumes it must agree on them.
MODEL_KEYS = [key for key in KEYS if key.startswith("model.") and key not in (
    "model.detach_recovery", "model.condition_dropout", "model.use_checkpoint")] + [
    "diffusion.timesteps", "contrastive.embedding", "data.channels"]

PATHS = ("data.root", "data.cache", "data.pair_list", "run.models", "run.logs")  # may contain ~ and $VARIABLES
GONE = {"refine.lr": "refine.step replaces it", "refine.last_lr": "remove it", "refine.kind": "remove it"}
# A value in a message: a few aliases (*a) can make one of a hundred lines as long as 10^9 words.
BRIEF = reprlib.Repr()
BRIEF.maxlevel, BRIEF.maxlist, BRIEF.maxdict, BRIEF.maxstring, BRIEF.maxother = 2, 10, 10, 200, 200
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class TextLoader(yaml.BaseLoader):
    """YAML with all values as texts or lists of texts, which `convert` turns into numbers. Plain YAML reads the id 017
    as 15, 1:30 as 90, 1.10 as 1.1 and `no` as False, and keeps the last of two sections with the same name."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # others are refused below
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {key.value} appears twice; merge the two")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path, overrides=()):
    """Read a YAML config over its `base`, and apply `key=value` overrides.

    path: a file, or just the name of a config in Config/, since users of an installed package have no path to it.
    Returns: flat dict {dotted key: value} with every key of KEYS, converted and checked.
    Raises InputError with one sentence for a missing file, bad YAML, or an unknown, missing or mistyped key.
    """
    if Path(path).name == str(path) and not Path(path).is_file() and (CONFIGS / path).is_file():
        path = CONFIGS / path
    overrides = [overrides] if isinstance(overrides, str) else overrides
    return check_config({**read_config(path), **overridden(overrides)}, path)


def read_config(path, above=()):
    """The flat dict of a config file merged over that of its `base`; not checked yet.

    base: a path relative to the file's folder, or the name of a config in Config/. above: files whose base led here.
    Raises InputError for a file that is missing, unreadable or not a config, and for circular bases.
    """
    try:
        content = yaml.load(Path(path).read_bytes(), TextLoader)  # as bytes: the system may have another encoding
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such config file; see Config/ for those of the project.") from None
    except (OSError, yaml.reader.ReaderError) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)}).") from None
    except (yaml.YAMLError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise InputError(f"{path}: not valid YAML{line}: {getattr(error, 'problem', error)}.") from None
    flat = flatten(content, path)
    base = flat.pop("base", None)
    if base is None:
        return flat
    if not isinstance(base, str):
        raise InputError(f"{path}: base is the path of another config, such as config_om.yaml, not {BRIEF.repr(base)}.")
    beside = Path(path).parent / base
    base_path = beside if beside.is_file() else CONFIGS / base
    if not base_path.is_file():
        raise InputError(f"{path}: base: there is no config {beside}, and none of that name in {CONFIGS}.")
    above = (*above, Path(path).resolve())
    if base_path.resolve() in above:
        raise InputError(f"{path}: base: {base_path} leads back to this file; remove one of the two lines.")
    return {**read_config(base_path, above), **flat}


def overridden(overrides):
    """{dotted key: value} of `key=value` texts, not yet checked. Raises InputError for a text without "="."""
    flat = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InputError(f"--set {override}: write it as key=value, for example --set data.batchsize=1.")
        value = text.strip()
        if value[:1] in ("[", "'", '"'):  # else it is plain text, even if it contains YAML syntax
            with contextlib.suppress(yaml.YAMLError, RecursionError):
                value = yaml.load(value, TextLoader)
        flat[key.strip()] = value
    return flat


def flatten(nested, path):
    """{"model": {"dims": 3}} becomes {"model.dims": 3}. Raises InputError if `nested` is not a dict."""
    if not isinstance(nested, dict):
        raise InputError(f"{path}: a config is a YAML mapping of sections, like Config/config_om.yaml.")
    flat = {}
    sections = {key.split(".")[0] for key in KEYS}
    for section, values in nested.items():
        of_section = {str(section): values}
        if values == "" and section in sections:  # all its lines are commented out
            of_section = {}
        elif isinstance(values, dict):
            of_section = {f"{section}.{key}": value for key, value in values.items()}
        if twice := flat.keys() & of_section:
            raise InputError(f"{path}: {min(twice)} is there twice, dotted and in its section; keep one.")
        flat.update(of_section)
    return flat


def check_config(flat, path):
    """Check a flat dict against KEYS, convert the values, and check rules between keys. Returns: the config."""
    for key in flat:
        if key in GONE:
            raise InputError(f"{path}: the key {key} was removed in version 1.0.0: {GONE[key]}.")
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)[0]
            raise InputError(f"{path}: unknown key {key}; did you mean {near}? A new key needs a line in "
                             "Config/keys.yaml.")
    cfg = {}
    for key, rule in KEYS.items():
        check_rule(key, rule)
        if key not in flat:
            near = difflib.get_close_matches(key, flat, n=1, cutoff=0.0)
            beside = f" (beside {near[0]})" if near else ""
            raise InputError(f"{path}: the key {key} is missing; add it{beside}, or begin the file with "
                             "`base: config_om.yaml`, which has every key (a new one has to be added there).")
        cfg[key] = convert(key, flat[key], rule, path)
    for key in PATHS:
        cfg[key] = os.path.expanduser(os.path.expandvars(cfg[key]))
        if unknown := re.search(r"\$\w+|\$\{\w+\}", cfg[key]):
            raise InputError(f"{path}: {key} is {cfg[key]}, but the variable {unknown[0]} is not set; name the "
                             "folder itself, or export the variable.")
    if not cfg["data.root"]:
        raise InputError(f"{path}: data.root is empty; name the folder or the list of the volumes, "
                         "--set data.root=FOLDER.")
    name_data(cfg, path)
    check_together(cfg, path)
    return cfg


def check_rule(key, rule):
    """Raise InputError if a line of keys.yaml gives no valid type and limits. rule: the line's value."""
    word, *limits = rule if isinstance(rule, list) and rule else [None]
    kind = str(word).removeprefix("auto or ")
    if kind == "str":
        words = limits[0] if limits else []
        good = len(limits) < 2 and isinstance(words, list) and all(isinstance(each, str) for each in words)
    else:
        count = 0 if kind == "bool" else 2 if kind in ("int", "float", "int+", "float+", "int or int+") else None
        good = len(limits) == count and all(limit is None or type(limit) in (int, float) for limit in limits)
    if not good or key.count(".") != 1:
        raise InputError(f"{CONFIGS / 'keys.yaml'}: {key}: {rule} is no rule; write section.name and one of those at "
                         "the top of that file, such as [float, 0, null], words such as \"off\" in quotes and 1e-6 as "
                         "1.0e-6.")


def name_data(cfg, path):
    """Derive an empty data.name from the data set, and a data.cache of "auto" from data.name; changes cfg.

    Names are derived only here, so that run folder, checkpoints, manifest, cache and report use the same one.
    """
    root = Path(os.path.abspath(cfg["data.root"]))
    if not cfg["data.name"]:
        is_list = root.suffix.lower() in (".json", ".csv")
        name = root.stem.removesuffix("_dataset") if is_list else root.name
        if name in ("dataset", "imagesTr"):  # every data set has these
            name = root.parent.name
        cfg["data.name"] = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    if not cfg["data.name"]:
        raise InputError(f"{path}: data.root {cfg['data.root']} gives no name for the run; set data.name.")
    if cfg["data.cache"] == "auto":
        cfg["data.cache"] = f"Cache/{cfg['data.name']}"


def convert(key, value, rule, path):
    """One value, converted to its type. rule: from KEYS. Raises InputError for a wrong type or a value out of range.

    Numbers may be strings, as TextLoader reads them.
    """
    kind, limits = rule[0].removeprefix("auto or "), rule[1:]
    takes_auto = kind != rule[0]
    if takes_auto and value == "auto":
        return value
    if kind.endswith("+") and isinstance(value, str) and "," in value:
        value = value.split(",")  # as typed without brackets
    if kind == "int or int+":
        kind = "int+" if isinstance(value, list) else "int"
    if kind.endswith("+"):
        if not isinstance(value, list) or not value:
            raise InputError(f"{path}: {key} must be a list of {'whole ' * (kind == 'int+')}numbers such as [8, 16], "
                             f"not {BRIEF.repr(value)}.")
        return [convert(key, item, (kind[:-1], *limits), path) for item in value]
    if kind == "bool":
        value = WORDS.get(value.lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise InputError(f"{path}: {key} must be {'auto, ' * takes_auto}true or false, not {BRIEF.repr(value)}.")
        return value
    if kind == "str":
        if isinstance(value, (dict, list)):
            raise InputError(f"{path}: {key} must be text, not {BRIEF.repr(value)}; put it into quotes.")
        value = "" if value in (None, "null", "~") else str(value)
        if limits and value not in limits[0]:
            raise InputError(f"{path}: {key} must be one of {', '.join(limits[0])}, not {BRIEF.repr(value)}.")
        return value
    return convert_number(key, value, kind, *limits, path)


def convert_number(key, value, kind, low, high, path):
    """A number of kind "int" or "float" between low and high (None: no limit), or InputError."""
    wanted = "a whole number" if kind == "int" else "a number"
    number = float("nan")
    with contextlib.suppress(TypeError, ValueError):
        number = plain_number(value) if isinstance(value, str) else number if isinstance(value, bool) else float(value)
    if number != number or (kind == "int" and not number.is_integer()):
        raise InputError(f"{path}: {key} must be {wanted}, not {BRIEF.repr(value)}.")
    if (low is not None and number < low) or (high is not None and number > high) or abs(number) == float("inf"):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{path}: {key} must be {wanted} {limits}, not {BRIEF.repr(value)}.")
    if kind == "int":  # a text of digits is exact beyond 2^53
        return int(value) if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value) else int(number)
    return number


def plain_number(text):
    """The number in a text, also "inf" and "nan". Raises ValueError for 1_000 and non-ASCII digits: Python reads them,
    but in a file they are slips."""
    if "_" in text or not text.isascii():
        raise ValueError
    return float(text)


def check_together(cfg, path):
    """Check rules between keys, and expand data.img_size to one number per dimension. Raises InputError."""
    name, dims, size = cfg["data.name"], cfg["model.dims"], cfg["data.img_size"]
    if not re.fullmatch(r"\w[\w.+-]*", name):
        suggestion = re.sub(r"[^\w.+-]+", "_", name).strip("._+-") or "brains"
        raise InputError(f"data.name is {name!r}, but files and folders are named after it: use letters, digits and . "
                         f"_ + -, beginning with a letter or digit, for example --set data.name={suggestion}.")
    if isinstance(size, int):
        cfg["data.img_size"] = size = [size] * dims
    grids = cfg["diffusion.grids"]
    if len(size) != dims:
        raise InputError(f"{path}: data.img_size needs one number or {dims} (model.dims), not {size}.")
    if len(cfg["model.channels"]) < 1 + cfg["model.field_stride"]:
        raise InputError(f"{path}: model.channels needs at least {1 + cfg['model.field_stride']} levels with "
                         f"model.field_stride {cfg['model.field_stride']}, not {cfg['model.channels']}.")
    if cfg["model.attention_width"] % cfg["model.attention_heads"]:
        raise InputError(f"{path}: model.attention_width {cfg['model.attention_width']} must be a multiple of "
                         f"model.attention_heads {cfg['model.attention_heads']}.")
    if sorted(set(grids)) != grids or grids[-1] % 4:
        raise InputError(f"{path}: diffusion.grids must ascend and end with a multiple of 4, not {grids}.")
    if grids[-1] > min(size):
        raise InputError(f"{path}: diffusion.grids ends with {grids[-1]}, finer than the image of {size} voxels can "
                         f"show; use smaller grids, for example {sorted({4, min(size) // 8 * 4 or 4})}.")
    for key, such in (("data.percentiles", "[0.5, 99.5]"), ("data.window", "[-1000, 500], or [0, 0]")):
        if len(cfg[key]) != 2 or (cfg[key][0] >= cfg[key][1] and (key, cfg[key]) != ("data.window", [0, 0])):
            raise InputError(f"{path}: {key} must be two rising numbers such as {such}, not {cfg[key]}.")
    for key in ("registration.window", "refine.window"):
        if cfg[key] % 2 == 0:
            raise InputError(f"{path}: {key} must be odd, not {cfg[key]}.")
    if cfg["registration.scales"] > min(size).bit_length():  # no power: the number may be astronomical
        raise InputError(f"{path}: data.img_size {size} cannot be halved for registration.scales "
                         f"{cfg['registration.scales']}.")
    if cfg["loss.segment"] and not (cfg["model.structures"] and cfg["loss.dice"]):
        raise InputError(f"{path}: loss.segment {cfg['loss.segment']} teaches a network with model.structures from the "
                         "labels that loss.dice reads: give both a value above 0, or set loss.segment to 0.")
    if cfg["run.exact_sums"] is True and cfg["run.bf16_sums"]:
        raise InputError(f"{path}: run.exact_sums and run.bf16_sums are both true, but only one of them can be: set "
                         "one to false.")
    if cfg["run.refresh_process_group_every"] and cfg["run.strategy"] != "ddp":
        raise InputError(f"{path}: run.refresh_process_group_every needs run.strategy ddp, not {cfg['run.strategy']}; "
                         "set it to 0.")


def modes_of(cfg, modes):
    """The modes that a training uses, in order: those with a weight above 0.

    modes: MODES of the training script. Raises InputError if none is left, or if a mode needs a second volume and the
    network sees only one.
    """
    wanted = [mode for mode in modes.values() if any(cfg[f"loss.{weight}"] for weight in mode.weights)]
    if not wanted:
        weights = ", ".join(f"loss.{weight}" for mode in modes.values() for weight in mode.weights)
        raise InputError(f"{weights} are all 0, so no mode is trained and nothing would be learned: give one of them a "
                         "value.")
    blind = [mode for mode in wanted if mode.needs_condition and cfg["model.condition_type"] == "none"]
    if blind:
        weights = ", ".join(f"loss.{weight}" for mode in blind for weight in mode.weights)
        raise InputError("with model.condition_type none the network sees only one volume, but "
                         f"{' and '.join((mode.name for mode in blind))} need a second one: set {weights} to 0, or "
                         "the condition to slice or volume.")
    return wanted


def save_config(cfg, path):
    """Write a config as YAML; `load_config` reads the same values back. cfg: flat dict."""
    nested = {}
    for key, value in cfg.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    write_file(path, yaml.safe_dump(nested, sort_keys=False, default_flow_style=None))
