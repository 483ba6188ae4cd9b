// SPDX-License-Identifier: Apache-2.0
// Images of the report with what is right, false and missed at a threshold; the viewer of one image.
"use strict";

const [NOTHING, IGNORED] = [-1, -2]; // in place of the index of an object, as in evaluation/outcomes.py
const MANY = 40; // boxes
const SIZES = ["small", "medium", "large"];
const BACKGROUND = data.classes.length;
const className = (label) => (label === BACKGROUND ? "background" : data.classes[label].name);
const images = data.shown.map(parseImage);

/**
 * An image with its boxes. A detection has kind "right", "false" or "uncounted" (in a crowd of its class, or beyond the detections
 * that COCO counts of a class; the confusion matrix, of any class, may count it), its step, and truth: the class of the object that
 * it lies on, BACKGROUND for none, null in a crowd. An object has foundAt, the step of the detection of its class that finds it, and takenAt,
 * that of the detection of any class that the confusion matrix pairs it with.
 */
function parseImage({ id, name, size, src, objects, found }) {
  const takenAt = objects.map(() => -1);
  for (const [, , , , , step, , any] of found) if (any >= 0) takenAt[any] = step;
  const detections = found.map(([x, y, w, h, label, step, same, any]) => ({
    box: [x, y, w, h], label, step, kind: same === NOTHING ? "false" : same === IGNORED ? "uncounted" : "right",
    truth: any >= 0 ? objects[any][4] : any === NOTHING ? BACKGROUND : null,
  }));
  const parsed = objects.map(([x, y, w, h, label, size, crowd, foundAt], i) => ({
    box: [x, y, w, h], label, size, crowd, foundAt, takenAt: takenAt[i],
  }));
  return { id, name, size, src, detections, objects: parsed.filter(({ crowd }) => !crowd) };
}

/**
 * Call visit(box, kind, hit) for the boxes of an image at a threshold: its detections, and its objects, which are "missed" or
 * "found". Hits are what is looked for: isHit(box, kind, threshold).
 */
function visitBoxes(image, threshold, isHit, visit) {
  for (const one of image.detections) {
    if (one.step < threshold) break; // best first
    visit(one, one.kind, isHit(one, one.kind, threshold));
  }
  for (const one of image.objects) {
    const kind = one.foundAt < threshold ? "missed" : "found";
    visit(one, kind, isHit(one, kind, threshold));
  }
}

/** The boxes to draw: [{box, label, kind, hit, ...}]; of objects that are found, and of detections that do not count, only hits. */
function boxesOf(image, threshold, isHit) {
  const boxes = [];
  visitBoxes(image, threshold, isHit, (one, kind, hit) => {
    if ((kind !== "found" && kind !== "uncounted") || hit) boxes.push({ ...one, kind, hit });
  });
  return boxes;
}

/** What is looked for in the images: {title, isHit}; of a cell the detections in it, or the objects without any. */
const SELECTIONS = {
  worst: (label) => ({
    title: label === null ? "Worst images" : `Worst images of ${className(label)}`,
    isHit: (one, kind) => (kind === "false" || kind === "missed") && (label === null || one.label === label),
  }),
  size: (label, size) => ({
    title: `Missed ${SIZES[size]} objects${label === null ? "" : ` of ${className(label)}`}`,
    isHit: (one, kind) => kind === "missed" && one.size === size && (label === null || one.label === label),
  }),
  cell: (_, row, column) => ({
    title: column === BACKGROUND ? `${className(row)}: no detection`
      : row === BACKGROUND ? `${className(column)} detected on no object`
      : row === column ? `${className(row)} detected as such` : `${className(row)} detected as ${className(column)}`,
    isHit: (one, kind, threshold) => column === BACKGROUND
      ? (kind === "missed" || kind === "found") && one.label === row && one.takenAt < threshold
      : kind !== "missed" && kind !== "found" && one.label === column && one.truth === row,
  }),
};

/** The embedded images with hits, most first: [{image, hits}]. */
function select({ isHit }, threshold) {
  const found = images.map((image) => {
    let hits = 0;
    visitBoxes(image, threshold, isHit, (one, kind, hit) => (hits += hit));
    return { image, hits };
  });
  return found.filter(({ hits }) => hits).sort((a, b) => b.hits - a.hits || a.image.id - b.image.id);
}

function textOf({ kind, label, step, truth }) {
  if (kind === "missed" || kind === "found") return className(label);
  const is = kind !== "right" && truth !== null && truth !== label && truth !== BACKGROUND ? `, is ${className(truth)}` : "";
  return `${className(label)} ${(step / 1000).toFixed(2)}${is}`;
}

/** The kind that a box is drawn as. */
const drawnAs = ({ kind, label, truth }) =>
  kind === "found" ? "missed" : kind !== "uncounted" ? kind : truth === label ? "right" : "false";

const count = (boxes, kind) => boxes.filter((one) => one.kind === kind).length;
const summary = (boxes) => `${count(boxes, "missed")} missed, ${count(boxes, "false")} false, ${count(boxes, "right")} right`;

const pixels = new WeakMap(); // image -> its element in the gallery: a new one would flicker under the slider

/** The image with boxes over it. named(box): whether its text is written. */
function stage(image, boxes, named, picture) {
  const made = element("div", { class: "stage" }, picture);
  picture.alt = image.name;
  made.style.setProperty("--aspect", image.size[0] / image.size[1]);
  const order = [...boxes].sort((a, b) => a.hit - b.hit);
  for (const one of order) {
    const attributes = { class: `box ${drawnAs(one)}${one.hit ? "" : " faint"}` };
    made.append(placeBox("div", one.box, image.size, attributes, named(one) && textOf(one)));
  }
  return made;
}

/** A card of the gallery, which opens the viewer. Of many boxes it has the hits. */
function card(image, boxes, open) {
  const made = element("figure", { class: "card" });
  const button = element("button", { type: "button", onclick: open, "aria-label": `Open ${image.name}` });
  if (!pixels.has(image)) pixels.set(image, element("img", { src: image.src }));
  const drawn = boxes.length < MANY ? boxes : boxes.filter(({ hit }) => hit);
  button.append(stage(image, drawn, (one) => one.hit && drawn.length < MANY, pixels.get(image)));
  made.append(button, element("figcaption", {}, `${image.name} (id ${image.id}): ${summary(boxes)}`));
  return made;
}

/** The dialog of one image after another. */
const viewer = {
  list: [],
  place: 0,
  /** list: images; boxesIn(image): their boxes. */
  open(list, place, boxesIn) {
    Object.assign(this, { list, place, boxesIn });
    this.draw();
    byId("viewer").showModal();
  },
  draw() {
    const image = this.list[this.place];
    const shown = this.boxesIn(image).filter((one) => byId(`show-${drawnAs(one)}`).checked);
    byId("viewer-title").textContent = `${image.name} (${this.place + 1} of ${this.list.length})`;
    byId("viewer-image").replaceChildren(stage(image, shown, () => true, element("img", { src: image.src })));
    const words = { right: "right", false: "false", missed: "missed", found: "no detection left", uncounted: "not counted in its class" };
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
