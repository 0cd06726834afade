"""The charts of a run, from what Report/run_logs.py has read: losses, validation, gradients, speed, ranks, time."""
import numpy as np

from Report.charts import line_chart, stacked_chart
from Report.goodput import KINDS, over_time
from Report.rules import newest_ranks, own_of

SHOWN_RANKS = 8  # each drawn as a curve; of more ranks, only the median and the two farthest from it
PLANNED = ("first start", "planned restart", "done", "no verdict yet")  # causes of a restart other than deaths
# What the curves mean; a loss of your own shows its name alone.
MEANINGS = {"total": "mode 1: weighted loss", "ang": "mode 1: cosine of recovered and true field; -1 is perfect",
            "dist": "mode 1: relative squared error; 0 is perfect", "regul": "mode 1: regulariser",
            "contrastive": "mode 2: loss", "regist": "mode 3: weighted loss",
            "imgsim": "mode 3: minus the local correlation; -1 is perfect",
            "imgmse": "mode 3: mean squared difference of the images", "ddf": "mode 3: regulariser",
            "dice": "mode 3: one minus the Dice of the labels", "labelled": "mode 3: share of pairs with labels",
            "segment": "mode 3: loss of the segmentation", "segmented": "mode 3: share of volumes with labels",
            "val_ang": "mode 1: -1 is perfect", "val_retrieval": "mode 2: share of volumes recognised by their slices",
            "val_dice": "mode 3: Dice of the labels; 1 is perfect", "val_imgsim": "mode 3: 1 is perfect",
            "val_folding": "mode 3: % of voxels that fold", "val_segment": "Dice of the segmentation; 1 is perfect"}
DEATH_COLOURS = ("k6", "c3", "c6", "c4", "c5")  # classes of page.css
LEAK_LINE = 200  # length of the line that shows a leak, in steps
GIB = 2 ** 30


def restarts(found):
    """Vertical lines at the first step of each restarted attempt: [(step, "dead" or "planned", text)]."""
    marks, steps = [], found["steps"]
    for before, each in zip(found["costs"], found["costs"][1:]):
        begun = each["rows"][steps["is_step"][each["rows"]] == 1]  # none if it was refused
        if not before["end"] or before["cause"] == "done" or not len(begun):
            continue
        kind = "dead" if before["end"]["verdict"]["dead"] else "planned"
        marks.append((steps["step"][begun[0]], kind, f"attempt {before['attempt']}: {before['cause']}"))
    return marks


def loss_charts(found):
    """Charts of the modes' losses and of each term that a step function returns; names of curves that are all 0."""
    steps, marks = found["once"], restarts(found)
    nothing = np.full(len(steps["step"]), np.nan)
    curves = {name: steps.get(f"terms.{name}", nothing) for name in found["losses"]}
    zeros = [name for name, y in curves.items() if np.isfinite(y).any() and not np.nan_to_num(y).any()]
    return [line_chart(name, [(name, steps["step"], y)], marks, note=MEANINGS.get(name, ""))
            for name, y in curves.items() if name not in zeros], zeros


def validation_charts(found):
    """Each validation score over the steps."""
    return [line_chart(name, [(name, [line["step"] for line in lines], [line[name] for line in lines])],
                       restarts(found), note=MEANINGS.get(name, "")) for name, lines in found["scores"].items()]


def gradient_charts(found):
    """Gradient norms and clip rates of each mode, gate openings, learning rate."""
    steps, marks, cfg = found["once"], restarts(found), found["config"]
    x, charts, rates = steps["step"], [], []
    keys = {mode["name"]: mode.get("clip_norm") for launch in found["launches"] for mode in launch.get("modes", ())
            if "name" in mode}
    for name in [name for name in steps if name.startswith("norms.")]:
        mode, column = name.removeprefix("norms."), steps[name]
        limit, limits = cfg.get(keys.get(mode)), limits_of(found, keys.get(mode))
        now = " in the newest launch" * (len(np.unique(limits)) > 1)
        charts.append(line_chart(f"gradient norm, {mode}", [(mode, x, column)], marks, log=True,
                                 limits=[(f"clipped to {limit:g}", limit)] if limit else [],
                                 note=(f"dashed: clipped to {limit:g}" if limit else "not clipped") + now))
        if np.isfinite(limits).any():
            rates.append((mode, x, np.where(np.isfinite(column), 100.0 * (column > limits), np.nan)))
    charts.append(line_chart("steps that are clipped, %", smoothed(rates), marks, note="mean of 50 steps"))
    for mode in [mode for mode in found["modes"] if mode.get("gate")]:
        charts.append(line_chart("gate open, % of the steps", smoothed([("open", x, 100 * steps["open"])]), marks,
                                 note=f"{mode['name']} runs where ang is below {cfg.get(mode['gate'], '-')}; "
                                 "mean of 50 steps"))
    charts.append(line_chart("learning rate", [("rate", x, steps["lr"])], marks))
    count = np.cumsum(np.nan_to_num(steps["nonfinite"]))
    charts.append(line_chart("non-finite losses, in all", [("count", x, count)], marks))
    return charts


def limits_of(found, key):
    """The limit on a gradient norm in each step, by the config of its launch; infinite without one. key: its key."""
    steps = found["once"]["step"]
    limits = np.full(len(steps), np.inf)
    for launch in found["launches"]:
        limits[steps >= launch.get("step", 0)] = launch["config"].get(key) or np.inf
    return limits


def smoothed(curves, width=50):
    """Running means of curves, over their finite values."""
    result = []
    for name, x, y in curves:
        known = np.isfinite(y)
        x, y = np.asarray(x)[known], np.asarray(y)[known]
        sums = np.cumsum(np.r_[0.0, y])
        first = np.maximum(np.arange(len(y)) + 1 - width, 0)
        result.append((name, x, (sums[1:] - sums[first]) / (np.arange(len(y)) + 1 - first)))
    return result


def speed_charts(found):
    """Samples per second, seconds of a step, waiting for data."""
    steps, marks = found["once"], restarts(found)
    x, seconds = steps["step"], np.maximum(steps["seconds"], 1e-9)
    data = np.nan_to_num(steps.get("spent.data", np.zeros(len(x))))
    agree = np.nan_to_num(steps.get("spent.agree", np.zeros(len(x))))
    waits = [("for data", x, 100 * data / seconds), ("for other ranks", x, 100 * agree / seconds)]
    return [line_chart("samples per second", smoothed([("rate", x, steps["samples"] / seconds)], 10), marks,
                       note="mean of 10 steps"),
            line_chart("seconds of a step", [("seconds", x, seconds)], marks, log=True),
            line_chart("waiting, % of a step", smoothed(waits, 10), marks, note="rank 0; mean of 10 steps")]


def rank_charts(found):
    """Own work and memory of every rank, side by side."""
    own, host, device, reserved = {}, {}, {}, {}
    for rank, lines in newest_ranks(found).items():
        lines = [line for line in lines if line.get("steps")]
        x = [line["step"] for line in lines]
        own[rank] = (x, [own_of(line).sum() for line in lines])
        for target, key in ((host, "host_used"), (device, "device_free"), (reserved, "device_reserved")):
            target[rank] = (x, [np.nan if line.get(key) is None else line[key] / GIB for line in lines])
    charts = [line_chart("own work of a step, s", few(own), restarts(found), log=True,
                         note="without waiting for others: a rank above the others makes all others wait"),
              line_chart("host memory, GiB", few(host) + leak_lines(found, host, "host"), restarts(found),
                         note="of the process and its loader workers")]
    if any(np.isfinite(y).any() for _, y in device.values() if len(y)):  # some drivers do not report it
        charts.append(line_chart("device memory that is free, GiB", few(device), restarts(found)))
    if any(np.isfinite(y).any() for _, y in reserved.values() if len(y)):
        held = few(reserved) + leak_lines(found, reserved, "device")
        charts.append(line_chart("device memory that torch holds, GiB", held, restarts(found)))
    return charts


def few(curves):
    """Curves of ranks for a chart: all if there are few; otherwise the median and the two farthest from it."""
    named = [(f"rank {rank}", x, y) for rank, (x, y) in sorted(curves.items()) if len(x)]
    if len(named) <= SHOWN_RANKS:
        return named
    steps = sorted(set.intersection(*(set(x) for _, x, _ in named)))
    if not steps:
        return named[:SHOWN_RANKS]
    values = [dict(zip(x, y)) for _, x, y in named]
    rows = np.array([[of_rank[step] for step in steps] for of_rank in values])
    median = np.nanmedian(rows, axis=0)
    far = np.argsort(np.nanmean(np.abs(rows - median), axis=1))[-2:]
    return [("median of all", steps, median), *((named[index][0], steps, rows[index]) for index in far)]


def leak_lines(found, curves, place):
    """A straight line for the newest leak of each rank, with the slope that the rank has measured.

    curves: {rank: (steps, GiB)}. place: "host" or "device", the memory that leaks.
    """
    leaks = {line["rank"]: line for line in found["events"] if line["event"] == "leak"}
    lines = []
    for rank, leak in sorted(leaks.items())[:SHOWN_RANKS]:
        x, y = curves.get(rank, ([], []))
        index = next((index for index, step in enumerate(x) if step >= leak["step"]), None)
        if index is None or leak.get("place") != place:
            continue
        steps = [step for step in x[index:] if step <= leak["step"] + LEAK_LINE]
        grown = [y[index] + leak["bytes_per_step"] / GIB * (step - steps[0]) for step in steps]
        lines.append((f"leak of rank {rank}", steps, grown))
    return lines


def time_chart(found):
    """Where the wall time went over the run, by kind; restarts are split by the cause of the end before them."""
    edges, seconds = over_time(found)
    deaths = iter(DEATH_COLOURS)
    colours = {**{kind: f"k{number}" for number, kind in enumerate(KINDS)}, "detection": "k7"}
    for kind in seconds:
        if kind not in colours:
            colours[kind] = "c7" if kind.removeprefix("restart: ") in PLANNED else next(deaths, "k6")
    return stacked_chart("wall time, % of each part of the run", edges,
                         [(kind, colours[kind], values) for kind, values in seconds.items()])
