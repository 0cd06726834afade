"""Other projects' registration methods, in an environment of their own: one process runs all pairs of one method.

    python tests/bench/peers.py METHOD JOB.json

bench_registration.py, bench_mouse.py and bench_multimodal.py start this through `peer` below, with an interpreter that
has requirements-peers.txt. The job names the pairs, all NIfTI files: {"pairs": [{"fixed", "moving", "moving_label",
"out"}, ...], "options": {...}, "warm_up": true}; "start" of a pair is the 4x4 matrix, fixed world to moving world, from
which methods without an affine stage start. Each pair gives <out>.label.npy, the moving label on the fixed grid,
nearest neighbour, warped by the method itself; <out>.field.npy, the whole transform as a field of this project,
displacement in voxels of the fixed grid; and a line of JSON with wall-clock and CPU seconds from images in memory to
the transform. For METHOD voxelmorph-train, see train_voxelmorph.
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
from common import ROOT
from scipy import ndimage

from Dataloader.nifti import read_field
from Dataloader.transforms import write_matrix
from Runtime.errors import InputError
from Runtime.files import write_file

FILES = ("fixed", "moving", "moving_label")


def read(path):
    image = nibabel.load(path)
    return np.asarray(image.dataobj), image.affine


def on_grid(array, affine, target_affine, size, order):
    """A volume on another grid by the headers alone; 0 outside."""
    change = np.linalg.inv(affine) @ target_affine
    return ndimage.affine_transform(array, change[:3, :3], change[:3, 3], size, order=order, mode="grid-constant")


def shared_grid(fixed_shape, moving_shape, multiple):
    """A grid around the fixed one that is large enough for both volumes, every side a multiple of what a method needs.

    Returns: its size; the slices of it that are the fixed grid.
    """
    size = tuple(-(-max(pair) // multiple) * multiple for pair in zip(fixed_shape, moving_shape))
    return size, tuple(slice((n - m) // 2, (n - m) // 2 + m) for n, m in zip(size, fixed_shape))


def on_shared_grid(pair, multiple):
    """Files of a pair for a method that knows one grid only: fixed, moving and moving label on it as they start.

    Returns: the three arrays; slices of the fixed grid; `total`, which makes of the method's field on it, displacement
    in voxels, the field of the fixed grid with the start in it.
    """
    (fixed, fixed_affine), (moving, affine), (label, _) = (read(pair[key]) for key in FILES)
    size, inside = shared_grid(fixed.shape, moving.shape, multiple)
    start, shift = np.array(pair.get("start", np.eye(4))), np.eye(4)
    shift[:3, 3] = [-part.start for part in inside]
    grid = fixed_affine @ shift
    arrays = [on_grid(fixed, fixed_affine, grid, size, 1), on_grid(moving, affine, start @ grid, size, 1),
              on_grid(label, affine, start @ grid, size, 0)]

    def total(moved):
        points = np.moveaxis(np.indices(fixed.shape) + moved[(slice(None), *inside)], 0, -1)
        world = start @ fixed_affine
        return voxels(points @ world[:3, :3].T + world[:3, 3], fixed_affine)
    return arrays, inside, total


def points(shape, affine):
    """The voxels of a grid as points of the world: (*shape, 3)."""
    return np.moveaxis(np.indices(shape), 0, -1) @ affine[:3, :3].T + affine[:3, 3]


def voxels(world, affine):
    """Points of the moving world, (*spatial, 3), as a field of the fixed grid with that affine: (3, *spatial)."""
    inverse = np.linalg.inv(affine)
    there = np.moveaxis(world @ inverse[:3, :3].T + inverse[:3, 3], -1, 0)
    return (there - np.indices(there.shape[1:])).astype(np.float32)


def begin(threads):
    """Set up a benchmark's process: its threads, and that a peer's process ends with it."""
    import torch  # here: an environment of peers may lack it

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(threads)


def clocks():
    """Seconds of the clock on the wall, and of all processors by this process and the children that have ended."""
    return time.perf_counter(), sum(os.times()[:4])


def spent(started):
    """What has gone by since `clocks` gave `started`: (seconds on the wall, seconds of processors)."""
    return tuple(now - then for now, then in zip(clocks(), started))


def write_json(path, content):
    write_file(path, json.dumps(content, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# For the benchmarks: start a method and read what it finds
# ---------------------------------------------------------------------------------------------------------------------

def peer(pairs, name, options, folder, python, threads, warm_up=True):
    """A method of peers.py in a process of its own, which starts once for all pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"pairs": [{**pair, "out": str(folder / str(number))} for number, pair in enumerate(pairs)],
           "options": options, "warm_up": warm_up}
    for line in start_peer(name, job, folder, python, threads):
        field, label = (Path(f"{job['pairs'][line['number']]['out']}.{what}.npy") for what in ("field", "label"))
        yield np.load(field), np.load(label), line["seconds"]
        field.unlink()
        label.unlink()


def start_peer(name, job, folder, python, threads):
    """Run peers.py and yield its lines. Raises InputError with the end of its log where it fails."""
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "ANTS_RANDOM_SEED": "1",
                   "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS": str(threads)}
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen([python, __file__, name, folder / "job.json"], text=True,
                                   stdout=subprocess.PIPE, stderr=log, env=environment)
    try:
        yield from map(json.loads, process.stdout)
    finally:
        if process.poll() is None and sys.exc_info()[0]:
            process.kill()
        code = process.wait()
    if code:
        last = (folder / "log.txt").read_text().strip().splitlines() or ["it said nothing"]
        raise InputError(f"{name}: it ended with {code} ({last[-1][:200]}); see {folder / 'log.txt'}. {python} needs "
                         "the packages of requirements-peers.txt.")


def peers_python(given):
    """The interpreter of the peers: the one given, or that of .venv-peers, which is made where there is none.

    Its file .ready holds the requirements that it was made from; where these have changed, what is new is installed.
    """
    folder, requirements = ROOT / ".venv-peers", ROOT / "requirements-peers.txt"
    python, ready = Path(given or folder / "bin/python"), folder / ".ready"
    if given and not python.is_file():
        raise InputError(f"--peers-python {given}: no such interpreter; leave it out to have .venv-peers made.")
    if not given and not (ready.exists() and ready.read_text() == requirements.read_text()):
        print(f"making {folder}, once", file=sys.stderr)
        new = [] if python.is_file() else [[sys.executable, "-m", "venv", folder]]
        for command in (*new, [python, "-m", "pip", "install", "--quiet", "-r", requirements]):
            if subprocess.run(command, stdout=sys.stderr).returncode:
                raise InputError(f"{' '.join(map(str, command))} failed; install the peers by hand and name that "
                                 "interpreter by --peers-python.")
        ready.write_text(requirements.read_text())
    return str(python)


# ---------------------------------------------------------------------------------------------------------------------
# Each method: files of a pair and options -> field, label, seconds
# ---------------------------------------------------------------------------------------------------------------------

def ants_method(pair, options):
    """antspyx: options are arguments of ants.registration, which begins at the centres of mass, or at the pair's start
    where "from_start" is among them.

    Its preset "SyNCC" ignores syn_sampling and reg_iterations; "SyN" with syn_metric "CC" takes both.
    """
    import ants
    options = dict(options)
    fixed, moving, label = (ants.image_read(str(pair[key])) for key in FILES)
    folder = tempfile.mkdtemp()
    try:
        if options.pop("from_start", False):
            write_matrix(f"{folder}/start.mat", np.array(pair["start"]))
            options["initial_transform"] = [f"{folder}/start.mat"]
        started = clocks()
        found = ants.registration(fixed, moving, outprefix=f"{folder}/", **options)
        seconds = spent(started)
        transforms = found["fwdtransforms"]
        warped = ants.apply_transforms(fixed, label, transforms, interpolator="nearestNeighbor").numpy()
        field, _ = read_field(ants.apply_transforms(fixed, moving, transforms, compose=f"{folder}/all"))
    finally:
        shutil.rmtree(folder)
    return field, warped, seconds


def build_ants_template(job, tell):
    """antspyx's own template of a group. job: {"images", "template": the file to write, "options"} of
    ants.build_template, which starts at the mean of the images as they lie.

    Each round is one call that starts at the template of the round before, as its own loop does, so that an interrupted
    build continues after its last round. A round's template and its seconds are kept beside the template.
    """
    import ants
    images, options = [ants.image_read(path) for path in job["images"]], dict(job["options"])
    found, total = None, [0.0, 0.0]
    for number in range(1, options.pop("iterations") + 1):
        kept = Path(job["template"]).with_name(f"round{number}.nii.gz")
        held = Path(f"{kept}.json")  # written last
        was = json.loads(held.read_text()) if held.is_file() else {}
        if was.get("job") == job:
            found, seconds = ants.image_read(str(kept)), was["seconds"]
        else:
            started = clocks()
            found = ants.build_template(found, images, iterations=1, **options)
            seconds = spent(started)
            held.unlink(missing_ok=True)
            ants.image_write(found, str(kept))
            held.write_text(json.dumps({"job": job, "seconds": seconds}))
        total = [one + other for one, other in zip(total, seconds)]
        print(f"round {number}: {seconds[1]:.0f} CPU seconds", file=sys.stderr, flush=True)
    ants.image_write(found, job["template"])
    tell(seconds=total)


def greedy_method(pair, options):
    """Greedy: its affine stage, then its deformation. options: of the command lines of its stages, affine a list.

    Without any affine stage it begins from the pair's start.
    """
    import SimpleITK
    from picsl_greedy import Greedy3D
    fixed, moving, label = (SimpleITK.ReadImage(str(pair[key])) for key in FILES)
    fixed, moving = (SimpleITK.Cast(image, SimpleITK.sitkFloat32) for image in (fixed, moving))
    greedy, threads, folder = Greedy3D(), os.environ["OMP_NUM_THREADS"], tempfile.mkdtemp()
    affine, start = f"{folder}/affine.mat", "-ia-image-centers"
    try:
        started = clocks()
        for stage in options["affine"]:
            greedy.execute(f"-threads {threads} -a -i fixed moving {start} {stage} -o {affine}", fixed=fixed,
                           moving=moving)
            start = f"-ia {affine}"
        if not options["affine"]:
            np.savetxt(affine, pair["start"])
        greedy.execute(f"-threads {threads} -i fixed moving -it {affine} {options['deformable']} -o field", fixed=fixed,
                       moving=moving, field=None)
        seconds = spent(started)
        greedy.execute(f"-rf fixed -ri NN -rm label warped -r field {affine}", label=label, warped=None)
        matrix = np.loadtxt(affine)
    finally:
        shutil.rmtree(folder)
    array, fixed_affine = read(pair["fixed"])
    warped = SimpleITK.GetArrayFromImage(greedy["warped"]).transpose(2, 1, 0)
    # A vector in mm for each voxel, in ITK's axes, of which two point the other way; then the affine, in NIfTI's.
    shift_mm = SimpleITK.GetArrayFromImage(greedy["field"]).transpose(2, 1, 0, 3) * (-1, -1, 1)
    world = points(array.shape, fixed_affine) + shift_mm
    return voxels(world @ matrix[:3, :3].T + matrix[:3, 3], fixed_affine), warped, seconds


def dipy_method(pair, options):
    """DIPY: its affine pipeline (centre of mass, translation, rigid, affine), then SyN with its local correlation.

    options: arguments of syn_registration, and "iterations" of its three resolutions, coarse first (10, 10, 5). DIPY
    refuses a resolution at which a side is shorter than its correlation's window (9 voxels); those are left out.
    """
    from dipy.align import affine_registration, syn_registration
    (fixed, fixed_affine), (moving, affine), (label, _) = (read(pair[key]) for key in FILES)
    options, shortest = dict(options), min(*fixed.shape, *moving.shape)
    asked = options.pop("iterations", (10, 10, 5))
    iterations = [count for level, count in zip((2, 1, 0), asked) if shortest / 2 ** level >= 8.5] or [asked[-1]]
    started = clocks()
    _, matrix = affine_registration(moving, fixed, moving_affine=affine, static_affine=fixed_affine)
    _, mapping = syn_registration(moving, fixed, moving_affine=affine, static_affine=fixed_affine, prealign=matrix,
                                  level_iters=iterations, **options)
    seconds = spent(started)
    warped = mapping.transform(label.astype(np.float32), interpolation="nearest")
    # DIPY moves a point of the fixed world by the field first and by the affine then.
    matrix = mapping.prealign_inv if mapping.is_inverse else mapping.prealign
    world = points(fixed.shape, fixed_affine) + np.asarray(mapping.get_forward_field())
    world = world @ matrix[:3, :3].T + matrix[:3, 3]
    return voxels(world, fixed_affine), warped, seconds


def convexadam_method(pair, options):
    """ConvexAdam on MIND features. It has no affine stage, and its control grids have to divide the volume."""
    import torch
    from convexAdam.convex_adam_MIND import convex_adam_pt
    multiple = int(np.lcm(options["grid_sp"], options["grid_sp_adam"]))
    (fixed, moving, label), inside, total = on_shared_grid(pair, multiple)
    started = clocks()
    moved = convex_adam_pt(fixed, moving, dtype=torch.float32, device=torch.device("cpu"), **options)
    seconds = spent(started)
    moved = np.moveaxis(moved, -1, 0)
    return total(moved), ndimage.map_coordinates(label, moved + np.indices(label.shape), order=0)[inside], seconds


def voxelmorph_method(pair, options):
    """A VoxelMorph U-Net that `voxelmorph-train` has trained. It has no affine stage either."""
    import torch
    if "net" not in options:
        state = torch.load(options["weights"], weights_only=True)
        options["net"] = new_voxelmorph(state["settings"])
        options["net"].load_state_dict(state["model"])
        options["net"].eval()
    (fixed, moving, label), inside, total = on_shared_grid(pair, options["net"].multiple)
    started = clocks()
    with torch.no_grad():
        moved = options["net"](batch(moving), batch(fixed))
    seconds = spent(started)
    return total(moved[0].numpy()), nearest(batch(label), moved)[0, 0].numpy()[inside], seconds


def elastix_method(pair, options):
    """elastix: its default parameter maps, one stage after the other, which begin with the centres on each other.

    options: {"stages": [{"map": "rigid" | "affine" | "bspline", "resolutions": count, "spacing_mm": of the last
    B-spline grid, "parameters": {name: [values]} that differ}]}.
    """
    import itk
    fixed, moving, label = (itk.imread(str(pair[key]), itk.F) for key in FILES)
    stages = itk.ParameterObject.New()
    for number, stage in enumerate(options["stages"]):
        chosen = stages.GetDefaultParameterMap(stage["map"], stage["resolutions"], stage.get("spacing_mm", 10.0))
        always = {"AutomaticTransformInitialization": ["false" if number else "true"], "RandomSeed": ["1"],
                  "WriteResultImage": ["false"]}
        for name, values in {**always, **stage["parameters"]}.items():
            chosen[name] = values
        stages.AddParameterMap(chosen)
    started = clocks()
    # With two threads itk-elastix 0.25.4 ends in a segmentation fault on every pair.
    _, found = itk.elastix_registration_method(fixed, moving, parameter_object=stages, number_of_threads=1)
    seconds = spent(started)
    # A vector in mm for each voxel, in ITK's axes, of which two point the other way.
    with tempfile.TemporaryDirectory() as folder:  # it writes the field to a file too
        shift_mm = itk.transformix_deformation_field(moving, found, output_directory=folder)
        shift_mm = itk.array_from_image(shift_mm).transpose(2, 1, 0, 3)
    last = found.GetNumberOfParameterMaps() - 1
    found.SetParameter(last, "FinalBSplineInterpolationOrder", "0")
    warped = itk.array_from_image(itk.transformix_filter(label, found)).transpose(2, 1, 0)
    array, fixed_affine = read(pair["fixed"])
    return voxels(points(array.shape, fixed_affine) + shift_mm * (-1, -1, 1), fixed_affine), warped, seconds


METHODS = {"ants": ants_method, "elastix": elastix_method, "greedy": greedy_method, "dipy": dipy_method,
           "convexadam": convexadam_method, "voxelmorph": voxelmorph_method}


# ---------------------------------------------------------------------------------------------------------------------
# VoxelMorph's training
# ---------------------------------------------------------------------------------------------------------------------

def new_voxelmorph(settings):
    from voxelmorph.nn.models import VxmPairwise
    net = VxmPairwise(ndim=3, source_channels=1, target_channels=1, nb_features=settings["nb_features"],
                      integration_steps=settings["integration_steps"])
    net.multiple = 2 ** len(settings["nb_features"])  # a halving for each number of features
    return net


def batch(array):
    import torch
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))[None, None]


def nearest(label, field):
    from voxelmorph.nn.functional import spatial_transform
    return spatial_transform(label, field, method="nearest")


def fit(images, settings, minutes, spent, tell):
    """A network trained on random ordered pairs for some minutes: 1 - NCC + weight x squared gradient of the field.

    images: list of arrays; they are centred on one grid. spent: minutes of the trainings before, for the progress bar.
    Returns: network, steps.
    """
    import torch
    from neurite.nn.modules import NCC, SpatialGradient
    torch.manual_seed(0)
    draw, net = random.Random(0), new_voxelmorph(settings)
    size, _ = shared_grid(np.max([image.shape for image in images], 0), (1, 1, 1), net.multiple)
    volumes = []
    for image in images:
        volumes.append(torch.zeros(1, 1, *size))
        volumes[-1][(0, 0, *shared_grid(image.shape, size, 1)[1])] = torch.from_numpy(np.array(image, np.float32))
    optimizer = torch.optim.Adam(net.parameters(), lr=settings["lr"])
    correlation, gradient = NCC(), SpatialGradient("l2")
    began, steps, losses = time.perf_counter(), 0, []
    while (share := (time.perf_counter() - began) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * 0.5 * (1 + np.cos(np.pi * share))
        moving, fixed = draw.sample(volumes, 2)
        field, warped = net(moving, fixed, return_warped_source=True)
        # NCC refuses values that rounding has brought out of 0 .. 1; in double precision there are none.
        loss = 1 - correlation(warped.double(), fixed.double()).mean() + settings["weight"] * gradient(field)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        losses.append(loss.item())
        if steps % 20 == 0:
            tell(minutes=spent + share * minutes, steps=steps, loss=float(np.mean(losses[-100:])))
    return net.eval(), steps


def mean_dice(net, pairs):
    """Mean Dice over pairs of files and over the labels of the fixed one."""
    import torch
    scores = []
    for pair in pairs:
        (fixed, moving, label), inside, _ = on_shared_grid(pair, net.multiple)
        with torch.no_grad():
            warped = nearest(batch(label), net(batch(moving), batch(fixed)))[0, 0].numpy()[inside]
        true, _ = read(pair["fixed_label"])
        for value in np.unique(true)[1:]:
            a, b = warped == value, true == value
            scores.append(2 * (a & b).sum() / (a.sum() + b.sum()))
    return float(np.mean(scores))


def train_voxelmorph(job, tell):
    """Try each of the settings for a twentieth of the time, then train the best one from new for all of it.

    job: {"volumes", "validation" (pairs with fixed_label), "settings", "minutes", "weights"}. The best one has the
    highest Dice on the validation pairs, whose labels nothing else sees.
    """
    import torch
    images, part, tried = [read(path)[0] for path in job["volumes"]], job["minutes"] / 20, []
    for settings in job["settings"]:
        net, steps = fit(images, settings, part, len(tried) * part, tell)
        tried.append({"settings": settings, "steps": steps, "dice": mean_dice(net, job["validation"])})
    best = max(tried, key=lambda found: found["dice"])["settings"]
    net, steps = fit(images, best, job["minutes"], len(tried) * part, tell)
    state = {"model": net.state_dict(), "settings": best, "minutes": job["minutes"], "steps": steps, "tried": tried,
             "validation_dice": mean_dice(net, job["validation"])}
    write_file(job["weights"], lambda file: torch.save(state, file))
    tell(done=True, **{key: value for key, value in state.items() if key != "model"})


WHOLE_JOBS = {"voxelmorph-train": train_voxelmorph, "ants-template": build_ants_template}


# ---------------------------------------------------------------------------------------------------------------------

def main():
    name, path = sys.argv[1:]
    # Libraries print what they like: lines of JSON go to the real output, everything else to the log.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**line):
        print(json.dumps(line), file=results, flush=True)

    job = json.loads(Path(path).read_text())
    if name in WHOLE_JOBS:
        return WHOLE_JOBS[name](job, tell)
    method, options = METHODS[name], job["options"]
    if job["warm_up"] and job["pairs"]:
        method(job["pairs"][0], options)
    for number, pair in enumerate(job["pairs"]):
        field, label, seconds = method(pair, options)
        np.save(f"{pair['out']}.field.npy", np.ascontiguousarray(field, np.float32))
        np.save(f"{pair['out']}.label.npy", np.rint(np.asarray(label)).astype(np.int16))
        tell(number=number, seconds=seconds)


if __name__ == "__main__":
    main()
