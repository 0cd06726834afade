"""Data lists: the volumes and pairs that a run uses, their subjects, and which of them are held out.

It reads Decathlon and Learn2Reg JSON files, CSV lists, and folders of NIfTI files or, if they have none, of other
formats. The constants of each part stand at its head.
"""
import collections
import contextlib
import csv
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import stat
import sys
from pathlib import Path

from Dataloader.formats import PICTURES, is_series, made_grey
from Dataloader.nifti import NIFTI, SUFFIXES, ends_in, open_nifti, read_header
from Runtime.errors import InputError
from Runtime.files import as_stored, no_name_twice, unfit_for_a_file


def read_datalist(root, dims=3, ids="", channels=1):
    """List the volumes of a data set, without those that the list keeps for validation or test.

    root: a folder, list or pattern, see docs/data.md. In a folder, labelsTr must hold the label of every image, and
    masksTr the mask of at least one; an image without a mask is used whole. In a list only the image is required;
    unknown keys and columns are ignored, and an empty cell counts as absent.
    dims: 2 or 3, checked on the first volume. ids: as in `select`. channels: number of images per volume. If there are
    several, X_0000, X_0001 and so on are the channels of volume X, as in nnU-Net data sets, unless the list groups
    them. One file may also hold all channels (`read_channels`).

    Returns: list of dict(id=str, image=Path, label=Path or None, mask=Path or None, subject=str, modality=str,
    split="", "train", "val" or "test"), sorted by id, plus channels=list of Path if further channels are files.
    `volume_id` derives the ids. If the list names no modality, the last number of a name like X_0001_0001 picks one
    from "modality" in the JSON file, if that has several; otherwise it is what a BIDS name ends in, or a contrast at
    the end of another name (case_7_flair), else "".
    Raises InputError for a missing or malformed list, missing files, duplicate ids and an empty selection.
    """
    chosen = select(root, trainable(root, list_volumes(root, channels=channels)), ids)
    read_header(chosen[0]["image"], dims, channels)
    return chosen


def list_volumes(root, pattern="", channels=1, as_listed=False, quiet=False):
    """All volumes of a data set, as `read_datalist` describes them. Only headers are read, and only where images of a
    folder would share a label.

    pattern: as in `name_subjects`. channels: as there; None: as many as a list names, or files of a case share a label.
    as_listed: in the order of the list, not by id. quiet: print no warning about files that are not used.
    """
    root = Path(root)
    if not root.exists() and not glob.has_magic(str(root)):
        raise InputError(f"{root}: no such data folder or list; check the path.")
    items, unused, passed = _read_items(root, channels)
    if not items:
        where = _image_folder(root) if root.is_dir() and not list_file(root) else root
        pictures = [name for name in sorted(os.listdir(where)) if ends_in(name, PICTURES)] if where.is_dir() else []
        raise InputError(f"{where}: found no .nii, .nii.gz or other volume; "
                         f"{made_grey(where / pictures[0]) if pictures else 'check the folder'}.")
    items = _with_channels(root, items, channels)
    by_id = {}
    for item in items:
        before = by_id.setdefault(as_stored(item["id"]), item)
        if before is not item:
            advice = "" if list_file(root) else 'choose the images by a pattern such as "Data/**/*_T1w.nii.gz", '
            raise InputError(f"{root}: two volumes have the id {item['id']} ({before['image']} and {item['image']}); "
                             f"{advice}rename or remove one, or give each its own id in a .csv list.")
    name_subjects(root, items, pattern)
    if not quiet:
        _tell_what_is_unused(root, items, unused, passed)
    return items if as_listed else sorted(items, key=lambda item: item["id"])  # as in a cache


def list_single(root, pattern="", as_listed=False, quiet=False):
    """`list_volumes` for a program that uses only the first image of each volume, with a warning if there are more."""
    items = list_volumes(root, pattern, channels=None, as_listed=as_listed, quiet=quiet)
    if not quiet and (several := next((item for item in items if "channels" in item), None)):
        print(f"warning: {root}: only the first channel of each volume is used, such as {several['image'].name}.",
              file=sys.stderr)
    return items


def _tell_what_is_unused(root, items, unused, passed):
    """Warn of segmentations while volumes lack a label or have only a mask, and of volumes that are not read. unused,
    passed: as from `_read_items`."""
    lacking = sum(not item["label"] and not item["mask"] for item in items)
    labels = [] if list_file(root) else [item["label"] for item in items if item["label"]]
    masks = [label for label in labels if (match := SEGMENTATION.fullmatch(_stem(label))) and _is_mask(match)]
    if unused and (lacking or masks):
        said = [f"{count} of {len(items)} volumes have {what}" for count, what in (
            (lacking, "no label"), (len(masks), "only a mask as label")) if count]
        print(f"warning: {root}: {', '.join(said)}, and {len(unused)} of the segmentations match no volume, such as "
              f"{unused[0]}: name them after their images, or list both in a .csv.", file=sys.stderr)
    elif 0 < len(masks) < len(labels):
        print(f"warning: {root}: {len(masks)} of {len(labels)} labels are masks, such as {masks[0]}, and the others "
              "are not: list images, labels and masks in a .csv.", file=sys.stderr)
    elif lacking and (path := _derived_segmentation(root)):
        print(f"warning: {root}: {lacking} of {len(items)} volumes have no label, and derivatives is not read, which "
              f"holds segmentations such as {path}: to use them, list images and labels in a .csv.", file=sys.stderr)
    if passed:
        print(f"warning: {root}: only its NIfTI files are read, not {len(passed)} further volumes there, such as "
              f"{passed[0]}: to use them too, list all volumes in a .csv.", file=sys.stderr)


def _read_items(root, channels):
    """The items of a list, folder or pattern; the segmentations in it that belong to none of them; the volumes that
    are not read because it has NIfTI files."""
    if root.is_dir():
        if path := list_file(root):
            return _from_json(path), [], []
        paths, passed = _volumes_under(_image_folder(root))
        return *_from_paths(root, paths, channels), passed
    if not root.exists():  # a pattern
        above, found = _base_of(root), sorted({*glob.glob(str(root), recursive=True)})  # **/** finds all twice
        paths = [path for path in map(Path, found) if ends_in(path, SUFFIXES) and path.is_file()]
        paths = paths if OF_RESULTS.match(root.name) else _without_results(paths, above)  # it may ask for results
        return *_from_paths(above, paths, channels), []
    if root.suffix.lower() not in (".json", ".csv"):
        raise InputError(f"{root}: a file, not a data folder, .json or .csv list; give the folder that holds it.")
    return _from_json(root) if root.suffix.lower() == ".json" else _from_csv(root), [], []


def _image_folder(root):
    """The folder that holds the images of a data set: imagesTr or the like, otherwise `root` itself."""
    inner = ["imagesTr"] if (root / "imagesTr").is_dir() else []
    if not inner and (here := Folder(root)).label_folders:
        inner = [name for name in sorted(here.entries) if name.lower() in IMAGE_FOLDERS]
    return root / inner[0] if inner else root


def list_file(root):
    """The list that data.root names or contains: a Path; None if there is none. root: a Path.

    Raises InputError for a folder with two lists.
    """
    if not root.is_dir():
        return root if root.is_file() else None
    # Learn2Reg names its list after the task: OASIS_dataset.json.
    lists = [root / "dataset.json"] if (root / "dataset.json").is_file() else sorted(root.glob("[!.]*_dataset.json"))
    if len(lists) > 1:
        raise InputError(f"{root}: the folder has two lists, {lists[0].name} and {lists[1].name}; give one of "
                         "these files instead of the folder.")
    return lists[0] if lists else None


def is_one_volume(source):
    """Whether a path names one volume, not a folder, list or pattern of several."""
    source = Path(source)  # brackets may belong to its name
    return ends_in(source, SUFFIXES) and not source.is_dir() and (source.is_file() or not glob.has_magic(str(source)))


def without_segmentations(sources):
    """Files, folders, lists and patterns of a command line, without files named as segmentations if there are several:
    a shell's `*` names them beside their images."""
    return [source for source in sources if len(sources) == 1
            or not (ends_in(source, SUFFIXES) and is_named_segmentation(source))]


def _base_of(root):
    """The data folder: `root` itself, that of a list, or the last one before the first wildcard of a pattern."""
    if root.is_dir():
        return root
    base = root.parent
    while not root.exists() and glob.has_magic(str(base)):
        base = base.parent
    return base


def _below(base, path):
    """A path relative to the data folder; unchanged if it is on another Windows drive."""
    path = Path(path)
    return path if path.is_absolute() and path.drive != Path(base).drive else Path(os.path.relpath(path, base))


# ---------------------------------------------------------------------------------------------------------------------
# What the name of a file says
# ---------------------------------------------------------------------------------------------------------------------

# A segmentation is named after its image, or after what the images of a subject or session have in common, followed by
# one of these words. It may also have the word alone, in a folder of its own, or before a number: label0001 of img0001.
SEGMENTATION = re.compile(r"(?:(?P<of>.+?)[_. +-])?(?P<word>d?segm?|aseg|wmparc|ribbon|synthseg|segmentations?|"
                          r"annotations?|labels?|labelmap|(?:(?<!desc-)(?:brain|bet)[_-]?)?masks?|msk|gt|"
                          r"ground_?truth|gtv[a-z]?|wmh|staple|probseg|pve(?:seg)?|(?:brainsegmentation)?posteriors)"
                          r"(?:[_-]?(?P<number>[0-9]+))?", re.I)
SHARES = re.compile("probseg|pve|posteriors", re.I)  # such words mark shares of tissues, neither images nor label maps
ENTITIES = re.compile(r"_(?:space|desc|label|res|atlas)-[A-Za-z0-9]+")  # BIDS entities that may differ from the image's
CHANNEL = re.compile(r"_\d+_(000\d)$")  # a channel or state, after the subject number
BIDS = re.compile(r"sub-[A-Za-z0-9]+(?=_|$)")  # starts a name: sub-01_ses-02_T1w belongs to subject sub-01
# ADNI_002_S_0413_MR_..._I40657 and PPMI_3102_MR_..._I3862 belong to 002_S_0413 and 3102; the rest tells the scan.
LONI = re.compile(r"(?<![A-Za-z0-9])[0-9]{3}_S_[0-9]{4}(?![0-9])|(?<=^[A-Z]{4}_)[0-9]+(?=_(?:MR|PT)_.+_I[0-9]+$)")
# The end of a name may tell the scans of one subject apart: by their contrast, a time or a side.
CONTRAST = re.compile(r"(?:^|[_-])(T1(?:w|n|c|ce|gd)?|T2(?:[wf]|[_-]SPACE)?|FLAIR|PDw?|STIR|MPRAGE|SWI|DWI|HBV|ADC|"
                      r"DTI|ASL|LGE|CTA?|CBCT|MRA|MRI?|PE?T)$", re.I)
TIME = re.compile(r"(?<=[0-9])[_-](?:(?:frame|phase|ses|session|visit|timepoint|tp|MR)[_-]?[0-9]+|T[0-9]0?|"
                  r"BL|FU|baseline|follow-?up|(?:pre|post)(?:-?op|-?contrast)?|before|after|[ie]BHCT|"
                  r"(?:insp|exp)(?:iration)?|inhale|exhale|E[DS]|left|right|[LR]|[lr]h|(?:19|20)[0-9]{6})$|"
                  r"(?<=^BraTS-[A-Z]{3}-[0-9]{5})-[0-9]{3}$|"
                  # group2_v17 and 2019_V17 may be persons
                  r"(?<=[0-9]{3})(?<!^20[0-9]{2})[_-](?:V[0-9]{1,2}|(?:MR_)?d[0-9]{4})$|"
                  r"(?<=^[0-9]{7})_[0-9]{5}_[0-9]_[0-9]$", re.I)  # UK Biobank: person, field, visit, array
# SPM and CAT12 put letters before the name of a scan: its tissues c1anna_1 and mwp1anna_1, its fields y_anna_1.
MADE_BY_SPM = re.compile(r"i?y_|[amrsuw]{1,4}|r?m?w?[cp][0-6]")
# So may what was done to a scan: case_7 and case_7_brain are one subject.
PROCESSED = re.compile(r"(?:[_-](?:brain|bet|ss|(?:skull_?)?strip(?:ped|ping)?|defaced|n4|"
                       r"bias_?corr(?:ected)?|corrected|restored?|norm(?:ali[sz]ed)?|reg(?:istered)?|resampled|"
                       r"preproc(?:essed)?|denoised|orig(?:inal)?|raw|crop(?:ped)?))+$", re.I)
SCAN_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?:3D|CT1|T[12]|MNI)\w*|[0-9.]+mm(?![A-Za-z])", re.I)  # tells no subject


def _stem(path):
    name = os.path.basename(path)
    lower = name.lower()
    suffix = next((suffix for suffix in SUFFIXES if lower.endswith(suffix)), "")
    return name[:len(name) - len(suffix)]


def volume_id(path):
    """Id of a volume: its file name without suffixes.

    A channel suffix _0000 is dropped too, but only after a number (OASIS_0007_0000 is OASIS_0007): in subject_0000 it
    is the number of the subject.
    """
    return re.sub(r"(?<=\d)_0000$", "", _stem(path))


def is_named_segmentation(path):
    """Whether the name of a file marks it as a segmentation, such as sub-01_dseg.nii.gz."""
    return bool(SEGMENTATION.fullmatch(_stem(path)))


def _is_mask(match):
    """Whether a match of SEGMENTATION is the name of a mask."""
    return match["word"].lower().rstrip("s").endswith("mask")


def _without_scan(name):
    """A name without what was done to the scan, contrast and TIME at its end; "" if nothing else is left."""
    while (end := PROCESSED.search(name) or CONTRAST.search(name) or TIME.search(name)):
        name = name[:end.start()]
    return name


def names_apart(names, paths, base=None):
    """The names of volumes. One that several have, or a contrast alone, is preceded by the folders below `base`.

    s1/T1.nii.gz and s2/T1.nii.gz are s1_T1 and s2_T1. base: by default the folder that holds all of their folders.
    """
    counts, found = collections.Counter(map(as_stored, names)), []
    if base is None and names:
        outer = [os.path.dirname(os.path.dirname(os.path.abspath(path))) for path in paths]
        alone = len({os.path.splitdrive(path)[0] for path in outer}) > 1  # on several disks of Windows
        base = Path(outer[0]).anchor if alone else os.path.commonpath(outer)
    for name, path in zip(names, paths):
        if counts[as_stored(name)] > 1 or not _without_scan(name):
            inner = _below(base, os.path.abspath(path)).parent.parts
            above = (part for part in inner if part.lower() not in IMAGE_FOLDERS)
            name = "_".join([*above, name])
        found.append(name)
    return found


def set_apart(items, base=None):
    """Give items of one name the ids of `names_apart`, in place; two files with the name case_7 are probably copies."""
    for item, name in zip(items, names_apart([item["id"] for item in items], [item["image"] for item in items], base)):
        if name != item["id"] and not re.search("[0-9]", SCAN_NUMBER.sub("", _without_scan(item["id"]))):
            item["id"] = name


# ---------------------------------------------------------------------------------------------------------------------
# Folders, patterns and the labels in them
# ---------------------------------------------------------------------------------------------------------------------

# Folders of images beside folders of labels, in any case; an image may lack a label there.
IMAGE_FOLDERS = ("images", "image", "imgs", "img")
LABEL_FOLDERS = ("labels", "label", "segmentations", "segmentation", "segs", "seg", "masks", "mask", "gt",
                 "annotations")
SIDE_FOLDERS = {"labelstr", "labelsts", "maskstr", "masksts", "segtr", *LABEL_FOLDERS}  # no images, without a list
NO_DATA = {"derivatives", "sourcedata"}  # BIDS folders of results and raw data, beside the images
# Files at the top of the results of OM_register.py, OM_study.py and OM_augment.py; what lies below are no scans. Until
# the jobs of --part are joined, only PART_RESULTS are there.
OWN_RESULTS = ({"results.json", "results.csv"}, {"settings.json", "draws.jsonl"})
PART_RESULTS = "parts/*_of_*/results.json"
OF_RESULTS = re.compile(r"(?:warped|field|inverse_field|jacobian|segmented_(?:fixed|moving)|disp_[0-9]+_[0-9]+|"
                        r"template|doubt|log_jacobian\w*|middle|aligned|reference)(?:_label|_channel_[0-9])?"
                        r"[.]")  # names of the volumes in folders of results
IMAGE_WORD = re.compile(r"^(?:image|img|volume|vol|scan)[_-]?(?=[0-9]+$)|[_-](?:image|img|volume|vol|scan)$", re.I)
GRID = re.compile(r"_((?:space|res)-[A-Za-z0-9]+)")  # entities that must be those of the image


class Folder:
    """A folder, listed once: checking file by file is slow on a network disk.

    path: of the folder. is_there: whether it exists. entries: {name: os.DirEntry}, empty if it cannot be read.
    """

    def __init__(self, path):
        self.path, self.is_there, self.entries = path, True, {}
        try:
            with os.scandir(path) as entries:
                self.entries = {entry.name: entry for entry in entries}
        except (OSError, ValueError):
            self.is_there = os.path.isdir(path)

    @functools.cached_property
    def files(self):
        """Names of the files in it. Each link costs a call to the disk."""
        found = set()
        for name, entry in self.entries.items():
            with contextlib.suppress(OSError):  # of a link that leads in a circle
                if entry.is_file():
                    found.add(name)
        return found

    @functools.cached_property
    def volumes(self):
        """Names of the files that can hold volumes, sorted. Those with a leading dot are unfinished writes or macOS
        resource forks."""
        return sorted(name for name in self.files if ends_in(name, SUFFIXES) and name[0] != ".")

    @functools.cached_property
    def segmentations(self):
        """{the name that segmentations are named after: [(whether a mask, file name)]}."""
        found = {}
        for name in self.volumes:
            match = SEGMENTATION.fullmatch(_stem(name))
            if match and not SHARES.search(match["word"]):
                of = ENTITIES.sub("", match["of"] or match["number"] or "")
                found.setdefault(of, []).append((_is_mask(match), name))
        return found

    @functools.cached_property
    def label_folders(self):
        """The folders of label maps, see LABEL_FOLDERS, the most telling names first."""
        names = [name for name in self.entries if name.lower() in LABEL_FOLDERS]
        names.sort(key=lambda name: (LABEL_FOLDERS.index(name.lower()), name))
        return [self.path / name for name in names if os.path.isdir(self.path / name)]

    @functools.cached_property
    def holds_results(self):
        """Whether it holds results of these programs, even if DataLad has not fetched their content."""
        return any(names <= self.entries.keys() for names in OWN_RESULTS) or (
            "parts" in self.entries and any(self.path.glob(PART_RESULTS)))

    @functools.cached_property
    def holds_one_scan(self):
        """Whether it holds one image besides segmentations, or images that are named by their contrast alone."""
        images = [_stem(name) for name in self.volumes if not is_named_segmentation(name)]
        return len(images) == 1 or bool(images) and not any(map(_without_scan, images))


def _volumes_under(base):
    """Paths of the NIfTI files anywhere in a folder, or, without any, of volumes in other formats; and of the volumes
    passed over: files that no NIfTI file is named after. Series of slices are mostly what NIfTI files were made of, and
    so are the volumes in a folder mri of FreeSurfer.

    A folder of DICOM slices is one volume. Folders of results, see OWN_RESULTS, are skipped. Linked folders come last,
    so that a folder inside `base` keeps its own name. Raises InputError for broken links.
    """
    paths, lost, seen, tops, root = [], [], set(), [str(base)], os.path.realpath(base) + os.sep
    walks = (os.walk(top, onerror=lambda error: _unreadable(error.filename, error)) for top in tops)
    for folder, inner, names in itertools.chain.from_iterable(walks):
        real = os.path.realpath(folder)
        # A link's own name hides that of the folder; links to BIDS folders of elsewhere are wanted.
        hidden = SIDE_FOLDERS | NO_DATA if real.startswith(root) else SIDE_FOLDERS
        if real in seen or folder in tops[1:] and os.path.basename(real).lower() in hidden:
            inner.clear()
            continue
        seen.add(real)
        # Names with a leading dot are unfinished writes, macOS resource forks, and the .git/annex of a DataLad set.
        inner[:] = sorted(name for name in inner if name.lower() not in SIDE_FOLDERS | NO_DATA and name[0] != ".")
        here = Folder(Path(folder))
        if folder != str(base) and here.holds_results:
            inner.clear()
            continue
        if is_series(folder):  # the folder is a volume, its slices are none, and others may lie beside them
            paths.append(here.path)
            names = [name for name in names if not ends_in(name, ".dcm")]
        tops += [os.path.join(folder, name) for name in inner if os.path.islink(os.path.join(folder, name))]
        for name in sorted(name for name in names if ends_in(name, SUFFIXES) and name[0] != "."):
            path = here.path / name
            if name in here.files:
                paths.append(path)
            elif path.is_symlink():
                lost.append(path)
    if lost:
        raise InputError(f"{lost[0]}: a link to {os.readlink(lost[0])}, which does not exist ({len(lost)} such "
                         f"links in {base}); fetch the content, for example with `datalad get` or `git annex get`, "
                         "or remove the links.")
    nifti = [path for path in paths if ends_in(path, NIFTI)]
    if all(map(is_named_segmentation, nifti)):
        return paths, []
    names = set(map(_stem, nifti))
    return nifti, [path for path in paths if not ends_in(path, NIFTI) and path.is_file() and _stem(path) not in names
                   and not is_named_segmentation(path) and path.parent.name != "mri"]


def _unreadable(folder, error):
    raise InputError(f"{folder}: this folder cannot be read ({error.strerror}); have its permissions corrected, or "
                     "move it out of the data set.") from None


def _without_results(paths, above):
    """The files of a pattern without the results of earlier runs below `above`; all of them if it finds nothing else.

    A folder of results may be that of an image too, so only files with names of results count, copies in bids/, and all
    that OM_augment.py writes.
    """
    folders = {folder for path in paths for folder in path.parents if above in folder.parents}
    of_results = {folder for folder in folders if Folder(folder).holds_results}
    drawn = {folder for folder in of_results if (folder / "draws.jsonl").is_file()}
    copies = {folder / "bids" for folder in of_results}
    return [path for path in paths if not (drawn | copies).intersection(path.parents) and not (
        OF_RESULTS.match(path.name) and of_results.intersection(path.parents))] or paths


def _from_paths(root, paths, channels):
    """The items of some volumes with their labels and masks, and the segmentations that belong to none of them.

    A file named as a segmentation is not an image. A label outside labelsTr that several images would share belongs to
    those of its shape.
    """
    found = {path for path in paths if is_named_segmentation(path)}
    images = [path for path in paths if path not in found]
    if paths and not images:
        raise InputError(f"{root}: the names of all {len(paths)} volumes mark them as segmentations, such as "
                         f"{paths[0].name}; give the folder of the images.")
    listed, items, guessed = functools.cache(Folder), [], {}  # guessed: {label: its items}
    bases = {image.parent: image.parent.parent if image.parent.name == "imagesTr" else root for image in images}
    places = {folder: _label_places(root, folder, listed) for folder in bases}
    for image in images:
        base = bases[image.parent]
        own = _of_same_name(base / "labelsTr", image, listed, channels)
        if own is None and listed(base / "labelsTr").is_there:
            of_case = channels == 1 and _of_same_name(base / "labelsTr", image, listed, channels=2)
            several = f", or set data.channels if {of_case.name} belongs to several channels" if of_case else ""
            raise InputError(f"{base / 'labelsTr' / image.name}: the label of {image} is missing; restore it or list "
                             f"the volumes in {root / 'dataset.json'} without this label{several}.")
        label = own or label_beside(image, listed(image.parent))
        for place in () if label else places[image.parent]:
            label = label or _of_same_name(place, image, listed, channels) or label_beside(image, listed(place))
        items.append(_item(image, label, _of_same_name(base / "masksTr", image, listed, channels), {}))
        if label and not own:
            guessed.setdefault(label, []).append(items[-1])
    masks = [base / "masksTr" for base in bases.values() if listed(base / "masksTr").is_there]
    if masks and not any(item["mask"] for item in items):
        raise InputError(f"{masks[0]}: no mask has the name of an image, such as {items[0]['image'].name}; rename the "
                         "masks or remove the folder.")
    for label, several in guessed.items():
        folders = {item["image"].parent for item in several}
        for item in several if len(several) > 1 else ():
            if len(folders) > 1 or not _same_shape(item["image"], label):  # s1/T1 and s2/T1 are two people
                item["label"] = None
    set_apart(items, root)
    for folder in set(itertools.chain(*places.values())):
        found.update(folder / name for name in listed(folder).volumes)
    used = {item["label"] for item in items}
    return items, sorted(path for path in found - used if not SHARES.search(path.name))


def _of_same_name(folder, image, listed, channels):
    """The file in a folder with the name of an image, or None. Unless channels is 1, X also matches X_0001."""
    identities = (volume_id(image), case_and_channel(image)[0]) if channels != 1 else (volume_id(image),)
    names = itertools.chain([image.name], (identity + suffix for identity in identities for suffix in SUFFIXES))
    paths = (folder / name for name in names)
    return next((path for path in paths if _is_file(path, listed)), None) if listed(folder).is_there else None


def _is_file(path, listed):
    """Whether a file exists. listed: gives the Folder of a path, each listed once. Raises InputError if this user may
    not look."""
    folder = listed(path.parent)
    if folder.files and (path.name in folder.files or sys.platform not in ("darwin", "win32")):
        return path.name in folder.files
    try:  # the folder cannot be listed, or the system finds other spellings too
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError as error:
        _unreadable(path.parent, error)
    except (OSError, ValueError):
        return False


def _label_places(root, folder, listed):
    """The folders in which the labels of a folder's images may lie, as `labels` beside `images`: a list of Paths."""
    within = itertools.takewhile(lambda outer: outer != root.parent, (folder, *folder.parents))
    above = next((outer for outer in within if outer.name.lower() in IMAGE_FOLDERS), None)
    beside, inner = (above.parent, folder.relative_to(above)) if above else (folder, Path())
    folders = itertools.chain(*(listed(base).label_folders for base in dict.fromkeys((beside, root))))
    return [place for folder in folders for place in dict.fromkeys((folder / inner, folder))]


def _same_shape(image, label):
    """Whether two files have one shape. An unreadable file counts as alike: the error comes when it is read."""
    try:
        return open_nifti(image).shape == open_nifti(label).shape
    except InputError:
        return True


def label_beside(image, folder=None):
    """The segmentation that lies beside an image and is named after it, or None.

    sub-01_T1w has sub-01_T1w_dseg, sub-01_space-T1w_dseg or sub-01_dseg; case_0000 and case_flair have case_seg; an
    image that has a folder for itself or for its contrasts alone (t1, flair) has seg. Of several, it prefers a file
    that is not a mask, then the one with most of the image's name, then the one with the same BIDS entities, then
    with the fewest, then the first in alphabetical order. Space and resolution must be the same; space-orig and, for a
    T1w, space-T1w count as none. folder: Folder of the segmentations, by default that of the image.
    """
    image, full = Path(image), _stem(image)
    folder = folder or Folder(image.parent)
    stem = ENTITIES.sub("", full)
    plain = PROCESSED.sub("", stem)
    wanted = [stem, volume_id(stem), plain, stem.rpartition("_")[0] if BIDS.match(stem) else CONTRAST.sub("", plain),
              IMAGE_WORD.sub("", stem)]
    wanted = [word for word in wanted if word]
    if folder.path == image.parent and folder.holds_one_scan:
        wanted.append("")
    own = {"space-orig", f"space-{stem.rpartition('_')[2]}"}
    grid, entities = set(GRID.findall(full)) - own, set(ENTITIES.findall(full))
    found = [(is_mask, wanted.index(word), set(ENTITIES.findall(name)) != entities, len(ENTITIES.findall(name)), name)
             for word in set(wanted) for is_mask, name in folder.segmentations.get(word, ())
             if set(GRID.findall(name)) - own == grid]
    return folder.path / min(found)[-1] if found else None


def _derived_segmentation(root):
    """A segmentation in the first thousand folders of the BIDS folder of results, or None. Head masks do not count."""
    for folder, inner, names in itertools.islice(os.walk(root / "derivatives"), 1000):
        inner[:] = sorted(name for name in inner if name not in ("func", "figures", "log", "logs"))
        for name in sorted(names):
            if (ends_in(name, NIFTI) and is_named_segmentation(name) and name[0] != "."
                    and not SHARES.search(name) and "mask" not in name.lower()):
                return Path(folder, name)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Lists in JSON and CSV files
# ---------------------------------------------------------------------------------------------------------------------

MOST_CHANNELS = 5
FURTHER = tuple(f"image_{number}" for number in range(2, MOST_CHANNELS + 1))  # columns of further channels
COLUMNS = ("image", "label", "mask", "id", "subject", "modality", "split")
OTHER_WORDS = {**dict.fromkeys(("seg", "segmentation", "gt", "ground_truth", "labelmap", "annotation"), "label"),
               **dict.fromkeys(("patient", "participant", "sub", "case", "pid"), "subject"), "set": "split",
               "partition": "split"}  # of columns
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
          "testing": "test"}


def _from_json(path):
    content = read_json(path)
    entries = content.get("training") if isinstance(content, dict) else None
    if entries is None and isinstance(content, dict) and "channel_names" in content:
        return _from_nnunet(path, content)
    if not isinstance(entries, list):
        raise InputError(f'{path}: there is no list under "training"; add one with an image and a label path per '
                         "volume.")
    modalities = content.get("modality")
    if not isinstance(modalities, dict) or len(modalities) < 2:
        modalities = {}
    if not all(isinstance(word, str) for word in modalities.values()):
        raise InputError(f"{path}: \"modality\" {modalities} is not one word per channel; correct it.")
    entries = [_checked_entry(path, entry) for entry in entries] + _validation_entries(path, content)
    for entry in entries:
        if "modality" not in entry and (channel := CHANNEL.search(_stem(entry["image"]))):
            entry["modality"] = modalities.get(str(int(channel[1])), "")
    return _listed_items(path, [(path, entry) for entry in entries])


def _from_nnunet(path, content):
    """The items of an nnU-Net v2 data set: <case>_0000 and so on in imagesTr, <case> in labelsTr.

    Each channel is a volume; the channels of a case share its label and its subject.
    """
    names, ending = content["channel_names"], content.get("file_ending", ".nii.gz")
    if not isinstance(names, dict) or ending not in SUFFIXES:
        raise InputError(f"{path}: channel_names {names} and file_ending {ending} are not those of nnU-Net; "
                         "correct them.")
    items, listed = [], functools.cache(Folder)
    for name in listed(path.parent / "imagesTr").volumes:
        match = re.fullmatch(rf"(.+)_(\d{{4}}){re.escape(ending)}", name)
        if not match:
            continue
        case, channel = match[1], int(match[2])
        label = path.parent / "labelsTr" / f"{case}{ending}"
        if not _is_file(label, listed):
            raise InputError(f"{label}: the label of {name} is missing; restore it.")
        words = {"id": case if channel == 0 else f"{case}_{match[2]}", "subject": case,
                 "modality": str(names.get(str(channel), ""))}
        items.append(_item(path.parent / "imagesTr" / name, label, None, words))
    return items


def _validation_entries(path, content):
    """The volumes under "validation", each once, all with split "val". A pair counts as its two volumes."""
    entries = content.get("validation", [])
    if not isinstance(entries, list):
        raise InputError(f"{path}: \"validation\" is not a list; give it entries like those of \"training\".")
    by_image = {}
    for entry in entries:
        pair = isinstance(entry, dict) and "image" not in entry and "fixed" in entry and "moving" in entry
        for volume in (entry["fixed"], entry["moving"]) if pair else (entry,):
            checked = {**_checked_entry(path, volume), "split": "val"}
            by_image[checked["image"]] = checked
    return list(by_image.values())


def _checked_entry(path, entry):
    """An entry of a JSON list as {column: text}, without empty values. Raises InputError for values of other types."""
    entry = {"image": entry} if isinstance(entry, str) else entry
    image = entry.get("image") if isinstance(entry, dict) else None
    further = image[1:] if isinstance(image, list) else []
    image = image[0] if isinstance(image, list) and image else image
    if not all(isinstance(word, str) and word and "\0" not in word for word in (image, *further)):
        raise InputError(f"{path}: the entry {entry} has no image path; correct it.")
    if len(further) > len(FURTHER):
        raise InputError(f"{path}: the entry {entry} has {1 + len(further)} channels, but a volume can have at most "
                         f"{MOST_CHANNELS}; leave some out.")
    name = Path(image).name
    for roles, kinds, what in ((("label", "mask"), (str,), "path"),
                               (("subject", "modality", "split"), (str, int), "word")):
        for role in roles:
            value = entry.get(role)
            if value is not None and (type(value) not in kinds or "\0" in str(value)):
                raise InputError(f"{path}: the {role} {value} of {name} is not a {what}; correct or drop it.")
    # Not "id": in a JSON list it may belong to another program. A .csv list is written for OmniMorph.
    words = {role: entry.get(role) or "" for role in ("label", "mask")}
    for role in ("subject", "modality", "split"):
        words[role] = "" if entry.get(role) is None else str(entry[role]).strip()
    words = {role: word for role, word in words.items() if word}
    return {**words, "image": image, **dict(zip(FURTHER, further))}


def _from_csv(path):
    header, rows = read_csv(path, (*COLUMNS, *FURTHER))
    if "image" not in map(str.lower, header):
        raise InputError(f"{path}: the header {','.join(header)} has no column \"image\"; give this name to the "
                         "column of the image paths.")
    if not rows:
        raise InputError(f"{path}: the list has a header but no volumes; add a row for each volume.")
    for cell in header:  # other columns are left out, but a misnamed one would lose its labels in silence
        word = re.sub(r"[ -]+", "_", cell.lower())
        word = word if word in OTHER_WORDS else re.sub(r"(?:_?(?:path|file|name|id)|s)+$", "", word)
        word = OTHER_WORDS.get(word, word)
        if word in COLUMNS and word not in map(str.lower, header):
            raise InputError(f'{path}: the column "{cell}" is not known; call it "{word}" if it is that, else give it '
                             "another name.")
    entries = [(f"{path} line {line}", entry) for line, entry in rows]
    for where, entry in entries:
        if "image" not in entry:
            raise InputError(f"{where}: no image path; fill the cell or remove the row.")
        if unfit := unfit_for_a_file(entry.get("id", "")):
            raise InputError(f"{where}: the id {entry['id']} contains {unfit}, which a file name cannot; choose "
                             "another.")
    return _listed_items(path, entries)


def _listed_items(path, entries):
    """The items of a list. entries: pairs of where an entry stands, for the errors, and its {column: text}."""
    listed = functools.cache(Folder)
    items = [_listed_item(where, path.parent, entry, listed) for where, entry in entries]
    set_apart([item for item, (_, entry) in zip(items, entries) if "id" not in entry], path.parent)
    return items


def _listed_item(where, folder, entry, listed):
    """The item of a list entry. where: list and line, for the errors. Raises InputError if a file is missing."""
    paths = {role: folder / entry[role] if role in entry else None for role in ("image", "label", "mask")}
    further = {role: folder / entry[role] for role in FURTHER if role in entry}
    if gap := next((role for role in FURTHER[:len(further)] if role not in further), None):
        raise InputError(f"{where}: {paths['image'].name} has {list(further)[-1]} but no {gap}, so a channel would be "
                         f"taken for another; fill in {gap}, or remove the row.")
    if not _is_file(paths["image"], listed):  # nnU-Net v1 lists cases, not channels
        first = paths["image"].parent / f"{_stem(paths['image'])}_0000.nii.gz"
        paths["image"] = first if _is_file(first, listed) else paths["image"]
    for role, path in {**paths, **further}.items():
        if path and not _is_file(path, listed) and not is_series(path):
            whose = "its" if role.startswith("image") else f"the {role}"
            raise InputError(f"{path}: the {role} listed in {where} is missing; restore it or drop {whose} entry.")
    if entry.get("split", "train").lower() not in SPLITS:
        raise InputError(f"{where}: the split {entry['split']} of {paths['image'].name} is not train, val or test; "
                         "write one of these.")
    item = _item(**paths, words=entry)
    return {**item, "channels": list(further.values())} if further else item


def _item(image, label, mask, words):
    """The item of a volume, as `read_datalist` returns it. words: its id, subject, modality, split, if listed."""
    return {"id": words.get("id") or volume_id(image), "image": image, "label": label, "mask": mask,
            "subject": words.get("subject", ""), "modality": words.get("modality", ""),
            "split": SPLITS.get(words.get("split", "").lower(), "")}


def read_json(path):
    """The content of a JSON file. Raises InputError if it cannot be read or is not valid JSON."""
    try:
        return json.loads(_read_text(path), object_pairs_hook=no_name_twice)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); correct the file.") from error


def read_csv(path, known):
    """The header of a CSV file, a list of cells, and its non-blank rows, a list of (line, {column: cell}).

    known: column names in lower case; none may occur twice in the header. Other columns and empty cells are left out.
    Raises InputError if the file is not CSV in UTF-8, or if a row and the header differ in their number of cells.
    """
    try:
        text = _read_text(path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error}); save it as CSV in UTF-8.") from error
    if "\0" in text:
        raise InputError(f"{path}: the text contains zero bytes, so the file is damaged; save it as CSV in UTF-8 "
                         "again.")
    # Column names contain no separator, so the header decides; csv.Sniffer would guess.
    header = next((line for line in text.split("\n") if line.strip()), "")
    reader = csv.reader(io.StringIO(text), delimiter=";" if header.count(";") > header.count(",") else ",", strict=True)
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: not valid CSV ({error}); correct the line.") from error
    rows = [(line, cells) for line, cells in rows if any(cells)]
    if not rows:
        raise InputError(f"{path}: an empty list; write a header with the column image, and a row per volume.")
    header, entries = rows[0][1], []
    columns = [cell.lower() for cell in header]
    if twice := next((name for name in known if columns.count(name) > 1), None):
        raise InputError(f"{path}: the header has the column \"{twice}\" twice; rename or remove one.")
    for line, cells in rows[1:]:
        if len(cells) != len(columns):
            raise InputError(f"{path} line {line}: {len(cells)} cells, but the header has {len(columns)}; correct the "
                             "row, and quote a path that holds the separator.")
        entries.append((line, {name: cell for name, cell in zip(columns, cells) if cell and name in known}))
    return header, entries


def _read_text(path):
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: the list cannot be read ({error.strerror}); correct its permissions.") from error


# ---------------------------------------------------------------------------------------------------------------------
# Channels: the images of one volume in separate files
# ---------------------------------------------------------------------------------------------------------------------

NUMBERED = re.compile(r"(.+)_(\d{4})")  # the name of an nnU-Net image: case and channel, from 0


def _with_channels(root, items, channels):
    """The items with the files of each volume's channels together. channels: as in `list_volumes`. Raises InputError
    for another number of files."""
    if channels is None:
        if root.suffix.lower() == ".csv":
            return items  # its rows are volumes
        labels = {}  # {case: labels and subjects of its files}
        for item in items:
            case, _ = case_and_channel(item["image"])
            labels.setdefault(case, []).append((item["label"], item["subject"]))
        shared = (are_numbered_channels(items) and len({len(own) for own in labels.values()}) == 1
                  and all(len(set(own)) == 1 and own[0][0] for own in labels.values()))
        return group_channels(items) if shared else items
    if channels > 1 and not any("channels" in item for item in items):
        if are_numbered_channels(items):
            items = group_channels(items, base=_base_of(root))
        elif not (root.is_file() or root.is_dir() and list_file(root) or are_numbered(items)):  # lists name them
            items = group_contrasts(items, channels)
    for item in items:
        found = 1 + len(item.get("channels", []))
        if found > 1 and found != channels:  # one file may hold all channels
            raise InputError(f"{root}: {item['image'].name} has {found} channels, but data.channels is {channels}; set "
                             f'it to {found}, or give each file its own entry with the same "subject".')
    return items


def are_numbered(items):
    """Whether the names of all images end in four digits."""
    return all(NUMBERED.fullmatch(_stem(item["image"])) for item in items)


def are_numbered_channels(items):
    """Whether the names of all images end in 0000, 0001 and so on, as channels do in nnU-Net, and some case has several
    of them. Other numbers, such as 0001 to 0100, are those of volumes, each with all of its channels."""
    found = [case_and_channel(item["image"]) for item in items]
    return (are_numbered(items) and {0} < {number for _, number in found} <= {*range(MOST_CHANNELS)}
            and len({case for case, _ in found}) < len(found))


def case_and_channel(path):
    """Case and number of a channel by its name: X, 1 for X_0001; any other name is channel 0 of a case of its own."""
    match = NUMBERED.fullmatch(_stem(path))
    return (match[1], int(match[2])) if match else (_stem(path), 0)


def group_channels(items, found=None, base=None):
    """Merge the items of single images into one item per case: X_0000, X_0001 and so on are channels of case X.

    The channels of a case may lie in several folders, unless a name occurs in two: p1/X_0000 and p2/X_0000 are two
    cases, with all of their channels beside them, and `set_apart` names them.
    items: as from `read_datalist`. found: the case and channel of each item, by default as its name tells. base: as in
    `names_apart`.
    Returns: items in the same order. The lowest-numbered channel is the image, the others are "channels"; label and
    mask are the first ones found in the case.
    Raises InputError if a channel of a case is missing, or if two files of a folder are the same one.
    """
    found = found or [case_and_channel(item["image"]) for item in items]
    seen, twice, cases = {}, {}, {}  # twice: {case: two files of one name}
    for item, key in zip(items, found):
        before = seen.setdefault(key, item)
        if before is not item:
            twice.setdefault(key[0], f"{before['image']} and {item['image']}")
    for item, (case, number) in zip(items, found):
        channels = cases.setdefault((case, item["image"].parent if case in twice else None), {})
        before = channels.setdefault(number, item)
        if before is not item:
            raise InputError(f"{before['image']} and {item['image']}: both are channel {number} of the case {case}; "
                             "rename or remove one.")
    most = max(number for _, number in found) + 1 if twice else max(map(len, cases.values()))
    grouped = []
    for (case, _), channels in cases.items():
        first, *others = (channels[number] for number in sorted(channels))
        if sorted(channels) != list(range(most)):
            names = ", ".join(channels[number]["image"].name for number in sorted(channels))
            apart = f" in its folder, and {twice[case]} cannot be one case" if case in twice else ""
            raise InputError(f"{first['image']}: the case {case} has {len(channels)} of {most} channels ({names})"
                             f"{apart}; add what is missing, or remove the case from the data set.")
        maps = {kind: next((item[kind] for item in channels.values() if item[kind]), None)
                for kind in ("label", "mask")}
        grouped.append({**first, **maps, "id": case, "channels": [item["image"] for item in others]})
    set_apart([item for item, (case, _) in zip(grouped, cases) if case in twice], base)
    return grouped


def group_contrasts(items, channels):
    """Items with the contrasts of each case as its channels, in alphabetical order: case_7_flair and case_7_t1.

    Unchanged unless the names of all items end with one of as many contrasts as there are channels, each with another
    one of its case, some cases have all of them, and the first file holds one image. Raises InputError as
    `group_channels`.
    """
    names = [PROCESSED.sub("", item["id"]) for item in items]
    ends = [CONTRAST.search(name) for name in names]
    contrasts = sorted({end[1].lower() for end in ends if end})
    if not all(ends) or len(contrasts) != channels:
        return items
    found = [(name[:end.start()], contrasts.index(end[1].lower())) for name, end in zip(names, ends)]
    most = max(collections.Counter(case for case, _ in found).values())
    if len(set(found)) < len(found) or most < channels or open_nifti(items[0]["image"]).shape[3:4] > (1,):
        return items
    return group_channels(items, found)


# ---------------------------------------------------------------------------------------------------------------------
# Subjects: who a volume belongs to, and who is held out. Pairs, mode 2's negatives and the split all use this.
# ---------------------------------------------------------------------------------------------------------------------

# A folder named by these or by a contrast groups subjects, or scans of one.
GROUP = re.compile(r"(?:site|cent(?:er|re)|batch|cohort|group|task|fold|part|subset|study|phase|disc|scanner|dataset|"
                   r"ses|session|visit|timepoint|tp|week|month|year|baseline|follow-?up)[ _-]?[0-9]+|"
                   r"[A-Za-z_-]*[0-9](?:[.][0-9])?T|(?:19|20)[0-9]{2}(?:-?[0-9]{2}){0,2}", re.I)
# A folder of a visit, as ADNI and TCIA name them: 2006-05-19_10_22_33.0, 07-07-2011-NA-MR.
DATE = re.compile(r"(?:19|20)[0-9]{2}-?[0-9]{2}-?[0-9]{2}(?![0-9])|[0-9]{2}-[0-9]{2}-(?:19|20)[0-9]{2}(?![0-9])")
MOST_SCANS = 20  # in the folder of one subject; a folder with more is a whole study
FEW_SUBJECTS = 10  # with fewer, none is held out unless data.val_fraction amounts to one of them


def name_subjects(root, items, pattern=""):
    """Give each item its subject, in place.

    The first of these that applies: the subject in the list; the group of the regular expression `pattern`, which must
    match in every image path below the data folder; sub-XX at the start of a BIDS name, or the number in one of LONI;
    X_0001 if all names of the data set end like X_0001_0000 and X_0001_0001; what `_by_folder` finds. A volume that SPM
    or CAT12 has made belongs to the subject of its scan, which lies beside it or one folder above.
    Items without a modality get that of their name, see `read_datalist`.
    root: folder or list, a Path. items: dicts as from `read_datalist`, subject "" if the list names none.
    Raises InputError for an unusable pattern, or one that finds no subject in an image path.
    """
    base, stems = _base_of(root), [_stem(item["image"]) for item in items]
    try:
        expression = re.compile(pattern) if pattern else None
    except re.error as error:
        raise InputError(f"data.subject_pattern \"{pattern}\": not a regular expression ({error}); correct "
                         "it.") from error
    if expression and expression.groups != 1:
        raise InputError(f"data.subject_pattern \"{pattern}\" has {expression.groups} groups; put one pair of "
                         "parentheses around the subject, such as \"^([^/]+)/\" for its folder.")
    are_channels, persons = all(map(CHANNEL.search, stems)), _by_folder(items, base)
    person_of = {(item["image"].parent, stem): person for item, stem, person in zip(items, stems, persons)}
    for item, stem, person in zip(items, stems, persons):
        item["modality"] = item["modality"] or _modality(stem)
        if item["subject"]:
            continue
        if expression:
            path = _below(base, item["image"]).as_posix()
            match = expression.search(path)
            if not match or not match[1]:
                raise InputError(f"data.subject_pattern \"{pattern}\" finds no subject in {path}; correct it, or name "
                                 "the subjects in a list.")
            item["subject"] = match[1]
            continue
        here = item["image"].parent
        origins = [(folder, stem[length:]) for length in range(1, 6) for folder in (here, here.parent)
                   if MADE_BY_SPM.fullmatch(stem[:length]) and stem[length:length + 1].isalpha()]
        if origin := next((each for each in origins if each in person_of), None):
            stem, person = origin[1], person_of[origin]
        if named := BIDS.match(stem) or LONI.search(stem):
            item["subject"] = named[0]
        else:
            item["subject"] = stem.rpartition("_")[0] if are_channels else person


def _modality(stem):
    """The modality in the name of a volume: the last word of a BIDS name, a contrast at the end of another, or ""."""
    if BIDS.match(stem):
        words = [word for word in reversed(stem.split("_")) if "-" not in word and not word.isdigit()]
        return [*filter(CONTRAST.fullmatch, words), *words, ""][0]
    contrast = CONTRAST.search(PROCESSED.sub("", stem))
    return contrast[1] if contrast else ""


def _by_folder(items, base):
    """The subject of each item by its folder, or else by its id: a list of names.

    Contrast, TIME and PROCESSED at the end of a name tell no subject: case_7 of case_7_t1, case_7_flair, case_7_frame01
    and case_7_t1_brain; the rest of a folder's name has to have a number and be no GROUP. A folder counts if its name
    has a number, is no contrast and no GROUP, and stands as a whole in the id, or above the DATE of a DICOM series,
    and if it holds at most MOST_SCANS volumes and not the whole data set; of several, the outermost.
    """
    def is_of(item, folder):
        inner = () if ends_in(item["image"], SUFFIXES) else _below(base, item["image"]).relative_to(folder).parts
        return any(map(DATE.match, inner)) or re.search(rf"(?<![^\W_]){re.escape(folder.name)}(?![^\W_])", item["id"])

    around = {}  # {folder of images: of itself and those around it, the ones that may be somebody's}
    for folder in {item["image"].parent for item in items}:
        inner = _below(base, folder)
        around[folder] = [each for each in (*reversed(inner.parents), inner) if re.search("[0-9]", each.name)
                          and _without_scan(each.name) and not GROUP.fullmatch(each.name)]
    chains = [[folder for folder in around[item["image"].parent] if is_of(item, folder)] for item in items]
    inside = collections.Counter(itertools.chain(*chains))
    folders = [next((folder for folder in chain if inside[folder] < min(len(items), MOST_SCANS + 1)), None)
               for chain in chains]
    persons = {folder: folder.with_name(rest) for folder in set(folders) - {None}  # of a folder for each scan
               if re.search("[0-9]", rest := _without_scan(folder.name)) and not GROUP.fullmatch(rest)}
    folders = [persons.get(folder, folder) for folder in folders]
    alike = collections.Counter(folder.name for folder in set(folders) if folder)
    return [_without_scan(item["id"]) or item["id"] if not folder else
            folder.name if alike[folder.name] == 1 else "_".join(folder.parts)
            for item, folder in zip(items, folders)]


def subject_key(subject):
    """The number of a subject: a hash of its name, the same in every run; below 2^48, so a float64 holds it exactly."""
    return int.from_bytes(hashlib.sha256(subject.encode(errors="surrogateescape")).digest()[:6], "big")


def split_volumes(source, items, cfg):
    """Split volumes into those to train on and those held out for validation.

    The list's test volumes are not used. Its validation volumes are held out; if there are none, those of data.val_ids;
    with neither these nor data.train_ids, data.val_fraction of the subjects that it does not mark for training
    (`held_out_subjects`). Ids and fraction hold out subjects with all of their volumes. If the list marks validation
    volumes, data.train_ids and data.val_ids narrow its two sets. With data.val_ids alone, all other subjects are
    trained on. A data.train_ids such as "25%" takes that share of the subjects that would otherwise be trained on.
    source: start of the error messages. items: from `list_volumes` or a cache.
    Returns: two lists of items in their order. Raises InputError for ids that select nothing.
    """
    train_ids, val_ids, fraction = cfg["data.train_ids"], cfg["data.val_ids"], cfg["data.val_fraction"]
    free = trainable(source, items)
    marked = [item for item in items if item["split"] == "val"]
    if marked:
        return select(source, free, train_ids), select(source, marked, val_ids)
    names_all = train_ids.strip() and not share_of(train_ids)
    held_out = set()
    if val_ids.strip():
        held_out = {item["subject"] for item in select(source, free, val_ids)}
    elif not names_all:
        to_train = {item["subject"] for item in free if item["split"] == "train"}
        held_out = held_out_subjects([item for item in free if item["subject"] not in to_train], fraction)
    val = [item for item in free if item["subject"] in held_out]
    if not names_all:
        free = [item for item in free if item["subject"] not in held_out]
    return select(source, free, train_ids), val


def trainable(source, items):
    """The items that their list does not keep for validation or test. Raises InputError if there are none."""
    free = [item for item in items if item["split"] in ("", "train")]
    if not free:
        raise InputError(f"{source}: the list keeps all {len(items)} volumes for validation or test; mark some as "
                         "train.")
    return free


def held_out_subjects(items, fraction):
    """The subjects that data.val_fraction holds out: a set of names.

    A hash of its name alone gives each subject a place in 0 .. 1; below the fraction, the subject is held out. Adding
    or removing other subjects does not move it. Validation needs a pair of two subjects: if fewer than two subjects lie
    below the fraction, the next ones above it are held out too. (Such a subject may be trained on later, once added
    subjects lie below the fraction.) With few subjects none is held out, see FEW_SUBJECTS.
    """
    subjects = sorted({item["subject"] for item in items}, key=_place)
    if not fraction or len(subjects) < 3 or (len(subjects) < FEW_SUBJECTS and fraction * len(subjects) < 1):
        return set()
    return {*subjects[:2], *(subject for subject in subjects if _place(subject) < fraction)}


def _place(subject):
    """Where a subject lies in 0 .. 1."""
    return subject_key(f"held out\0{subject}") / 2 ** 48


def select(source, items, ids):
    """The items that `ids` names.

    source: start of the error messages, such as the data folder. items: dicts with "id" and "subject". ids: numbers
    and rising ranges such as "1-60,75"; "" takes all. They are compared with the last number in the id, or in the
    subject if the id begins with it, so that the volumes of a subject stay together. A share such as "25%" takes the
    subjects with the highest `_place`, so a larger share contains every smaller one.
    Returns: list of items in their order. Raises InputError for ids that cannot be read or select nothing.
    """
    if not ids.strip():
        return items
    if share := share_of(ids):
        subjects = sorted({item["subject"] for item in items}, key=_place, reverse=True)
        taken = set(subjects[:math.ceil(share * len(subjects) - 1e-9)])  # 0.07 * 100 is above 7
        return [item for item in items if item["subject"] in taken]
    ranges = read_ranges(ids, f"{source}: ids")
    chosen = []
    for item in items:
        own = item["subject"] if item["id"].startswith(item["subject"]) else _without_scan(item["id"])
        numbers = re.findall(r"\d+", own)
        if numbers and any(int(numbers[-1]) in span for span in ranges):
            chosen.append(item)
    if not chosen:
        raise InputError(f"{source}: ids \"{ids}\" select no volume of the {len(items)} volumes from {items[0]['id']} "
                         f"to {items[-1]['id']}; correct the ids, or leave them empty (the config may have them in "
                         "data.train_ids and data.val_ids).")
    return chosen


def share_of(ids):
    """The share in ids such as "25%", 0 .. 1; 0 for numbers and ranges. Raises InputError for 0% and above 100%."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", ids)
    share = float(match[1]) / 100 if match else 0.0
    if match and not 0 < share <= 1:
        raise InputError(f'ids "{ids}": a share of the subjects must be above 0% and at most 100%.')
    return share


def read_ranges(text, where):
    """The numbers of a text such as "1-60,75", as a list of ranges.

    where: start of the error message. Raises InputError for a part that is neither a number nor a rising range.
    """
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f'{where} "{text}": "{part}" is not a number or a rising range; write numbers and '
                             'rising ranges, such as "1-60,75".')
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranges


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------

PAIR_KEYS = ("pairs", "training_paired_images", "registration_val", "registration_test")  # the first one present counts


def read_pairs(path, items):
    """Read training pairs from a Learn2Reg JSON file.

    path: of a list of {"fixed", "moving"}, or of an object with such a list under one of PAIR_KEYS. The values are ids,
    or paths that are reduced to their id. items: from `read_datalist`.
    Returns: list of (moving index, fixed index) into items.
    Raises InputError for an unreadable or empty list, for an id that is not in items, and for a volume that is paired
    with itself.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such pair list; check the path.")
    pairs = read_json(path)
    if isinstance(pairs, dict):
        pairs = next((pairs[key] for key in PAIR_KEYS if key in pairs), None)
    if not isinstance(pairs, list) or not pairs:
        raise InputError(f"{path}: no pairs found; give a list of fixed/moving entries, or one under {PAIR_KEYS[0]}.")
    index = {item["id"]: number for number, item in enumerate(items)}
    found = [(_lookup(path, pair, "moving", index), _lookup(path, pair, "fixed", index)) for pair in pairs]
    alone = next((moving for moving, fixed in found if moving == fixed), None)
    if alone is not None:
        raise InputError(f"{path}: {items[alone]['id']} is paired with itself, which teaches nothing; drop the pair or "
                         "correct it.")
    return found


def _lookup(path, pair, role, index):
    """The index of one side of a pair. role: "fixed" or "moving". index: {id: number}. path: of the list."""
    if not isinstance(pair, dict) or role not in pair:
        raise InputError(f"{path}: the pair {pair} has no \"{role}\"; every pair needs fixed and moving.")
    if not isinstance(pair[role], str | int) or isinstance(pair[role], bool):
        raise InputError(f"{path}: the {role} volume {pair[role]} is neither a path nor an id; correct the pair.")
    # An id is taken as it is, because volume_id would shorten some.
    name = str(pair[role]) if str(pair[role]) in index else volume_id(str(pair[role]))
    if name not in index:
        raise InputError(f"{path}: the {role} volume {name} is not among the training volumes; add it to the data "
                         "list, or drop the pair if the volume is held out (data.val_ids, data.val_fraction).")
    return index[name]


def pair_files(path, number, entry, keys):
    """The files of one entry in a list of file pairs: {key: Path} for the keys present.

    path: of the list; paths in an entry are relative to its folder. number: of the entry, from 1, for the errors.
    entry: dict of paths or None, and maybe "name". keys: the permitted keys.
    Raises InputError for an unknown key and for a value that is not a path.
    """
    for key, value in entry.items():
        if key not in (*keys, "name"):
            raise InputError(f"{path}: pair {number} has the unknown key {key}; the keys are {', '.join(keys)} and "
                             "name.")
        if key != "name" and (not isinstance(value, str | None) or "\0" in (value or "")):
            raise InputError(f"{path}: pair {number}: {key} is {value!r}, not a path; correct it.")
    return {key: path.parent / entry[key] for key in keys if entry.get(key)}
