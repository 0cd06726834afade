"""NRRD and MetaImage files (.nrrd, .nhdr, .mha, .mhd) and DICOM, with SimpleITK, which is optional.

A DICOM series is read, not written: a folder with its slices, or a file of several frames.

ITK's world has x and y reversed (LPS) and its arrays have the axes in reverse order; this file returns volumes as
Dataloader/nifti.py does: axes i, j, k, affine 4x4 voxel to world in millimetres, RAS.
"""
import contextlib
import errno
import functools
import glob
import hashlib
import math
import mmap
import os
import re
import tempfile
import zlib
from pathlib import Path

import nibabel
import numpy as np

from Runtime.errors import InputError, first_line
from Runtime.files import require_file, sha256, write_file

READ = (".nrrd", ".nhdr", ".mha", ".mhd", ".dcm")
OTHERS = (".nii", ".gz", ".mgh", ".mgz", *(suffix for suffix in READ if suffix != ".dcm"))  # all but DICOM
METAIMAGE = (".mha", ".mhd")
PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")  # refused with the way to convert them, `made_grey`
CHUNK = 2 ** 16  # compressed bytes at a time, of which deflate makes at most 64 MiB
MOST_DEFLATED = 1100  # times by which deflate makes a file smaller, at most
ELSEWHERE = re.compile(rb"^[ \t]*(?:ElementDataFile[ \t]*[=:](?![ \t]*local)|data ?file:)", re.M | re.I)  # the voxels
LEAST_STEP_MM = 1e-3  # between slices
UNEVEN = 0.02  # most by which a step between slices may differ from the mean step, as a fraction of it
# Of a DICOM file of several frames: the tag of what each frame has of its own, the tag of the voxels after it, and in
# between the sequences with the positions, whose number of bytes is group 1 or, in files without types, group 2.
PER_FRAME, PIXELS = b"\x00\x52\x30\x92", b"\xe0\x7f\x10\x00"
POSITION = re.compile(rb"\x20\x00\x13\x91.{12,16}?\x20\x00\x32\x00(?:DS(..)|(....))", re.S)
STEPS = ("0018|0088", "3004|000c")  # tags of the spacing between the frames of a DICOM file, and of their offsets
WRITTEN = (".nrrd", ".mha")  # the others keep their voxels in a second file
NUMBERS = {"sitkInt8": "int8", "sitkUInt8": "uint8", "sitkInt16": "int16", "sitkUInt16": "uint16",
           "sitkInt32": "int32", "sitkUInt32": "uint32", "sitkInt64": "int64", "sitkUInt64": "uint64",
           "sitkFloat32": "float32", "sitkFloat64": "float64"}  # number types of SimpleITK and numpy
TO_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # its own inverse


def is_itk(path):
    """Whether SimpleITK reads this path: a file, or a folder of DICOM slices."""
    return Path(path).suffix.lower() in READ or is_series(path)


def is_series(path):
    """Whether a path is a folder whose first volume is DICOM, whatever its suffix. Notes may come before it."""
    if not os.path.isdir(path):
        return False
    with contextlib.suppress(OSError):  # the reader reports unreadable files
        names = [item.name for item in os.scandir(path) if item.is_file()]
        names = sorted((name for name in names if not name.startswith((".", "DICOMDIR"))), reverse=True)
        # One file of each suffix is opened, because a folder may hold thousands.
        for name in sorted({Path(name).suffix.lower() or name: name for name in names}.values()):
            dicom = _dicom_kind(os.path.join(path, name)) is not None
            if dicom or Path(name).suffix.lower() in OTHERS:
                return dicom
    return False


def require_volume(path):
    """Raise InputError unless a path is a file or a DICOM series; for a folder of series the sentence names one."""
    if is_series(path):
        return
    if series := next(filter(is_series, sorted(Path(path).glob("*"))), None):
        raise InputError(f"{path}: a folder of DICOM series, not a series; give one of them, such as {series.name}.")
    require_file(path)


def _dicom_kind(path):
    """The kind of a DICOM object: the UID of its SOP class, b"" without one; None for a file without DICOM's mark,
    which some objects lack too."""
    with open(path, "rb") as file:
        head = file.read(1156)
    if head[128:132] != b"DICM":
        return None
    found = re.search(rb"\x02\x00\x02\x00UI..([0-9.]+)", head, re.S)
    return found[1] if found else b""


def parts_of(path):
    """The files that hold a volume: itself; the slices in a folder; a .mhd or .nhdr header with its voxels."""
    path = Path(path)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if path.suffix.lower() in (".mhd", ".nhdr") and path.is_file():
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            named = re.search(r"^(?:ElementDataFile *=|data ?file:) *(.*?) *$", file.read(2 ** 16), re.M | re.I)
        if named and named[1] != "LOCAL":
            voxels = path.parent / named[1]
            # A pattern or a list of files: any file of the folder may be one.
            return sorted({path, voxels} if voxels.is_file() else {path, *filter(Path.is_file, path.parent.iterdir())})
    return [path]


def digest(path):
    """SHA-256 of the file that holds a volume, or of the digests of its files; None if there is none."""
    digests = [sha256(file) for file in parts_of(path) if file.is_file()]
    if len(digests) == 1 and not os.path.isdir(path):
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else None


def size_and_time(path):
    """Bytes of the files that hold a volume, and the newest time (ns) at which one changed, as a list.

    Raises FileNotFoundError if there is none.
    """
    found = [os.stat(file) for file in parts_of(path)]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no file of a volume in it", str(path))
    return [sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)]


def place_of(path):
    """Where a volume lies, behind all links, and its `size_and_time`."""
    return os.path.realpath(path), *size_and_time(path)


def same_volume(one, other, placed=place_of):
    """Whether two paths lead to the same volume: to the same file, or to copies of it.

    A file that this user may not read counts as another one: reading it will give the reason. placed: `place_of`, or
    one that remembers.
    """
    (place, size, time), (other_place, other_size, other_time) = placed(one), placed(other)
    if place == other_place:
        return True
    with contextlib.suppress(PermissionError):
        return size == other_size and _digest_at(one, time) == _digest_at(other, other_time)
    return False


@functools.lru_cache(maxsize=None)
def _digest_at(path, time):
    """`digest` of a file that changed last at this time, read once."""
    return digest(path)


def import_sitk(path):
    """SimpleITK, imported only when needed, because the import is slow. path: of the file that needs it.

    Raises InputError if it is not installed.
    """
    try:
        import SimpleITK
    except ImportError:
        kind = "a DICOM series needs" if os.path.isdir(path) else f"{Path(path).suffix} files need"
        raise InputError(f"{path}: {kind} SimpleITK: pip install SimpleITK, or convert it to .nii.gz.") from None
    return SimpleITK


def made_grey(path):
    """The advice to convert a picture or a colour volume that ITK reads. path: of its file."""
    return (f'save it with one grey channel as NIfTI: SimpleITK.WriteImage(SimpleITK.ReadImage("{Path(path).name}", '
            'SimpleITK.sitkFloat32), "grey.nii.gz")')


def open_itk(path):
    """A nibabel image with the shape, dtype and affine of a file or DICOM series; its voxels are not read: all are 0.

    Raises InputError, naming the path, if it cannot be read, has several numbers per voxel, or is no complete series.
    """
    sitk = import_sitk(path)
    files = files_of(sitk, path)
    headers = [_header(sitk, file, path) for file in files]
    first, count = headers[0], len(headers)
    size, affine = first.GetSize(), affine_of(first)
    if Path(path).suffix.lower() == ".dcm" and size[2:] == (1,) and not os.path.isdir(path):
        raise InputError(f"{path}: this is one slice of a DICOM series; give the folder with all of its slices. "
                         "A single image, such as an X-ray, needs a folder of its own: give that folder.")
    places = []
    if count > 1:
        _require_one_stack(path, headers)
        size, places = (*size[:2], count), [header.GetOrigin() for header in headers]
    elif size[2:] > (1,) and (os.path.isdir(path) or Path(path).suffix.lower() == ".dcm"):
        places = _places_of_frames(files[0])
        if not places and first.GetSpacing()[2] == 1 and not any(map(first.HasMetaDataKey, STEPS)):
            places = [first.GetOrigin()] * size[2]  # angiography, ultrasound: ITK takes steps of 1 mm
    if places and size[2:] == (len(places),):  # they give the third axis: a tilted gantry shears the affine
        affine[:3, 2:] = TO_LPS[:3, :3] @ np.transpose([_step_between(path, places), places[0]])
    types, kinds = {getattr(sitk, theirs): ours for theirs, ours in NUMBERS.items()}, {h.GetPixelID() for h in headers}
    # Slices may differ in their type, as with a scale for each (PET).
    number = kinds.pop() if len(kinds) == 1 else sitk.sitkFloat64
    if first.GetNumberOfComponents() != 1 or number not in types:
        is_colour = first.GetNumberOfComponents() in (3, 4) and not os.path.isdir(path)
        raise InputError(f"{path}: each voxel must be one real number, but the type is "
                         f"{sitk.GetPixelIDValueAsString(number)}; "
                         f"{made_grey(path) if is_colour else 'convert the volume'}.")
    try:
        empty = np.broadcast_to(np.zeros((), types[number]), size)
    except ValueError:  # numpy cannot count so many
        raise InputError(f"{path}: its header claims {' x '.join(map(str, size))} voxels; export it again.") from None
    if Path(files[0]).suffix.lower() in OTHERS and empty.nbytes > MOST_DEFLATED * os.path.getsize(path):
        with open(path, "rb") as file:
            if not ELSEWHERE.search(file.read(2 ** 20)):  # ITK would take that memory before it reads the file
                raise InputError(f"{path}: its header claims {' x '.join(map(str, size))} voxels, more than the file "
                                 "can hold; copy or export it again.")
    return nifti_image(path, empty, affine, empty.dtype)


def nifti_image(name, voxels, affine, dtype):
    """A NIfTI image in mm. Raises InputError, with its name, if a NIfTI header cannot hold its shape or position."""
    try:
        image = nibabel.Nifti1Image(voxels, affine, dtype=dtype)
    except nibabel.spatialimages.HeaderDataError as error:
        raise InputError(f"{name}: its header gives no usable position or size ({first_line(error)}); export it "
                         "again.") from error
    image.header.set_xyzt_units("mm")
    return image


def files_of(sitk, path):
    """The path of a file, or those of the DICOM series in a folder.

    Raises InputError unless there is exactly one, and for a slice in the folder that cannot be read.
    """
    if not os.path.isdir(path):
        return [str(path)]
    names = sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(path))
    if len(names) != 1:
        raise InputError(f"{path}: the folder has {len(names)} DICOM series; put each into its own folder.")
    slices = list(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(path), names[0]))
    # ITK drops files that it cannot read, such as a slice whose copy was cut off, and what is no image (RTSTRUCT, SR).
    suffixes, known = {Path(each).suffix.lower() for each in slices} - {""}, set(map(os.path.basename, slices))
    kind = _dicom_kind(slices[0])
    for file in parts_of(path):
        if file.name in known or file.name.upper().startswith("DICOMDIR"):
            continue
        own = _dicom_kind(file) if os.access(file, os.R_OK) else kind
        if own == kind or own is None and file.suffix.lower() in suffixes:
            raise InputError(f"{path}: {file.name} belongs to no series or cannot be read, as after a copy that was "
                             "cut off; copy it again, or move it out of the folder.")
    return slices


def _header(sitk, file, path):
    """A reader that has read the header of a file. path: its name in errors."""
    if Path(file).suffix.lower() in METAIMAGE:
        _require_harmless(file)
    elif Path(file).suffix.lower() in (".nrrd", ".nhdr"):
        with open(file, "rb") as content:
            head = re.split(rb"\r?\n\r?\n|\0", content.read(2 ** 20))[0]
        if names := re.search(rb"^data ?file:(.*)", head, re.M | re.I | re.S):
            _require_no_pipe(file, names[1].splitlines())
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(file))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise _unreadable(path, error) from error
    return reader


def _require_harmless(path):
    """Raise InputError for a MetaImage header that crashes ITK, makes it wait forever or returns noise: a number of
    axes such as -1, voxels in a pipe, a device or a file named by a format string of C, fewer files than slices."""
    with open(path, "rb") as file:
        head = file.read(2 ** 16)
    found = {key: re.search(rb"^[ \t]*%s[ \t]*[=:][ \t]*(.*?)[ \t\r]*$" % key, head, re.M)
             for key in (b"NDims", b"DimSize", b"ElementDataFile")}
    axes, sizes, name = (match[1].decode(errors="surrogateescape") if match else "" for match in found.values())
    if re.match(r"-|\+?0*[1-9][0-9]", axes):
        raise InputError(f"{path}: its header has NDims = {axes[:20]}, which is no number of axes; export it again.")
    if name in ("", "LOCAL", "Local", "local"):  # the voxels follow, whatever else is called so
        return
    is_list, voxels = name.startswith("LIST"), os.path.join(os.path.dirname(path), name)
    is_sound = is_list or (re.fullmatch(r"[^%]*(%[-0-9.]*[diu][^%]*)?", name)
                           and (os.path.isfile(voxels) or not os.path.exists(voxels)))
    first, *words = name.split()
    count, needed, lines = 0, 0, [os.fsencode(name)]
    with contextlib.suppress(ValueError, OverflowError):  # words that are no numbers: ITK refuses them
        sizes, numbers = [*map(int, sizes.split())], [int(float(word.rstrip("Dd"))) for word in words]
        if is_list and sizes:
            of_file = (numbers or [len(sizes) - 1])[0]  # axes of each file
            is_sound = 0 < of_file < len(sizes)
            lines = Path(path).read_bytes()[found[b"ElementDataFile"].end():].splitlines()
            count, needed = sum(bool(line.strip()) for line in lines), math.prod(sizes[of_file:])
        elif "%" in first and sizes:
            needed, low = sizes[-1], (numbers or [1])[0]
            high = numbers[1] if len(numbers) > 1 else low + needed - 1
            step = numbers[2] if len(numbers) > 2 else (high - low) // needed if len(numbers) == 2 and needed else 1
            is_sound = is_sound and step > 0
            count = len(range(low, high + 1, step)) if is_sound else 0
    if not is_sound:
        raise InputError(f"{path}: its ElementDataFile = {name} is neither a file nor a pattern such as slice%03d.raw "
                         "1 9 1; export it again.")
    _require_no_pipe(path, lines)
    if count < needed:
        raise InputError(f"{path}: its header names {count} of {needed} files of voxels; export it again.")


def _require_no_pipe(path, lines):
    """Raise InputError if a header names a pipe or a device as a file of its voxels: ITK would wait for it forever.

    lines: of the header, as bytes, that may be names, relative to its folder, or a pattern such as slice%03d.raw 1 9 1.
    """
    here = os.path.dirname(path)
    for name in map(os.fsdecode, map(bytes.strip, lines)):
        pattern = re.sub("%.*?[a-z]", "*", glob.escape(name.split()[0])) if "%" in name else None
        for voxels in [os.path.join(here, each) for each in (glob.glob(pattern, root_dir=here) if pattern else [name])]:
            if os.path.exists(voxels) and not os.path.isfile(voxels) and not os.path.isdir(voxels):
                raise InputError(f"{path}: its file of voxels {voxels} is a pipe or a device; export it again.")


def _places_of_frames(file):
    """The positions of the frames of a DICOM file, in their order: a list of (x, y, z) in mm, LPS; [] if it has none.

    ITK tells only the first, and takes steps of 1 mm if they differ.
    """
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = content.find(PER_FRAME)
        frames = content[begin:content.find(PIXELS, begin)] if begin >= 0 else b""
    places = []
    for found in POSITION.finditer(frames):
        value = frames[found.end():found.end() + int.from_bytes(found[1] or found[2], "little")]
        with contextlib.suppress(ValueError):
            x, y, z = map(float, value.strip(b" \0").split(b"\\"))
            places.append((x, y, z))
    return places


def _require_one_stack(path, headers):
    """Raise InputError for slices with several sizes or directions."""
    planes = [(header.GetSize(), np.round([*header.GetDirection(), *header.GetSpacing()[:2]], 3).tolist())
              for header in headers]
    if any(plane != planes[0] for plane in planes):
        raise InputError(f"{path}: the slices have several sizes or directions; put each stack into its own folder.")


def _step_between(path, places):
    """The step from slice to slice, (3,) mm, LPS, of their positions. Raises InputError for steps that differ."""
    steps = np.diff(places, axis=0)
    step = steps.mean(axis=0)
    if np.linalg.norm(step) < LEAST_STEP_MM:
        raise InputError(f"{path}: all slices lie at one place, as in a time series or without positions; convert it "
                         "to .nii.gz.")
    if np.linalg.norm(steps - step, axis=1).max() > UNEVEN * np.linalg.norm(step):
        lengths = np.linalg.norm(steps, axis=1)
        advice = ("put the slices of each volume into its own folder" if os.path.isdir(path) else
                  "export all slices of one volume into this file")
        raise InputError(f"{path}: the distances between its {len(places)} slices range from {lengths.min():.2f} to "
                         f"{lengths.max():.2f} mm, so slices are missing or several volumes are mixed: {advice}.")
    return step


def read_itk(path, dtype):
    """All voxels of a file or a DICOM series, axes i, j, k. Raises InputError if it is damaged.

    dtype: of the numbers, from `open_itk`. ITK would take the type of the first slice for all.
    """
    sitk = import_sitk(path)
    try:
        files = files_of(sitk, path)
        if len(files) == 1:
            image = sitk.ReadImage(files[0])
            if Path(path).suffix.lower() in METAIMAGE:
                _require_inflatable(path, image.GetNumberOfPixels() * image.GetSizeOfPixelComponent())
            return sitk.GetArrayFromImage(image).T
        kind = next(theirs for theirs, ours in NUMBERS.items() if ours == dtype.name)
        return sitk.GetArrayFromImage(sitk.ReadImage(files, getattr(sitk, kind))).T
    except RuntimeError as error:
        if Path(path).suffix.lower() in METAIMAGE:  # of one that is cut, ITK says "No such file or directory"
            raise _corrupt(path) from error
        raise _unreadable(path, error) from error


def _require_inflatable(path, size):
    """Raise InputError unless the voxels of a .mha or .mhd are intact, if they are compressed.

    ITK only prints "Uncompress failed" and returns what it has got so far. size: bytes of all voxels.
    """
    with open(path, "rb") as file:
        head = b""
        for line in iter(file.readline, b""):
            head += line
            if line.lstrip().startswith(b"ElementDataFile"):
                break
        start = file.tell()
    fields = dict(re.findall(rb"^[ \t]*(\w+)[ \t]*[=:][ \t]*(.*?)[ \t\r]*$", head, re.M))
    if fields.get(b"CompressedData", b"False")[:1] not in (b"T", b"t", b"1"):
        return
    name, number = fields.get(b"ElementDataFile", b"LOCAL"), fields.get(b"CompressedDataSize", b"")
    local, voxels = name.upper() == b"LOCAL", Path(path).parent / os.fsdecode(name)
    if not local and not voxels.is_file():
        return  # a pattern or a list of files
    # Without this number, ITK takes a whole file for the voxels, also one that begins with the header.
    stated = (int(number) if number.isdigit() else 0) or (0 if local else voxels.stat().st_size)
    header_bytes = fields.get(b"HeaderSize", b"")
    skipped = int(header_bytes) if header_bytes.isdigit() else 0  # of a file of voxels
    stream, found = zlib.decompressobj(zlib.MAX_WBITS | 32), 0  # 32: of gzip too
    with contextlib.suppress(zlib.error), open(path if local else voxels, "rb") as file:
        file.seek(start if local else skipped)
        while not stream.eof and (part := file.read(min(stated, CHUNK))):
            found += len(stream.decompress(part))
            stated -= len(part)
    if not stream.eof or found < size:
        raise _corrupt(path)


def write_itk(path, array, affine):
    """Write a .nrrd or .mha file, completely and durably.

    array: (D, H, W) or (H, W, 1), with a number type in NUMBERS. affine: 4x4, mm, RAS.
    Raises InputError as `write_by_sitk` does.
    """
    sitk = sitk_to_write(path)
    write_by_sitk(path, lambda name: sitk.WriteImage(itk_image(sitk, array, affine), name, useCompression=True))


def sitk_to_write(path):
    """SimpleITK, for writing this file. Raises InputError if it or the folder of temporary files is missing."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise InputError(f"{path}: writing it needs a temporary folder ({error.strerror}): export TMPDIR with a "
                         "writable one.") from error
    return import_sitk(path)


def write_by_sitk(path, write):
    """Write a file, completely and durably, with write(name) of SimpleITK, which goes by the suffix of a name.

    Raises InputError if the folder of temporary files (TMPDIR) takes no file of this size.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / f"whole{Path(path).suffix}"
        try:
            write(str(whole))
        except RuntimeError as error:
            raise InputError(f"{path}: its temporary file {whole} cannot be written ({reason_of(error)}); make room "
                             "there, or set TMPDIR to another folder.") from error
        write_file(path, whole.read_bytes())


def itk_image(sitk, array, affine):
    """A SimpleITK image with three axes.

    sitk: SimpleITK. array: (D, H, W), or (D, H, W, C) with C numbers per voxel. affine: 4x4, mm, RAS.
    """
    order = (2, 1, 0, 3)[:array.ndim]
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.transpose(order)), isVector=array.ndim == 4)
    matrix = TO_LPS @ np.asarray(affine, np.float64)
    spacing = np.linalg.norm(matrix[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((matrix[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(matrix[:3, 3].tolist())
    return image


def affine_of(image):
    """The affine (4x4, mm, RAS) of an ITK image or of a reader with its header; axes after the third are left out."""
    spacing = image.GetSpacing()
    dims, kept = len(spacing), min(len(spacing), 3)
    matrix = np.eye(4)
    matrix[:kept, :kept] = (np.reshape(image.GetDirection(), (dims, dims)) * spacing)[:kept, :kept]
    matrix[:kept, 3] = image.GetOrigin()[:kept]
    return TO_LPS @ matrix


def reason_of(error):
    """The reason in an ITK error: its last line; the lines above point into ITK's own code."""
    return str(error).strip().splitlines()[-1].strip()


def _corrupt(path):
    """The error for a MetaImage file without all of its voxels. Those of a .mhd are in another file."""
    beside = ", or its file of voxels is missing" if Path(path).suffix.lower() == ".mhd" else ""
    return InputError(f"{path}: truncated or corrupt{beside}; copy or download it again.")


def _unreadable(path, error):
    return InputError(f"{path}: not readable as {Path(path).suffix} ({reason_of(error)}); export it again.")
