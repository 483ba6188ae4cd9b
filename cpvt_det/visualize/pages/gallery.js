// SPDX-License-Identifier: Apache-2.0
// Images of the report with what is right, false and missed at a threshold; the viewer of one image.
"use strict";

const [NOTHING, IGNORED] = [-1, -2]; // in place of the index of an object, as in evaluation/outcomes.py
const SIZES = ["small", "medium", "large"];
const BACKGROUND = data.classes.length;
const className = (label) => (label === BACKGROUND ? "background" : data.classes[label].name);
const parseObject = ([x, y, w, h, label, size, crowd, foundAt]) => ({ box: [x, y, w, h], label, size, crowd, foundAt });
const parseFound = ([x, y, w, h, label, step, same, any]) => ({ box: [x, y, w, h], label, step, same, any });
const images = data.shown.map((one) => ({ ...one, objects: one.objects.map(parseObject), found: one.found.map(parseFound) }));
const anyMatched = new WeakMap(); // image -> per object the step of the detection that takes it, of whatever class
for (const image of images) {
  const steps = image.objects.map(() => -1);
  for (const one of image.found) if (one.any >= 0) steps[one.any] = one.step;
  anyMatched.set(image, steps);
}

/**
 * The boxes of an image at a threshold: [{kind, box, label, step, truth, hit}]; hits are what is looked for.
 * kind: right, false or missed; "taken" for an object that only the confusion matrix counts as missed.
 */
function boxesOf(image, threshold, isHit) {
  const boxes = [];
  for (const one of image.found) {
    if (one.step < threshold) break; // best first
    if (one.same === IGNORED) continue;
    const truth = one.any >= 0 ? image.objects[one.any].label : one.any === NOTHING ? BACKGROUND : null;
    boxes.push({ kind: one.same === NOTHING ? "false" : "right", box: one.box, label: one.label, step: one.step, truth });
  }
  image.objects.forEach((one, i) => {
    if (one.crowd) return;
    const taken = anyMatched.get(image)[i] >= threshold;
    const { box, label, size } = one;
    const kind = one.foundAt < threshold ? "missed" : "taken";
    if (kind === "missed" || !taken) boxes.push({ kind, box, label, size, taken });
  });
  for (const one of boxes) one.hit = isHit(one);
  return boxes.filter((one) => one.kind !== "taken" || one.hit);
}

/** What is looked for in the images: {title, isHit(box)}; of a cell the detections in it, or the objects without any. */
const SELECTIONS = {
  worst: (label) => ({
    title: label === null ? "Worst images" : `Worst images of ${className(label)}`,
    isHit: (one) => one.kind !== "right" && one.kind !== "taken" && (label === null || one.label === label),
  }),
  size: (label, size) => ({
    title: `Missed ${SIZES[size]} objects${label === null ? "" : ` of ${className(label)}`}`,
    isHit: (one) => one.kind === "missed" && one.size === size && (label === null || one.label === label),
  }),
  cell: (_, row, column) => ({
    title: column === BACKGROUND ? `${className(row)}: no detection`
      : row === BACKGROUND ? `${className(column)} detected on no object`
      : row === column ? `${className(row)} detected as such` : `${className(row)} detected as ${className(column)}`,
    isHit: (one) => column === BACKGROUND
      ? (one.kind === "missed" || one.kind === "taken") && one.label === row && !one.taken
      : (one.kind === "right" || one.kind === "false") && one.label === column && one.truth === row,
  }),
};

/** The embedded images with hits, most first: [{image, boxes, hits}]. */
function select(selection, threshold) {
  const found = images.map((image) => ({ image, boxes: boxesOf(image, threshold, selection.isHit) }));
  for (const one of found) one.hits = one.boxes.filter(({ hit }) => hit).length;
  return found.filter(({ hits }) => hits).sort((a, b) => b.hits - a.hits || a.image.id - b.image.id);
}

function textOf({ kind, label, step, truth }) {
  if (kind === "missed" || kind === "taken") return className(label);
  const is = kind === "false" && truth !== null && truth !== label && truth !== BACKGROUND ? `, is ${className(truth)}` : "";
  return `${className(label)} ${(step / 1000).toFixed(2)}${is}`;
}

const count = (boxes, kind) => boxes.filter((one) => one.kind === kind).length;
const summary = (boxes) => `${count(boxes, "missed")} missed, ${count(boxes, "false")} false, ${count(boxes, "right")} right`;

const pixels = new WeakMap(); // image -> its element in the gallery: a new one would flicker under the slider

/** The image with boxes over it. named(box): whether its text is written. */
function stage(image, boxes, named, picture) {
  const made = element("div", { class: "stage" }, picture);
  picture.alt = `${baseName(image.name)}: ${summary(boxes)}`;
  made.style.setProperty("--aspect", image.size[0] / image.size[1]);
  const order = [...boxes].sort((a, b) => a.hit - b.hit);
  for (const one of order) {
    const kind = one.kind === "taken" ? "missed" : one.kind;
    const attributes = { class: `box ${kind}${one.hit ? "" : " faint"}` };
    made.append(placeBox("div", one.box, image.size, attributes, named(one) && textOf(one)));
  }
  return made;
}

/** A card of the gallery, which opens the viewer. */
function card({ image, boxes }, open) {
  const made = element("figure", { class: "card" });
  const button = element("button", { type: "button", onclick: open, "aria-label": `Open ${baseName(image.name)}` });
  if (!pixels.has(image)) pixels.set(image, element("img", { src: image.src }));
  button.append(stage(image, boxes, (one) => one.hit && boxes.length < 40, pixels.get(image)));
  made.append(button, element("figcaption", {}, `${baseName(image.name)} (id ${image.id}): ${summary(boxes)}`));
  return made;
}

/** The dialog of one image after another. */
const viewer = {
  list: [],
  place: 0,
  open(list, place) {
    Object.assign(this, { list, place });
    this.draw();
    byId("viewer").showModal();
  },
  draw() {
    const { image, boxes } = this.list[this.place];
    const shown = boxes.filter(({ kind }) => byId(`show-${kind === "taken" ? "missed" : kind}`).checked);
    byId("viewer-title").textContent = `${baseName(image.name)} (${this.place + 1} of ${this.list.length})`;
    byId("viewer-image").replaceChildren(stage(image, shown, () => true, element("img", { src: image.src })));
    const words = { right: "right", false: "false", missed: "missed", taken: "no detection left" };
    byId("viewer-list").replaceChildren(...shown.map((one) => element("li", {}, `${words[one.kind]}: ${textOf(one)}`)));
    byId("previous").disabled = this.place === 0;
    byId("next").disabled = this.place === this.list.length - 1;
  },
  move(step) {
    this.place = Math.min(Math.max(this.place + step, 0), this.list.length - 1);
    this.draw();
  },
};
byId("previous").onclick = () => viewer.move(-1);
byId("next").onclick = () => viewer.move(1);
byId("close").onclick = () => byId("viewer").close();
for (const kind of ["right", "false", "missed"]) byId(`show-${kind}`).onchange = () => viewer.draw();
byId("viewer").onkeydown = (event) => {
  if (event.key === "ArrowLeft") viewer.move(-1);
  if (event.key === "ArrowRight") viewer.move(1);
};
