// SPDX-License-Identifier: Apache-2.0
// The report: figures, curves, confusion and images of all that scores at least the slider's threshold.
"use strict";

const STEPS = 1000; // as in visualize/report_page.py
const MOST_IN_MATRIX = 40; // classes
const PAGE = 12; // images
const K = data.classes.length;
const CLASSES = plural(K, "class", "classes");
const BLUE = "#1459a8", GREEN = "#1a7f37", RED = "#cf222e";
const state = { threshold: data.threshold, label: null, kind: ["worst"], shown: PAGE };
let cells = []; // of the confusion matrix: {row, column, button}

/** Counts by step -> counts of that step or higher. */
function fromStep(rows, keyOf, keys) {
  const sums = Array.from({ length: keys }, () => new Int32Array(STEPS + 2));
  for (const row of rows) if (row.at(-2) >= 0) sums[keyOf(row)][row.at(-2)] += row.at(-1);
  for (const one of sums) for (let step = STEPS; step >= 0; step--) one[step] += one[step + 1];
  return sums;
}

const numObjects = new Int32Array(K);
const ofSize = Array.from({ length: K * 3 }, () => 0);
for (const [label, size, , number] of data.objects) {
  numObjects[label] += number;
  ofSize[3 * label + size] += number;
}
const right = fromStep(data.objects, ([label]) => label, K);
const rightOfSize = fromStep(data.objects, ([label, size]) => 3 * label + size, 3 * K);
const wrong = fromStep(data.false, ([label]) => label, K);
const pairs = new Map(); // true class and detected class -> counts
for (const [row, column, step, number] of data.confusion) {
  const key = row * (K + 1) + column;
  if (!pairs.has(key)) pairs.set(key, []);
  pairs.get(key).push([step, number]);
}
const sum = (values) => values.reduce((total, value) => total + value, 0);
const chosen = () => (state.label === null ? data.classes.map((_, label) => label) : [state.label]);

/** Precision, recall and F1 of classes at a step; NaN where not defined. */
function figuresAt(labels, step) {
  const [hits, misses, objects] = [right, wrong].map((all) => sum(labels.map((label) => all[label][step])))
    .concat(sum(labels.map((label) => numObjects[label])));
  const [precision, recall] = [hits / (hits + misses), hits / objects];
  return { precision, recall, f1: hits + misses + objects ? (2 * hits) / (hits + misses + objects) : NaN, hits, objects };
}
const three = (value) => (Number.isNaN(value) ? "n/a" : value.toFixed(3));

/** Number of a cell of the confusion matrix at a step. */
function cellCount(row, column, step) {
  const passing = (list) => sum((list || []).map(([at, number]) => (at >= step ? number : 0)));
  if (column < K) return passing(pairs.get(row * (K + 1) + column));
  let taken = 0;
  for (let other = 0; other < K; other++) taken += passing(pairs.get(row * (K + 1) + other));
  return numObjects[row] - taken;
}

function matching() {
  const words = byId("search").value.trim().toLowerCase();
  return data.classes.map((_, label) => label).filter((label) => data.classes[label].name.toLowerCase().includes(words));
}

function buildClasses() {
  const heads = ["class", "objects", "AP50", "precision", "recall", "F1", "best F1 at"];
  const rows = matching().map((label) => {
    const { name, AP50, best } = data.classes[label];
    const choose = () => {
      state.label = state.label === label ? null : label;
      show("worst");
    };
    const button = element("button", { type: "button", onclick: choose, "aria-pressed": String(state.label === label) }, name);
    const cell = (text) => element("td", {}, text);
    const values = ["", "", ""].map(cell);
    const row = element("tr", {}, element("th", { scope: "row" }, button), cell(numObjects[label]),
      cell(AP50 === null ? "n/a" : AP50.toFixed(1)), ...values, cell(best === null ? "n/a" : (best / STEPS).toFixed(3)));
    return Object.assign(row, { label, button, values });
  });
  byId("classes").replaceChildren(headOf(heads), element("tbody", {}, ...rows));
  byId("matching").textContent = `${rows.length} of ${CLASSES}`;
}

function drawClasses() {
  for (const row of byId("classes").tBodies[0].rows) {
    const { precision, recall, f1 } = figuresAt([row.label], state.threshold);
    [precision, recall, f1].forEach((value, i) => (row.values[i].textContent = three(value)));
    row.button.setAttribute("aria-pressed", String(state.label === row.label));
    row.classList.toggle("chosen", state.label === row.label);
  }
}

const NAMES = { f1: ["F1", BLUE], precision: ["precision", GREEN, "6 3"], recall: ["recall", RED, "2 3"] };
let drawnCurves = {}; // {label, overRecall, overScore}

function buildCurves() {
  const steps = Array.from({ length: STEPS + 1 }, (_, i) => STEPS - i);
  const points = steps.map((step) => ({ score: step / STEPS, ...figuresAt(chosen(), step) }));
  const line = (x, y) => points.filter((one) => !Number.isNaN(one[x]) && !Number.isNaN(one[y])).map((one) => [one[x], one[y]]);
  const of = state.label === null ? "all classes" : className(state.label);
  const lines = Object.entries(NAMES).map(([key, [name, color, dash]]) => ({ points: line("score", key), name, color, dash }));
  const recall = [{ points: line("recall", "precision"), color: BLUE }];
  const overRecall = chart(`Precision over recall of ${of}`, "recall", "precision", recall);
  const overScore = chart(`F1, precision and recall of ${of} over the threshold`, "score from", "", lines);
  const note = (text) => element("figcaption", {}, text);
  byId("precision-recall").replaceChildren(overRecall, note(`Precision over recall, ${of}, IoU 0.5; the dot is the slider.`));
  byId("f1").replaceChildren(overScore, note(`F1, precision and recall over the threshold, ${of}; the line is the slider.`));
  drawnCurves = { label: state.label, overRecall, overScore };
}

function drawCurves() {
  if (drawnCurves.label !== state.label) buildCurves();
  const now = figuresAt(chosen(), state.threshold);
  mark(drawnCurves.overRecall, now.recall, now.precision);
  mark(drawnCurves.overScore, state.threshold / STEPS);
}

const headOf = (names) => element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));

function drawSizes() {
  const rows = SIZES.map((name, size) => {
    const objects = sum(chosen().map((label) => ofSize[3 * label + size]));
    const found = sum(chosen().map((label) => rightOfSize[3 * label + size][state.threshold]));
    const open = () => show("size", size);
    const missed = objects - found || "0";
    const label = `${missed} ${name} objects missed: open`;
    const button = element("button", { type: "button", onclick: open, "aria-label": label }, missed);
    const cells = [objects, found, missed === "0" ? "0" : button, three(found / objects)].map((value) => element("td", {}, value));
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  });
  byId("sizes").replaceChildren(headOf(["size", "objects", "found", "missed", "recall"]), element("tbody", {}, ...rows));
}

function buildMatrix() {
  const labels = matching().sort((a, b) => numObjects[b] - numObjects[a]).slice(0, MOST_IN_MATRIX).sort((a, b) => a - b);
  const some = `${labels.length} of ${CLASSES}: those that the search finds, at most ${MOST_IN_MATRIX}.`;
  byId("left-out").textContent = labels.length < K ? some : "";
  cells = [];
  const columns = [...labels, BACKGROUND];
  const names = columns.map((column) => (column === BACKGROUND ? "missed" : className(column)));
  const heads = names.map((name) => element("th", { scope: "col" }, element("span", {}, name)));
  const rows = columns.map((row) => {
    const made = element("tr", {}, element("th", { scope: "row" }, row === BACKGROUND ? "on no object" : className(row)));
    for (const column of columns) {
      const cell = element("td");
      if (row !== BACKGROUND || column !== BACKGROUND) {
        const button = element("button", { type: "button", onclick: () => show("cell", row, column) });
        cell.append(button);
        cells.push({ row, column, button, cell });
      }
      made.append(cell);
    }
    return made;
  });
  const head = element("thead", {}, element("tr", {}, element("td"), ...heads));
  byId("confusion").replaceChildren(head, element("tbody", {}, ...rows));
}

function drawMatrix() {
  const totals = new Map();
  for (const one of cells) {
    one.number = cellCount(one.row, one.column, state.threshold);
    totals.set(one.row, (totals.get(one.row) || 0) + one.number);
  }
  for (const { row, column, button, cell, number } of cells) {
    const share = number / (totals.get(row) || 1);
    if (button.textContent !== String(number)) {
      button.textContent = number;
      button.disabled = !number;
      button.setAttribute("aria-label", `${SELECTIONS.cell(null, row, column).title}: ${number}`);
    }
    cell.style.background = number ? `rgb(${row === column ? "20 89 168" : "207 34 46"} / ${0.08 + 0.52 * share})` : "";
  }
}

function drawGallery() {
  const [kind, ...place] = state.kind;
  const selection = SELECTIONS[kind](state.label, ...place);
  const found = select(selection, state.threshold);
  byId("gallery-title").textContent = selection.title;
  byId("worst").hidden = kind === "worst" && state.label === null;
  const only = data.shown.length < data.images ? `, of the ${data.shown.length} that are on this page` : "";
  byId("gallery-note").textContent = found.length ? `${plural(found.length, "image")}${only}` : `No image${only}.`;
  const list = found.map(({ image }) => image);
  const boxesIn = (image) => boxesOf(image, state.threshold, selection.isHit);
  const open = (i) => () => viewer.open(list, i, boxesIn);
  byId("gallery").replaceChildren(...list.slice(0, state.shown).map((image, i) => card(image, boxesIn(image), open(i))));
  byId("more").hidden = found.length <= state.shown;
}

function draw() {
  byId("score").textContent = (state.threshold / STEPS).toFixed(3);
  const { precision, recall, f1 } = figuresAt(chosen(), state.threshold);
  const of = state.label === null ? "all classes" : className(state.label);
  byId("overall").textContent = `${of}: precision ${three(precision)}, recall ${three(recall)}, F1 ${three(f1)}`;
  drawClasses();
  drawCurves();
  drawSizes();
  drawMatrix();
  drawGallery();
}

/** Choose what the gallery shows, and go there unless a class was chosen in its table. */
function show(kind, ...place) {
  Object.assign(state, { kind: [kind, ...place], shown: PAGE });
  draw();
  if (kind !== "worst") {
    byId("gallery-section").scrollIntoView();
    byId("gallery-title").focus({ preventScroll: true });
  }
}

function start() {
  document.title = byId("title").textContent = `Evaluation on ${data.dataset}`;
  const figures = Object.entries(data.figures);
  byId("summary").textContent = `${plural(data.images, "image")}, ${plural(sum([...numObjects]), "object")} of ${CLASSES}.`;
  const values = figures.map(([, value]) => element("td", {}, value === null ? "n/a" : value.toFixed(1)));
  byId("figures").append(headOf(figures.map(([name]) => name)), element("tbody", {}, element("tr", {}, ...values)));
  byId("threshold").value = state.threshold;
  byId("threshold").oninput = (event) => {
    state.threshold = Number(event.target.value);
    draw();
  };
  byId("best").textContent = data.best === null ? "best F1: none" : `Best F1: ${(data.best / STEPS).toFixed(3)}`;
  byId("best").disabled = data.best === null;
  byId("best").onclick = () => {
    state.threshold = byId("threshold").value = data.best;
    draw();
  };
  byId("bar").onsubmit = (event) => event.preventDefault();
  byId("search").oninput = () => {
    buildClasses();
    buildMatrix();
    draw();
  };
  byId("worst").onclick = () => {
    state.label = null;
    show("worst");
  };
  byId("more").onclick = () => {
    state.shown += PAGE;
    drawGallery();
  };
  buildClasses();
  buildMatrix();
  draw();
}
start();
