"""Charts of a page as inline SVG: no script, no library, no picture file. Colours follow the page (Report/page.css).

A curve of any length is reduced to one point per pixel: the mean of the values there, over a band from the least to the
greatest, so that a spike of one step in a hundred thousand remains visible. A spike far above the rest leaves the axis,
and the note below says how far.
"""
import math
from html import escape

import numpy as np

WIDTH, HEIGHT = 360, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 6, 8, 20  # margins
POINTS = WIDTH - LEFT - RIGHT
GAP = POINTS // 20  # pixels without a value that break a curve
SPIKE = 2  # heights of nearly all of a curve, beyond which the rest may leave the axis
COLOURS = 8  # classes c0 .. c7 of page.css
NO_VALUES = "no values yet"  # shown beside the title of an empty chart


def thin(x, y, points=POINTS):
    """A curve with at most one point per pixel.

    x: rising. y: same length; values that are not finite are left out. Returns: x, mean, least, greatest, as arrays.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= points:
        return x, y, y, y
    place = np.minimum((x - x[0]) / max(x[-1] - x[0], 1e-12) * points, points - 1).astype(int)
    starts = np.flatnonzero(np.r_[True, np.diff(place) > 0])
    counts = np.diff(np.r_[starts, len(x)])
    middle = np.add.reduceat(x, starts) / counts
    middle[0], middle[-1] = x[0], x[-1]  # the axis, and the marks on it, reach from the first value to the last
    return (middle, np.add.reduceat(y, starts) / counts,
            np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts))


def gaps(x, y):
    """The last x before each wide stretch of a curve without a finite y, such as steps in which a mode did not run."""
    x, known = np.asarray(x, float), np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    wide = np.diff(x[known]) * POINTS >= GAP * (x[-1] - x[0])
    return x[known[:-1][wide & (np.diff(known) > 1)]]


def ticks(low, high, count=4):
    """About `count` round numbers from low to high, at least two: one alone does not show a scale."""
    size = 10.0 ** math.floor(math.log10((high - low) / count))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (size * factor) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [round(index * step, 12) for index in range(first, last + 1)]
    return values if len(values) > 1 else ticks(low, high, count + 1)


def number(value, digits=3):
    """A number for an axis or a heading, with `digits` digits: from ten thousand as k, then as M and G."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.{digits}g}{unit}"
    if 0 < abs(value) < 1e-3:
        fraction, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(fraction):g}e{int(power)}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def line_chart(title, curves, marks=(), log=False, note="", across="step", limits=()):
    """A <figure> with curves over the steps.

    title: plain text. curves: list of (name, x, y); a single curve shows its last value beside the title, several get a
    legend. marks: list of (x, kind, text) for vertical lines, kind "dead" or "planned". log: logarithmic y axis, which
    leaves out values that are not positive. note: plain text below. limits: list of (name, y) for horizontal lines.
    """
    thinned, breaks, colours, last, ends = [], [], [], "", []
    for index, (name, x, y) in enumerate(curves):
        y = np.asarray(y, float)
        y = np.where(y > 0, y, np.nan) if log else y
        curve = thin(x, y)
        if len(curve[0]):
            thinned.append((name, *curve))
            breaks.append(gaps(x, y))
            ends += [x[0], x[-1]]  # also where the values are not finite: a loss that became NaN ends before the axis
            colours.append(index % COLOURS)  # a curve keeps its colour where another one has no values
            last = number(y[np.isfinite(y)][-1])  # itself, since a pixel averages
    if not thinned:
        return figure(title, NO_VALUES, "", "", note)
    box = frame(thinned, ends, [y for _, y in limits], log)
    least, greatest = min(np.min(curve[3]) for curve in thinned), max(np.max(curve[4]) for curve in thinned)
    beyond = [number(y) for y in (least, greatest) if not box["low"] <= scaled(y, log) <= box["high"]]
    note = "; ".join([note] * bool(note) + [f"off the axis: as far as {' and '.join(beyond)}"] * bool(beyond))
    parts = [axes(box, across)]
    parts += [f'<path class="mark {kind}" d="M{pixel} {TOP}V{HEIGHT - BOTTOM}"><title>{escape(text)}</title></path>'
              for pixel, kind, text in merge_marks(box, marks)]
    parts += [f'<path class="limit" d="M{LEFT} {y_pixel(box, y):.1f}H{WIDTH - RIGHT}">'
              f"<title>{escape(name)}</title></path>"
              for name, y in limits if box["low"] <= scaled(y, log) <= box["high"]]
    for colour, (_, *curve), ended in zip(colours, thinned, breaks):
        at = np.searchsorted(curve[0], ended, side="right")
        parts += [curve_path(box, colour, *piece) for piece in zip(*(np.split(values, at) for values in curve))]
    names = legend([name for name, *_ in thinned], [f"c{colour}" for colour in colours]) if len(curves) > 1 else ""
    return figure(title, last if len(thinned) == 1 else "", "".join(parts), names, note)


def frame(curves, ends, limits, log):
    """The ranges that map values to pixels: {"first", "last": of x, "low", "high": of y, "log"}."""
    bounds = [bounds_of(*(scaled(y, log) for y in curve[3:])) for curve in curves]
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    for limit in limits:  # a limit far from the curves must not squeeze them
        value = scaled(limit, log)
        if low - (high - low) <= value <= high + (high - low):
            low, high = min(low, value), max(high, value)
    if low == high == 0 and not log:
        high = 1.0  # such as a percentage that never leaves 0: nothing below it
    pad = 0.05 * (high - low) or (0.5 if log else 0.05 * abs(high)) or 1.0
    return {"first": min(ends), "last": max(*ends, min(ends) + 1e-9), "low": low - pad, "high": high + pad, "log": log}


def bounds_of(least, greatest):
    """The lowest and the highest value to show of a curve: all, unless few lie far from the others and from its end."""
    low, high = min(np.percentile(least, 1), least[-1]), max(np.percentile(greatest, 99), greatest[-1])
    room = SPIKE * (high - low) or math.inf
    return max(np.min(least), low - room), min(np.max(greatest), high + room)


def scaled(y, log):
    """Values of y, or their logarithms for a logarithmic axis."""
    return np.log10(np.maximum(y, 1e-300)) if log else np.asarray(y, float)


def x_pixel(box, x):
    """Pixels from the left of a value of x."""
    return LEFT + (np.asarray(x, float) - box["first"]) / (box["last"] - box["first"]) * POINTS


def y_pixel(box, y):
    """Pixels from the top of a value of y; of one off the axis, those of its end."""
    share = (box["high"] - scaled(y, box["log"])) / (box["high"] - box["low"])
    return TOP + np.clip(share, 0, 1) * (HEIGHT - TOP - BOTTOM)


def axes(box, unit):
    """Grid lines, with numbers at the left and below."""
    parts = []
    for value, label in labelled(y_ticks(box)):
        height = y_pixel(box, value)
        parts.append(f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>'
                     f'<text x="{LEFT - 5}" y="{height + 3:.1f}" class="end">{label}</text>')
    values = ticks(box["first"], box["last"], 3) if box["last"] - box["first"] > 1e-6 else [box["first"]]
    for value, label in labelled(values):
        x = float(x_pixel(box, value))
        side = "end" if x > WIDTH - 24 else "mid"
        parts.append(f'<text x="{min(x, WIDTH - RIGHT):.1f}" y="{HEIGHT - 6}" class="{side}">{label}</text>')
    return "".join(parts) + f'<text x="2" y="{HEIGHT - 6}">{escape(unit)}</text>'


def labelled(values):
    """(value, text) of the ticks of an axis, with enough digits to tell them apart."""
    for digits in range(3, 9):
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return list(zip(values, texts))


def y_ticks(box):
    """Round numbers of the y axis; powers of ten if it is logarithmic and contains at least two."""
    if not box["log"]:
        return ticks(box["low"], box["high"])
    powers = range(math.ceil(box["low"]), math.floor(box["high"]) + 1)
    if len(powers) >= 2:
        return [10.0 ** power for power in powers][::max(1, math.ceil(len(powers) / 5))]
    return [value for value in ticks(10 ** box["low"], 10 ** box["high"]) if value > 0]


def curve_path(box, index, x, mean, least, greatest):
    """The band of a curve, if it has one, and its line; a single point becomes a dot."""
    right, parts = x_pixel(box, x), []
    if np.any(greatest > least):
        there = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(right, y_pixel(box, greatest)))
        back = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(right[::-1], y_pixel(box, least)[::-1]))
        parts.append(f'<polygon class="band c{index}" points="{there} {back}"/>')
    if len(x) == 1:
        return f'<circle class="dot c{index}" cx="{right[0]:.1f}" cy="{y_pixel(box, mean)[0]:.1f}" r="2.5"/>'
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(right, y_pixel(box, mean)))
    return "".join([*parts, f'<polyline class="line c{index}" points="{line}"/>'])


def merge_marks(box, marks):
    """Marks that fall on the same two pixels become one, with the texts of both. Returns: [(pixels, kind, text)]."""
    merged = {}
    for x, kind, text in marks:
        if box["first"] <= x <= box["last"]:
            pixel = 2 * round(float(x_pixel(box, x)) / 2)
            kinds, texts = merged.setdefault(pixel, (set(), []))
            kinds.add(kind)
            texts.append(text)
    return [(pixel, "dead" if "dead" in kinds else "planned", "; ".join(texts[:3])
             + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")) for pixel, (kinds, texts) in merged.items()]


def stacked_chart(title, edges, parts):
    """A <figure> with a column for each part of the time, divided into the shares of all kinds.

    edges: len(values) + 1 times in s, shown as hours since the first, or minutes if there are fewer than two hours.
    parts: list of (name, colour class, values); the first is at the bottom.
    """
    sums = sum(np.asarray(values, float) for _, _, values in parts) if parts else np.zeros(1)
    if not np.any(sums > 0):
        return figure(title, NO_VALUES, "", "")
    hours = (np.asarray(edges) - edges[0]) / 3600
    unit, hours = ("h", hours) if hours[-1] >= 2 else ("min", hours * 60)
    box = {"first": hours[0], "last": hours[-1], "low": 0.0, "high": 100.0, "log": False}
    left, base, drawn = x_pixel(box, hours), np.zeros(len(sums)), [axes(box, unit)]
    for name, colour, values in parts:
        top = base + 100 * np.divide(values, sums, out=np.zeros(len(sums)), where=sums > 0)
        heights = [(y_pixel(box, a), y_pixel(box, b)) for a, b in zip(base, top)]
        path = "".join(f"M{left[index]:.1f} {low:.1f}V{high:.1f}H{left[index + 1] - 0.4:.1f}V{low:.1f}Z"
                       for index, (low, high) in enumerate(heights) if low - high > 0.05)
        drawn.append(f'<path class="fill {colour}" d="{path}"><title>{escape(name)}</title></path>')
        base = top
    return figure(title, "", "".join(drawn), legend([name for name, *_ in parts], [kind for _, kind, _ in parts]))


def figure(title, last, svg, below, note=""):
    """A chart with its heading, legend and note. svg: the drawing, "" for none. below: HTML of the legend."""
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{svg}</svg>\n'
    return (f'<figure class="chart"><figcaption><b>{escape(title)}</b> <span>{escape(last)}</span></figcaption>\n'
            f"{drawing if svg else ''}{below}{f'<p>{escape(note)}</p>' if note else ''}</figure>\n")


def legend(names, classes):
    items = "".join(f'<span class="key {colour}">{escape(str(name))}</span>' for name, colour in zip(names, classes))
    return f'<div class="legend">{items}</div>'


def spark(y):
    """A curve as at most 40 characters of text for a terminal: "\u2581\u2582\u2585\u2588"; "" without values."""
    _, mean, _, _ = thin(np.arange(len(y)), y, 40)
    if not len(mean):
        return ""
    low, high = float(np.min(mean)), float(np.max(mean))
    return "".join(chr(0x2581 + int(7.999 * (value - low) / max(high - low, 1e-300))) for value in mean)


def grid(charts):
    """Charts beside each other, as many as the window is wide; "" without charts."""
    return f'<div class="charts">\n{"".join(charts)}</div>\n' if charts else ""
