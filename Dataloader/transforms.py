"""Transforms in the formats of ITK, ANTs, Slicer, FSL and FreeSurfer: matrices, and fields in .h5 files.

A matrix T, 4x4 in RAS millimetres, maps a point of the fixed volume to the same anatomical point of the moving one, the
direction in which images are resampled. ITK uses that direction too, but with x and y reversed (LPS). FSL and
FreeSurfer use the opposite direction, from moving to fixed.
"""
import io
import sys
from pathlib import Path

import numpy as np
from scipy.io import loadmat, savemat
from scipy.io.matlab import MatReadError, matfile_version

from Dataloader import formats
from Dataloader.formats import TO_LPS
from Dataloader.grids import is_singular, same_grid
from Dataloader.nifti import (
    ends_in,
    from_itk,
    is_in_mm,
    open_nifti,
    read_field,
    read_header,
    read_raw_header,
    require_finite,
    require_one_plane,
    to_itk,
)
from Runtime.errors import InputError
from Runtime.files import require_file, write_file

FIELDS = (".nii.gz", ".nii", ".h5")
MATRICES = (".mat", ".txt", ".tfm", ".lta")
AFFINE_NAME = "AffineTransform_double_3_3"
RIGID = {"Euler2DTransform": (3, 2), "Similarity2DTransform": (4, 2), "Euler3DTransform": (6, 3),
         "VersorRigid3DTransform": (6, 3), "Similarity3DTransform": (7, 3)}  # of ITK: number of parameters, of axes
INTO_A_FIELD = ("turn a composite, B-spline or the like into one displacement field on the fixed grid first "
                "(SimpleITK: TransformToDisplacementField)")
VOX_TO_VOX, RAS_TO_RAS = 0, 1  # FreeSurfer's types of transform in a .lta file


def is_field(path):
    """Whether a path names a field, not a matrix."""
    return ends_in(path, FIELDS)


def meaning(path):
    """How the numbers of a readable field or matrix are understood, as a phrase."""
    if is_field(path):
        in_mm = ends_in(path, ".h5") or is_in_mm(open_nifti(path).shape)
        return "displacements in " + ("millimetres, as ITK and ANTs have them" if in_mm else
                                      "voxels, as Learn2Reg has them")
    if ends_in(path, ".lta"):
        return "a matrix of FreeSurfer"
    is_fsl = _plain_numbers(Path(path).read_bytes()) is not None
    return "sixteen numbers, taken for a matrix of FSL's flirt" if is_fsl else "a matrix of ITK"


# ---------------------------------------------------------------------------------------------------------------------
# Matrices
# ---------------------------------------------------------------------------------------------------------------------

def read_matrix(path, fixed, moving, dims=3):
    """Read T from a file: .mat, .txt or .tfm of ITK and ANTs, .mat of FSL's flirt, or .lta of FreeSurfer.

    fixed, moving: paths of the two volumes, because FSL's matrices depend on them. dims: axes of the volumes.
    Returns: 4x4 float64. Raises InputError, naming the file, for other files and for files without an affine matrix.
    """
    path = Path(path)
    require_file(path)
    content, suffix = path.read_bytes(), path.suffix.lower()
    if suffix not in MATRICES:
        raise InputError(f"{path}: a matrix ends in {', '.join(MATRICES)}, and a field in {', '.join(FIELDS)}.")
    numbers = _plain_numbers(content)
    if suffix == ".lta":
        matrix = _from_lta(path, content.decode(errors="replace"), *(read_header(each, dims)
                                                                     for each in (fixed, moving)))
    elif numbers is not None and suffix != ".mat":
        raise InputError(f"{path}: sixteen numbers do not say whose matrix they are; rename it to .mat if it is one of "
                         "FSL's flirt, and write others (NiftyReg, numpy) as an ITK transform.")
    elif numbers is not None:
        _require_invertible(path, numbers)
        matrix = _from_fsl(numbers, *((*read_header(each, dims), read_raw_header(each).get_zooms())
                                      for each in (fixed, moving)))
    elif content.startswith(b"#Insight Transform File"):
        matrix = _from_itk(path, dims, *_itk_text(path, content.decode(errors="replace")))
    elif b"(TransformParameters " in content:
        raise InputError(f"{path}: a transform of elastix; let transformix -def all write deformationField.nii.gz, as "
                         "docs/coming_from.md shows, and give that.")
    else:
        matrix = _from_itk(path, dims, *_itk_matlab(path, content))
    _require_invertible(path, matrix)
    return matrix


def _require_invertible(path, matrix):
    if is_singular(matrix):
        raise InputError(f"{path}: its matrix {matrix.round(4).tolist()} cannot be inverted, or its last row is not "
                         "0 0 0 1; compute it again.")


def write_matrix(path, matrix):
    """Write T as a .mat file that antsApplyTransforms, antspyx, SimpleITK and Slicer read.

    matrix: 4x4, mm, RAS, fixed to moving.
    """
    lps = TO_LPS @ np.asarray(matrix, np.float64) @ TO_LPS
    parameters = np.concatenate([lps[:3, :3].ravel(), lps[:3, 3]])
    content = io.BytesIO()
    savemat(content, {AFFINE_NAME: parameters[:, None], "fixed": np.zeros((3, 1))}, format="4")
    write_file(path, content.getvalue())


def _plain_numbers(content):
    """The 4x4 in a text of sixteen numbers, FSL's format; None for anything else."""
    try:
        numbers = np.array(content.decode("ascii").split(), np.float64)
    except ValueError:
        return None
    return numbers.reshape(4, 4) if numbers.size == 16 else None


def _itk_text(path, text):
    """Name, parameters and fixed parameters of the only transform in an ITK text file; a composite of one is that one.
    """
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#")]
    names = [value.strip() for key, value in lines if key == "Transform"]
    try:
        numbers = {key: np.array(value.split(), np.float64) for key, value in lines if key.endswith("Parameters")}
    except ValueError as error:
        raise InputError(f"{path}: not a readable ITK transform ({error}); export it again.") from error
    members = [name for name in names if not name.startswith("CompositeTransform")] or names
    if len(members) != 1:
        raise InputError(f"{path}: the file has {len(members)} transforms; give a file with one, such as ANTs' "
                         f"0GenericAffine.mat, or {INTO_A_FIELD}.")
    if numbers.keys() != {"Parameters", "FixedParameters"}:
        raise InputError(f"{path}: a line Parameters or FixedParameters is missing; export it again.")
    return members[0], numbers["Parameters"], numbers["FixedParameters"]


def _itk_matlab(path, content):
    """Name, parameters and fixed parameters of the transform in an ITK .mat file.

    ITK reads and writes only version 4 of the format; in damaged files of later ones, scipy may crash.
    """
    try:
        later = matfile_version(io.BytesIO(content))[0]
        found = {} if later else loadmat(io.BytesIO(content))
    except (ValueError, TypeError, KeyError, IndexError, OSError, NotImplementedError, MatReadError) as error:
        raise InputError(f"{path}: neither an ITK matrix nor an FSL matrix ({error}); export it again.") from error
    if later:
        raise InputError(f"{path}: it is in a later format of MATLAB than version 4, which ITK uses; save it with -v4.")
    names = [name for name in found if not name.startswith("__") and name != "fixed"]
    if len(names) != 1 or "fixed" not in found:
        raise InputError(f"{path}: not an ITK transform ({', '.join(names)}); give one such as ANTs' "
                         "0GenericAffine.mat.")
    if not all(isinstance(found[name], np.ndarray) and found[name].dtype.kind in "iuf" for name in (names[0], "fixed")):
        raise InputError(f"{path}: {names[0]} or fixed are no real numbers; export it again.")
    return names[0], found[names[0]].ravel().astype(np.float64), found["fixed"].ravel().astype(np.float64)


def _from_itk(path, wanted, name, parameters, centre):
    """T of an ITK transform: x -> M (x - c) + t + c, in LPS. A 2D transform acts in the plane of the first two axes.

    wanted: axes of the volumes.
    """
    kind, dims = name.split("_")[0], len(centre)
    if kind in ("AffineTransform", "MatrixOffsetTransformBase") and len(parameters) == dims * (dims + 1):
        linear, shift = parameters[:dims * dims].reshape(dims, dims), parameters[dims * dims:]
    elif kind in RIGID:
        count, dims = RIGID[kind]
        if len(parameters) != count or len(centre) < dims:
            raise InputError(f"{path}: {name} has {len(parameters)} parameters and a centre of {len(centre)}, so the "
                             "file is cut off; export it again.")
        zyx = len(centre) > 3 and bool(centre[3])  # Euler3D has a flag after the centre
        shift = parameters[3:6] if dims == 3 else parameters[-2:]
        linear, centre = _rotation(kind, parameters, zyx), centre[:dims]
    elif kind == "TranslationTransform":
        linear, shift, centre = np.eye(len(parameters)), parameters, np.zeros(len(parameters))
    else:
        raise InputError(f"{path}: {name} is not an affine matrix; give an AffineTransform, or {INTO_A_FIELD}.")
    lps, dims = np.eye(4), len(shift)
    if dims < wanted:
        raise InputError(f"{path}: {name} is for slices, but the volumes are 3D; give a transform of three axes.")
    lps[:dims, :dims] = linear
    lps[:dims, 3] = shift + centre - linear @ centre
    return TO_LPS @ lps @ TO_LPS


def _rotation(kind, parameters, zyx=False):
    """The 3x3 of an ITK rigid transform: Euler angles (applied y, x, z; with zyx x, y, z), or a versor with a scale.

    In 2D the 2x2 of an angle, with a scale before it.
    """
    if kind in ("Euler2DTransform", "Similarity2DTransform"):
        sine, cosine = np.sin(parameters[-3]), np.cos(parameters[-3])
        return np.prod(parameters[:-3]) * np.array([[cosine, -sine], [sine, cosine]])  # without a scale, times 1
    if kind == "Euler3DTransform":
        (sx, sy, sz), (cx, cy, cz) = np.sin(parameters[:3]), np.cos(parameters[:3])
        about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
        about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
        about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
        return about_z @ about_y @ about_x if zyx else about_z @ about_x @ about_y
    x, y, z = parameters[:3]
    w = np.sqrt(max(0.0, 1 - x * x - y * y - z * z))
    turn = np.array([[1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                     [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                     [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)]])
    return turn * (parameters[6] if kind == "Similarity3DTransform" else 1.0)


def _from_fsl(matrix, fixed, moving):
    """T of flirt's matrix, which maps the moving to the fixed volume, both in millimetres of their own grids.

    fixed, moving: (shape, affine, zooms). FSL's grids start in a corner, and FSL flips x unless the volume has it
    flipped.
    """
    to_fixed = fixed[1] @ np.linalg.inv(_fsl_grid(*fixed)) @ matrix @ _fsl_grid(*moving) @ np.linalg.inv(moving[1])
    return np.linalg.inv(to_fixed)


def _fsl_grid(shape, affine, zooms):
    """4x4 from voxels to FSL's millimetres: those of pixdim, whatever the affine and its unit say."""
    voxel_mm = np.array(zooms[:3] if len(zooms) > 2 else np.linalg.norm(affine[:3, :3], axis=0), np.float64)
    grid = np.diag([*voxel_mm, 1.0])
    if np.linalg.det(affine[:3, :3]) > 0:
        grid[0, 0], grid[0, 3] = -voxel_mm[0], (shape[0] - 1) * voxel_mm[0]
    return grid


def _from_lta(path, text, fixed, moving):
    """T of a FreeSurfer .lta file, voxel to voxel or RAS to RAS, which maps the source (moving) to the destination.

    fixed, moving: (shape, affine). Prints a warning if the file names these two volumes the other way round; it may
    name others, which lie in the same place.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    fields = {key.strip(): value.split() for key, equals, value in (line.partition("=") for line in lines) if equals}
    volumes = []
    try:
        kind, starts = int(fields["type"][0]), [number for number, line in enumerate(lines, 1) if line == "1 4 4"]
        if len(starts) != 1:
            raise ValueError(f"it has {len(starts)}")
        matrix = np.array([line.split() for line in lines[starts[0]:starts[0] + 4]], np.float64).reshape(4, 4)
        if kind == VOX_TO_VOX or [line.replace(" ", "") for line in lines].count("valid=1") == 2:
            volumes = [_lta_volume(lines, f"{side} volume info") for side in ("src", "dst")]
        if kind == VOX_TO_VOX:
            matrix = volumes[1][1] @ matrix @ np.linalg.inv(volumes[0][1])
    except (KeyError, ValueError, IndexError, np.linalg.LinAlgError) as error:
        raise InputError(f"{path}: not a readable .lta file with one matrix ({error}); export it again.") from error
    if (volumes and not same_grid(*fixed, *moving)
            and same_grid(*fixed, *volumes[0]) and same_grid(*moving, *volumes[1])):
        # Only a warning: nitransforms names the two volumes in this order for a matrix from moving to fixed.
        print(f"warning: {path}: its header says that it leads from the fixed volume to the moving one; if the "
              "result is wrong, exchange --fixed and --moving, or invert it: lta_convert --inlta A.lta --outlta B.lta "
              "--invert.", file=sys.stderr)
    if kind not in (VOX_TO_VOX, RAS_TO_RAS):
        raise InputError(f"{path}: this .lta has type {kind}; convert it with lta_convert --inlta A.lta --outlta "
                         "B.lta.")
    return np.linalg.inv(matrix)


def _lta_volume(lines, heading):
    """The shape and the voxel-to-RAS 4x4 of a volume described in a .lta file."""
    first = lines.index(heading) + 1
    fields = {key.strip(): np.array(value.split(), np.float64) for key, equals, value in (
        line.partition("=") for line in lines[first:first + 8]) if equals and key.strip() not in ("valid", "filename")}
    affine = np.eye(4)
    affine[:3, :3] = np.stack([fields[name] for name in ("xras", "yras", "zras")], 1) * fields["voxelsize"]
    affine[:3, 3] = fields["cras"] - affine[:3, :3] @ (fields["volume"] / 2)
    return tuple(fields["volume"].astype(int)), affine


# ---------------------------------------------------------------------------------------------------------------------
# Fields in .h5 files
# ---------------------------------------------------------------------------------------------------------------------

def write_field_h5(path, field, affine):
    """Write a field as a transform that antsApplyTransforms, Slicer and SimpleITK read. Needs SimpleITK.

    field: (N, *spatial) in voxels; in 2D it becomes one plane of a 3D field, see `into_plane`. affine: 4x4, of the
    fixed volume. Raises InputError as `write_by_sitk` does.
    """
    sitk = formats.sitk_to_write(path)
    image = formats.itk_image(sitk, to_itk(field, affine), affine)
    formats.write_by_sitk(path, lambda name: sitk.WriteTransform(sitk.DisplacementFieldTransform(image), name))


def read_any_field(path, dims=3, across=False):
    """A field from a NIfTI file, as `read_field` reads it, or from a .h5 file with an ITK displacement field.

    across: as for `read_field`. Returns: (N, *spatial) float32 in voxels of its own grid; affine 4x4.
    Raises InputError naming the file.
    """
    require_file(path)
    if ends_in(path, MATRICES):
        raise InputError(f"{path}: a matrix, not a field; OM_register.py --fixed F --moving M --initial "
                         f"{Path(path).name} --refine 0 --out R applies it.")
    if formats.is_itk(path):
        raise InputError(f"{path}: a field ends in {', '.join(FIELDS)}; convert it: SimpleITK.WriteImage("
                         f'SimpleITK.ReadImage("{Path(path).name}"), "field.nii.gz").')
    if Path(path).suffix.lower() != ".h5":
        return read_field(path, dims, across)
    sitk = formats.import_sitk(path)
    try:
        transform = sitk.DisplacementFieldTransform(sitk.ReadTransform(str(path)))
    except (RuntimeError, KeyError) as error:  # KeyError: a transform that SimpleITK does not know
        raise InputError(f"{path}: not an ITK displacement field ({formats.reason_of(error)}); {INTO_A_FIELD}; an "
                         "affine for --initial has to be a .tfm or .mat file.") from error
    image = transform.GetDisplacementField()
    affine, vectors_mm = formats.affine_of(image), sitk.GetArrayFromImage(image)
    if image.GetDimension() == 2:
        vectors_mm = np.pad(vectors_mm, ((0, 0), (0, 0), (0, 1)))[None]
    vectors_mm = vectors_mm.transpose(2, 1, 0, 3)
    require_one_plane(path, vectors_mm.shape, dims)
    require_finite(path, vectors_mm)
    return from_itk(vectors_mm, affine, 3 if across else dims), affine
