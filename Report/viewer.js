/* The viewers of a page: slices of volumes, drawn on a canvas. Inference/viewer.py writes the elements and the voxels.

   All volumes of a viewer have one grid, whose axes run to the left, to the back and to the feet of a patient: drawn to
   the right and downwards, this is what radiologists are used to. In a browser that is too old nothing happens. */
"use strict";

const PLANES = {  // the axes that run right, down and into the screen; the letters at left, right, top and foot
  axial: { right: 0, down: 1, through: 2, letters: "RLAP" },
  coronal: { right: 0, down: 2, through: 1, letters: "RLSI" },
  sagittal: { right: 1, down: 2, through: 0, letters: "APSI" },
};
const SQUARES = 7;  // of the checkerboard, along the longer side
const FLICKER_MS = 600;  // less than three changes in a second
const LITTLE_MOTION = matchMedia("(prefers-reduced-motion: reduce)");

async function unpack(text, Kind = Uint8Array) {
  const packed = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Kind(await new Response(stream).arrayBuffer());
}

async function unpackEach(texts) {
  const unpacked = {};
  for (const name in texts) unpacked[name] = await unpack(texts[name]);
  return unpacked;
}

/* ---- Drawing ---- */

/* The values of a volume in the slice that is shown, row by row. */
function cut(view, volume) {
  const { shape } = view.data, { right, down, through } = view.plane, { columns, rows } = view.box;
  const stride = [shape[1] * shape[2], shape[2], 1], values = new Uint8Array(columns * rows);
  const first = view.state.at[through] * stride[through];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      values[row * columns + column] = volume[first + column * stride[right] + row * stride[down]];
    }
  }
  return values;
}

/* Draws one colour, 0xAABBGGRR, for each voxel of the slice. colour: a function of the number of the voxel. */
function paint(view, colour, smooth = true) {
  const { box, context } = view, small = document.createElement("canvas");
  [small.width, small.height] = [box.columns, box.rows];
  const image = new ImageData(box.columns, box.rows), pixels = new Uint32Array(image.data.buffer);
  pixels.forEach((_, number) => { pixels[number] = colour(number); });
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = smooth;
  context.drawImage(small, box.left, box.top, box.width, box.height);
}

function paintImages(view) {
  const { state, data, box, context, canvas } = view, gain = 255 / data.brightest;
  const fixed = cut(view, view.images[data.fixed]), moving = cut(view, view.images[state.moving]);
  const side = Math.max(2, Math.round(Math.max(box.columns, box.rows) / SQUARES));
  const isOdd = number => (Math.floor(number % box.columns / side) + Math.floor(number / box.columns / side)) % 2;
  const grey = values => number => 0xff000000 | values[number] * 0x010101;
  if (state.view === "checkerboard") {
    paint(view, grey(fixed.map((value, number) => isOdd(number) ? moving[number] : value)));
  } else if (state.view === "difference") {
    const difference = number => Math.abs(fixed[number] - moving[number]);
    paint(view, number => view.ofDifference[Math.min(255, Math.floor(gain * difference(number)))]);
  } else {
    paint(view, grey(showsFixed(state) ? fixed : moving));
  }
  if (state.view === "divider") {
    context.save();
    context.beginPath();
    context.rect(state.divider * canvas.width, 0, canvas.width, canvas.height);
    context.clip();
    paint(view, grey(fixed));
    context.restore();
  }
}

function showsFixed(state) {
  return state.view === "fixed" || state.view === "flicker" && state.blink;
}

/* Draws lines, pairs of points [column, row] in voxels. width: in pixels of the page. */
function paintLines(view, lines, colour, width) {
  const { box, context } = view;
  const place = ([column, row]) => [box.left + column / box.columns * box.width, box.top + row / box.rows * box.height];
  context.beginPath();
  for (const [from, to] of lines) {
    context.moveTo(...place(from));
    context.lineTo(...place(to));
  }
  context.strokeStyle = colour;
  context.lineWidth = width * devicePixelRatio;
  context.stroke();
}

/* The sides of voxels between different labels. */
function outlines(view, volume) {
  const { columns, rows } = view.box, values = cut(view, volume), lines = [];
  const isInside = (column, row) => column >= 0 && row >= 0 && column < columns && row < rows;
  const label = (column, row) => isInside(column, row) ? values[row * columns + column] : 0;
  for (let row = 0; row <= rows; row++) {
    for (let column = 0; column <= columns; column++) {
      if (label(column, row) !== label(column - 1, row)) lines.push([[column, row], [column, row + 1]]);
      if (label(column, row) !== label(column, row - 1)) lines.push([[column, row], [column + 1, row]]);
    }
  }
  return lines;
}

const NO_NODE = -32768;  // what Inference/viewer.py packs for a node outside of the body

/* The lines of a regular grid in this slice where the field takes them; linear between two layers of nodes. */
function gridLines(view) {
  const { right, down, through } = view.plane, { start, step, shape, unit } = view.data.grid, lines = [];
  const depth = Math.min(Math.max((view.state.at[through] - start[through]) / step[through], 0), shape[through] - 1);
  const below = Math.floor(depth), above = Math.min(below + 1, shape[through] - 1);
  const packed = (axis, i, j, layer) => {
    const index = [0, 0, 0];
    [index[right], index[down], index[through]] = [i, j, layer];
    return view.moved[((axis * shape[0] + index[0]) * shape[1] + index[1]) * shape[2] + index[2]];
  };
  const node = (i, j) => {
    if ([below, above].some(layer => packed(right, i, j, layer) === NO_NODE)) return null;
    return [[right, i], [down, j]].map(([axis, place]) => {
      const [low, high] = [below, above].map(layer => packed(axis, i, j, layer));
      return start[axis] + step[axis] * place + 0.5 + unit * (low + (depth - below) * (high - low));
    });
  };
  const addLine = (from, to) => { if (from && to) lines.push([from, to]); };
  for (let i = 0; i < shape[right]; i++) {
    for (let j = 0; j < shape[down]; j++) {
      if (i) addLine(node(i - 1, j), node(i, j));
      if (j) addLine(node(i, j - 1), node(i, j));
    }
  }
  return lines;
}

/* The rectangle of the slice on the canvas, as large as fits. */
function fit(view) {
  const { canvas, plane, data } = view, columns = data.shape[plane.right], rows = data.shape[plane.down];
  const across = columns * data.spacing[plane.right], up = rows * data.spacing[plane.down];
  const scale = Math.min(canvas.width / across, canvas.height / up);
  const width = Math.round(scale * across), height = Math.round(scale * up);  // whole pixels: sharp edges
  const left = Math.round((canvas.width - width) / 2), top = Math.round((canvas.height - height) / 2);
  return { columns, rows, left, top, width, height };
}

function draw(view) {
  const { state, canvas, data } = view;
  canvas.width = Math.round(canvas.clientWidth * devicePixelRatio);
  canvas.height = Math.round(canvas.clientHeight * devicePixelRatio);
  view.box = fit(view);
  paintImages(view);
  if (state.jacobian) {
    const codes = cut(view, view.determinant);
    paint(view, number => view.ofDeterminant[codes[number]], false);
  }
  if (state.grid) paintLines(view, gridLines(view), "#ffe9a8", 1);
  const labelled = state.view === "fixed" ? [data.fixed] : [data.fixed, state.moving];
  if (state.labels) {
    labelled.forEach((name, number) => paintLines(view, outlines(view, view.labels[name]), data.lines[number], 1.5));
  }
}

/* ---- Words, buttons, keys, fingers ---- */

/* What is written over the left and the right of the picture. */
function tags({ state, data }) {
  if (state.view === "divider") return [state.moving, data.fixed];
  if (state.view === "checkerboard") return [`squares of ${state.moving} and ${data.fixed}`, ""];
  if (state.view === "difference") return [`difference of ${state.moving} and ${data.fixed}`, ""];
  return [showsFixed(state) ? data.fixed : state.moving, ""];
}

/* Writes what is shown, and presses the buttons that stand for it. */
function writeWords(view) {
  const { root, stage, slider, state, data, plane } = view, each = selector => root.querySelectorAll(selector);
  const slices = data.shape[plane.through], slice = state.at[plane.through] + 1, [left, right] = tags(view);
  const texts = { "output": `${slice} of ${slices}`, ".tag.left": left, ".tag.right": right, ".other": state.moving };
  for (const selector in texts) each(selector).forEach(element => { element.textContent = texts[selector]; });
  each(".edge").forEach((edge, side) => { edge.textContent = slices > 1 ? plane.letters[side] : ""; });
  each("[data-legend]").forEach(line => {
    line.hidden = !state[line.dataset.legend] && state.view !== line.dataset.legend;
  });
  each("button").forEach(button => {
    const { set, to, flip } = button.dataset;
    button.setAttribute("aria-pressed", flip ? state[flip] : state[set] === to);
  });
  slider.parentElement.hidden = slices === 1;
  slider.max = slices;
  slider.value = slice;
  stage.dataset.view = state.view;
  stage.style.setProperty("--divider", `${100 * state.divider}%`);
  stage.setAttribute("aria-valuenow", Math.round(100 * state.divider));
  const place = slices > 1 ? `${state.plane} slice ${slice} of ${slices}, ` : "";
  stage.setAttribute("aria-valuetext", `${place}${state.view}: ${left} ${right}`);
}

/* Changes the state and shows it: the words at once, the picture with the next frame. */
function change(view, changes) {
  Object.assign(view.state, changes);
  view.plane = PLANES[view.state.plane];
  writeWords(view);
  cancelAnimationFrame(view.frame);
  view.frame = requestAnimationFrame(() => draw(view));
}

function moveDivider(view, to) {
  change(view, { divider: Math.min(Math.max(to, 0), 1) });
}

function moveSlice(view, to) {
  const { state, data, plane } = view, at = [...state.at];
  at[plane.through] = Math.min(Math.max(to, 0), data.shape[plane.through] - 1);
  change(view, { at });
}

function showNextMoving(view) {
  const names = Object.keys(view.images).filter(name => name !== view.data.fixed);
  change(view, { moving: names[(names.indexOf(view.state.moving) + 1) % names.length] });
}

function press(view, { dataset: { set, to, flip } }) {
  const { state } = view;
  if (to === "flicker") state.blink = !state.blink;  // with little motion it does not blink by itself
  change(view, flip ? { [flip]: !state[flip] } : { [set]: to });
}

function onKey(view, event) {
  const { state, stage, plane, root } = view, slice = state.at[plane.through];
  const keys = { ArrowUp: () => moveSlice(view, slice + 1), ArrowDown: () => moveSlice(view, slice - 1),
                 ArrowLeft: () => moveDivider(view, state.divider - 0.02),
                 ArrowRight: () => moveDivider(view, state.divider + 0.02) };
  if (event.target === stage) keys[" "] = () => showNextMoving(view);  // on a button, space presses it
  for (const button of root.querySelectorAll("button")) {
    keys[button.getAttribute("aria-keyshortcuts")] = () => press(view, button);
  }
  const isOfSlider = event.target === view.slider && event.key.startsWith("Arrow");
  if (event.ctrlKey || event.metaKey || event.altKey || isOfSlider || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}

function listen(view) {
  const { root, stage, slider, state } = view;
  const followPointer = event => {
    const { left, width } = stage.getBoundingClientRect();
    if (event.buttons && state.view === "divider") moveDivider(view, (event.clientX - left) / width);
  };
  stage.addEventListener("pointerdown", event => stage.setPointerCapture(event.pointerId));
  for (const kind of ["pointerdown", "pointermove"]) stage.addEventListener(kind, followPointer);
  slider.addEventListener("input", () => moveSlice(view, slider.value - 1));
  root.addEventListener("keydown", event => onKey(view, event));
  root.querySelectorAll("button").forEach(button => button.addEventListener("click", () => press(view, button)));
  new ResizeObserver(() => change(view, {})).observe(stage);
  setInterval(() => {
    const still = state.view !== "flicker" || LITTLE_MOTION.matches || document.hidden;
    if (!still) change(view, { blink: !state.blink });
  }, FLICKER_MS);
}

async function open(root) {
  const data = JSON.parse(root.querySelector("script").textContent), canvas = root.querySelector("canvas");
  const view = { root, data, canvas, context: canvas.getContext("2d"), stage: root.querySelector(".stage"),
                 slider: root.querySelector("input"), images: await unpackEach(data.images),
                 labels: await unpackEach(data.labels), determinant: await unpack(data.determinant),
                 moved: await unpack(data.grid.moved, Int16Array),
                 ofDeterminant: await unpack(data.determinant_colours, Uint32Array),
                 ofDifference: await unpack(data.difference_colours, Uint32Array) };
  view.state = { plane: "axial", view: "divider", moving: Object.keys(data.images).at(-1), divider: 0.5, blink: false,
                 at: data.shape.map(n => Math.floor(n / 2)), grid: false, jacobian: false,
                 labels: Object.keys(data.labels).length > 0 };
  root.hidden = false;
  change(view, {});
  listen(view);
}

if (window.DecompressionStream) document.querySelectorAll(".viewer").forEach(open);
