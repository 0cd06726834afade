"""Random deformations and registrations as MONAI-style dictionary transforms. MONAI itself is not needed.

This is a separate file, because importing MONAI, if it is installed, takes seconds.
"""
import warnings

import numpy as np
import torch
from torch.utils.data import get_worker_info

from Dataloader.grids import same_grid
from Dataloader.volume import as_array
from Inference.augmentation import MODES, deform, deformed_by, draw_field, draw_start
from Inference.choices import STRIDE
from Inference.labels import carry
from Inference.load_model import default_config, loaded
from Inference.registration import register
from Runtime.device import own_settings
from Runtime.errors import InputError

LIKE_A_SIDE = 16  # more channels than a 2D image usually has

try:
    from monai.transforms import Randomizable as Base  # Compose sets the random state of its instances
    from monai.transforms import Transform as Step  # CacheDataset keeps the results of its instances
except ImportError:
    Base = Step = object


class RandDeformationd(Base):
    """Deforms several volumes of a dictionary by one random field.

    keys: names of the entries, arrays or tensors (C, *spatial) on one grid.
    mode: "bilinear" for images; "smooth" or "nearest" for labels; one for all keys or one for each.
    prob: probability that a sample is deformed.
    start: as in `augment`; (low, high) draws a strength for each sample. stride: as in `augment`.
    model: path for `load_model`, or what it returned (network, config); the network sees as many channels of the first
    key as it was trained with.
    cfg: config for diffusion.* and data.* if there is no model; default Config/config_om.yaml.
    field_key: entry that receives the field, (N, *spatial) in voxels, zero if the sample is not deformed.
    allow_missing_keys: whether entries may be absent. seed: of the random state; None: a different one each time. In a
    Compose of MONAI it has no effect: seed that one, by its set_random_state or by set_determinism before it is made.

    Affines come from a MetaTensor or from an entry "<key>_meta_dict"; else voxels are cubes. The entries keep their
    types, dtypes and metadata. Each worker of a DataLoader draws different numbers.
    Raises InputError for invalid modes, absent entries and entries on different grids.
    """

    def __init__(self, keys, mode="bilinear", prob=0.1, start=None, model=None, cfg=None, stride=STRIDE, field_key=None,
                 allow_missing_keys=False, seed=None):
        self.keys, self.modes = check_modes(mode, keys)
        self.prob, self.start, self.stride, self.field_key = prob, start, stride, field_key
        # Without either, the config is that of each sample's number of axes.
        dims = cfg.get("model.dims", 3) if isinstance(cfg, dict) else 3
        self.net, self.cfg = (None, None) if model is None and not cfg else deformed_by(model, cfg, dims)
        self.allow_missing_keys, self.worker_seed = allow_missing_keys, None
        self.set_random_state(seed)

    def set_random_state(self, seed=None, state=None):
        """Restart the random numbers from a seed, or use a given RandomState. Returns the transform."""
        self.R = state if state is not None else np.random.RandomState(None if seed is None else int(seed) % 2 ** 32)
        return self

    def randomize(self, data=None):
        """Draw whether the sample is deformed, and the number of its field."""
        worker = get_worker_info()
        if worker is not None and worker.seed != self.worker_seed:
            # Workers begin as copies of one process, all with the same state.
            self.worker_seed = worker.seed
            self.R = np.random.RandomState([int(self.R.randint(2 ** 32, dtype=np.uint32)), worker.seed % 2 ** 32])
        self.chosen = bool(self.R.rand() < self.prob)
        self.number = int(self.R.randint(2 ** 32, dtype=np.uint32))

    @own_settings()
    def __call__(self, data):
        """A new dictionary with deformed entries; the input stays unchanged."""
        result = dict(data)
        entries = [(key, mode) for key, mode in zip(self.keys, self.modes) if key in data]
        if len(entries) < len(self.keys) and not self.allow_missing_keys:
            raise InputError(f"{next(key for key in self.keys if key not in data)}: no such entry in the dictionary; "
                             "correct the keys, or set allow_missing_keys.")
        self.randomize()
        if not entries or not (self.chosen or self.field_key):
            return result
        first = entries[0][0]
        _, *shape = whole = shape_of_entry(data, first)
        warn_of_channels(first, whole)
        for key, _ in entries:
            require_grid_of(data, first, key)
        if not self.chosen:
            result[self.field_key] = np.zeros((len(shape), *shape), np.float32)
            return result
        field = self.draw(data, first)
        for key, mode in entries:
            value = result[key]
            moved = np.stack([deform(channel, field, mode) for channel in plain(value)])
            # A copy keeps dtype, device and meta data of a tensor.
            result[key] = value.detach().clone().copy_(torch.from_numpy(moved)) if torch.is_tensor(value) else moved
        if self.field_key:
            result[self.field_key] = field
        return result

    def draw(self, data, key):
        """The field for the volumes of a dictionary, (N, *spatial) in voxels. key: the entry that a network sees."""
        cfg = self.cfg or default_config(data[key].ndim - 1)
        image, *channels = plain(data[key])
        rng_key = (self.number, 0, 0)
        device = next(self.net.parameters()).device if self.net is not None else "cpu"
        start = draw_start(self.start, (*rng_key[:2], self.number % 32), cfg)  # 48+2 rises from copy to copy
        return draw_field(image, affine_of(data, key), cfg, rng_key, start, self.net, None, self.stride, device=device,
                          channels=channels[:cfg["data.channels"] - 1])


class Registerd(Step):
    """Registers one volume of a dictionary to another, and warps further entries with it.

    fixed_key, moving_key: names of the two volumes, arrays or tensors (C, *spatial), each on its own grid. Their first
    channel is registered, or as many channels as the model was trained with.
    keys: entries on the grid of the moving volume that are warped onto the fixed grid; default moving_key.
    mode: "bilinear" for images, "smooth" or "nearest" for labels (Inference/labels.py), for all keys or one for each.
    model, affine, refine, start, device, config: as in `register` (Inference/registration.py); a path is loaded at
    the first call.
    field_key: entry that receives the field, (N, *fixed) in voxels of the fixed grid.
    allow_missing_keys: whether entries of keys may be absent.

    Affines come from a MetaTensor or from an entry "<key>_meta_dict"; else voxels are cubes. Entries of keys keep type
    and dtype, and get the affine of the fixed volume. The same input gives the same output.
    Raises InputError for invalid modes, absent entries, entries on a different grid from the moving volume, and
    whatever `register` refuses.
    """

    def __init__(self, fixed_key, moving_key, keys=None, mode="bilinear", model=None, affine=True, refine=True,
                 start="auto", device="auto", config=None, field_key=None, allow_missing_keys=False):
        self.fixed_key, self.moving_key, self.field_key = fixed_key, moving_key, field_key
        self.keys, self.modes = check_modes(mode, moving_key if keys is None else keys)
        self.options = {"model": model, "affine": affine, "refine": refine, "start": start, "device": device,
                        "config": config}
        self.allow_missing_keys = allow_missing_keys

    @own_settings()
    def __call__(self, data):
        """A new dictionary with registered entries; the input stays unchanged."""
        result = dict(data)
        wanted = (self.fixed_key, self.moving_key, *(() if self.allow_missing_keys else self.keys))
        missing = [key for key in wanted if key not in data]
        if missing:
            raise InputError(f"{missing[0]}: no such entry in the dictionary; correct the keys.")
        for key in self.keys:
            if key in data:
                require_grid_of(data, self.moving_key, key)
        warn_of_channels(self.fixed_key, shape_of_entry(data, self.fixed_key))
        # Once, and not before a DataLoader has started its workers.
        model = self.options["model"] = loaded(self.options["model"], self.options["device"])
        channels = 1 if model is None else model[1]["data.channels"]
        fixed_affine, moving_affine = (affine_of(data, key) for key in (self.fixed_key, self.moving_key))
        fixed, moving = plain(data[self.fixed_key]), plain(data[self.moving_key])
        found = register((fixed[0], fixed_affine), (moving[0], moving_affine), **self.options,
                         fixed_channels=fixed[1:channels], moving_channels=moving[1:channels])
        for key, mode in zip(self.keys, self.modes):
            if key not in data:
                continue
            given = plain(data[key])
            warped = np.stack([carry(channel, moving_affine, found.field, fixed_affine, mode) for channel in given])
            warped = np.rint(warped) if mode == "bilinear" and given.dtype.kind in "bui" else warped
            place(result, key, warped.astype(given.dtype), self.fixed_key, fixed_affine)
        if self.field_key:
            result[self.field_key] = found.field
        return result


def place(result, key, array, fixed_key, fixed_affine):
    """Replace an entry by an array on the grid of the fixed volume, with the type of the entry."""
    value, placed, fixed = result[key], array, result[fixed_key]
    theirs = getattr(fixed, "meta", None) or result.get(f"{fixed_key}_meta_dict") or {}
    # SaveImaged resamples to the grid that these two describe, which is that of the moving file so far.
    grid = {"original_affine": theirs.get("original_affine", fixed_affine),
            "spatial_shape": theirs.get("spatial_shape", np.array(array.shape[1:]))}
    if isinstance(value, torch.Tensor):
        placed = torch.from_numpy(array).to(value.device, value.dtype)
    if hasattr(value, "meta"):  # a MetaTensor
        placed = type(value)(placed, affine=getattr(fixed, "affine", torch.from_numpy(fixed_affine)), meta={
            name: word for name, word in {**value.meta, **grid}.items() if name != "affine"})
    result[key] = placed
    meta = result.get(f"{key}_meta_dict")
    if meta is not None:
        result[f"{key}_meta_dict"] = {**meta, **grid, "affine": fixed_affine}


def shape_of_entry(data, key):
    """The shape (C, *spatial) of an entry. Raises InputError for anything else."""
    value = data[key]
    value = value if hasattr(value, "shape") else as_array(value, f"the entry {key}", "load it first (LoadImaged)")
    shape = tuple(value.shape)
    if len(shape) not in (3, 4):
        raise InputError(f"{key}: shape {shape} is neither (C, D, H, W) nor (C, H, W); put the channels first "
                         "(EnsureChannelFirstd), without an axis for the batch.")
    return shape


def warn_of_channels(key, shape):
    """Warn of a shape (C, H, W) that is probably that of a volume without channels."""
    if len(shape) == 3 and min(shape) >= LIKE_A_SIDE:
        warnings.warn(f"{key}: shape {shape} is taken for {shape[0]} channels of a 2D image; a volume needs an axis "
                      "for its channels in front (EnsureChannelFirstd).", stacklevel=4)  # past own_settings


def require_grid_of(data, first, key):
    """Raise InputError unless an entry has the grid of the first one; its shape, if one of them has no affine."""
    shape, first_shape = (shape_of_entry(data, name)[1:] for name in (key, first))
    if shape != first_shape:
        raise InputError(f"{key}: shape {shape} is not that of {first}, {first_shape}; bring both to one grid.")
    if any(own_affine(data, name) is None for name in (key, first)):
        return
    if not same_grid(shape, affine_of(data, key), shape, affine_of(data, first)):
        raise InputError(f"{key}: its affine is not that of {first}, so the two lie apart; bring both to one grid, for "
                         "example with ResampleToMatchd or Orientationd.")


def check_modes(mode, keys):
    """Keys as a tuple, and their modes as words. mode: a word or MONAI's constant for all of them, or one for each."""
    keys = (keys,) if isinstance(keys, str) else tuple(keys)
    words = (mode,) * len(keys) if isinstance(mode, str) else tuple(mode)
    modes = [str(getattr(word, "value", word)) for word in words]
    if len(modes) != len(keys) or not set(modes) <= set(MODES):
        raise InputError(f"mode {mode}: give {', '.join(MODES)}, one for all keys or one for each of them, {keys}.")
    return keys, modes


def plain(value):
    """An array or a tensor of any kind as a numpy array."""
    return as_array(value, "a volume", "give an array or a tensor")


def own_affine(data, key):
    """The affine of an entry, None if it has none."""
    affine = getattr(data[key], "affine", None)
    return (data.get(f"{key}_meta_dict") or {}).get("affine") if affine is None else affine


def affine_of(data, key):
    """The 4x4 affine of an entry, the identity if it has none. A 2D volume's 3x3 becomes 4x4."""
    affine, full = own_affine(data, key), np.eye(4)
    if affine is not None:
        affine = plain(affine).astype(np.float64)
        dims = len(affine) - 1
        full[:dims, :dims] = affine[:dims, :dims]
        full[:dims, 3] = affine[:dims, dims]
    return full
