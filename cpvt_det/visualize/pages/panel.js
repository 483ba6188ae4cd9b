// SPDX-License-Identifier: Apache-2.0
// The panel of one model: an image with its boxes, the threshold, the classes, and where the decoder looked for a box.
"use strict";

const MANY_CLASSES = 12; // from here on they can be searched

class Panel {
  /** ask(path, image) -> the server's answer; all(): the images with results, for the download. */
  constructor(model, index, ask, all) {
    Object.assign(this, { model, index, ask, all, off: new Set(), image: null, boxes: [], look: null });
    this.parts = this.build();
    this.setThreshold(Math.floor(1000 * model.threshold));
  }

  build() {
    const { model, index } = this;
    const slider = element("input", { type: "range", min: 0, max: 1000, step: 1, id: `threshold-${index}` });
    slider.oninput = () => this.setThreshold(Number(slider.value));
    const output = element("output", { for: slider.id });
    const download = element("button", { type: "button", onclick: () => this.download() }, "Download COCO JSON");
    const bar = element("div", { class: "bar" }, element("label", { for: slider.id }, "Score from"), slider, output, download);
    const stage = element("div", { class: "stage", hidden: true });
    const status = element("p", { role: "status", class: "count" });
    const look = element("div", { class: "looked", hidden: true });
    const classes = element("fieldset", { class: "classes", hidden: true }, element("legend", {}, "Classes"));
    const panel = element("section", { class: "panel", "aria-label": model.name }, element("h2", {}, model.name), bar);
    const side = element("div", {}, look, classes);
    panel.append(status, element("div", { class: "body" }, element("div", {}, stage), side));
    this.switches = model.classes.map(({ name, color }, label) => {
      const box = element("input", { type: "checkbox", checked: true, onchange: () => this.switchClasses([label], box.checked) });
      const count = element("span", { class: "number" });
      const swatch = element("span", { class: "swatch" });
      swatch.style.borderColor = color;
      return Object.assign(element("label", {}, box, swatch, ` ${name} `, count), { box, count, words: name.toLowerCase() });
    });
    const every = model.classes.map((_, label) => label);
    const button = (text, on) => element("button", { type: "button", onclick: () => this.switchClasses(every, on) }, text);
    const search = element("input", { type: "search", "aria-label": "Search classes", placeholder: "search", autocomplete: "off" });
    search.oninput = () => {
      const words = search.value.trim().toLowerCase();
      for (const one of this.switches) one.hidden = !one.words.includes(words);
    };
    search.hidden = model.classes.length < MANY_CLASSES;
    classes.append(element("p", { class: "bar" }, button("all", true), button("none", false), search), ...this.switches);
    return { panel, slider, output, stage, status, look, classes, download };
  }

  setThreshold(step) {
    this.step = step;
    this.parts.slider.value = step;
    this.parts.output.textContent = (step / 1000).toFixed(3);
    this.draw();
  }

  switchClasses(labels, on) {
    for (const label of labels) {
      if (on) this.off.delete(label);
      else this.off.add(label);
      this.switches[label].box.checked = on;
    }
    this.draw();
  }

  passes([, , , , score, label]) {
    return score >= this.step / 1000 && !this.off.has(label);
  }

  /** Show an image with its result: {boxes, seconds} or {error}. */
  show(image) {
    this.image = image;
    this.closeLook();
    const { stage, classes } = this.parts;
    const result = image.results[this.index];
    stage.hidden = classes.hidden = !result || result.error !== undefined;
    this.boxes = [];
    if (!stage.hidden) {
      stage.style.setProperty("--aspect", image.size[0] / image.size[1]);
      this.boxes = result.boxes.map((box) => ({ box, shown: this.makeBox(box, image) }));
      // Small boxes above large ones, which would take their clicks.
      const area = ({ box }) => box[2] * box[3];
      const order = [...this.boxes].sort((a, b) => area(b) - area(a));
      stage.replaceChildren(element("img", { src: image.src, alt: image.name, decoding: "sync" }), ...order.map(({ shown }) => shown));
    }
    this.draw();
  }

  makeBox(box, image) {
    const { name, color } = this.model.classes[box[5]];
    const text = `${name} ${box[4].toFixed(2)}`;
    const attributes = { type: "button", class: "box", "aria-pressed": "false", "aria-label": `${text}: where the decoder looked` };
    const made = placeBox("button", box.slice(0, 4), image.size, attributes, text);
    made.style.borderColor = color;
    Object.assign(made.firstChild.style, { background: color, color: inkOn(color) });
    made.onclick = () => this.openLook(box, made, text);
    return made;
  }

  /** Show the boxes that pass, and count them; nothing is asked of the server. */
  draw() {
    const counts = new Map();
    for (const { box, shown } of this.boxes) {
      shown.hidden = !this.passes(box);
      if (box[4] >= this.step / 1000) counts.set(box[5], (counts.get(box[5]) || 0) + 1);
    }
    this.switches.forEach((one, label) => (one.count.textContent = counts.get(label) || ""));
    const result = this.image && this.image.results[this.index];
    this.parts.download.disabled = !result || result.error !== undefined;
    this.parts.status.textContent = result ? this.describe(result) : this.image ? "waiting" : "";
  }

  describe(result) {
    if (result.error !== undefined) return "";
    const shown = this.boxes.filter(({ box }) => this.passes(box)).length;
    const best = result.boxes[0];
    const none = !shown && best && best[4] < this.step / 1000
      ? `; the best score is ${best[4].toFixed(3)}, ${this.model.classes[best[5]].name}: move the slider left` : "";
    return `${shown} of ${plural(result.boxes.length, "detection")}${none}. ${result.seconds.toFixed(2)} s`;
  }

  async openLook(box, button, text) {
    const again = this.look && this.look.button === button;
    this.closeLook();
    if (again) return;
    button.setAttribute("aria-pressed", "true");
    this.look = { button, text };
    const { look } = this.parts;
    look.hidden = false;
    look.replaceChildren("…");
    const wanted = this.look;
    const answer = await this.ask(`/look?model=${this.index}&query=${box[6]}`, this.image);
    if (this.look !== wanted) return; // another box, or image, by now
    if (answer.error !== undefined) look.replaceChildren(answer.error);
    else this.drawLook(answer, answer.layers.length - 1);
  }

  drawLook(answer, layer) {
    const { stage, look } = this.parts;
    stage.classList.add("looking");
    stage.querySelector(".look")?.remove();
    stage.append((answer.kind === "heat" ? drawHeat : drawPoints)(answer.layers[layer], this.image.size));
    const id = `layer-${this.index}`;
    const kept = look.querySelector("input");
    const said = describeLook(answer, answer.layers[layer]);
    const shares = typeof said === "string" ? [said] : said.map(({ color, stride, share }) => {
      const swatch = element("span", { class: "dot" });
      swatch.style.background = color;
      return element("span", {}, swatch, ` stride ${stride}: ${(100 * share).toFixed(0)} % `);
    });
    const words = element("p", { class: "note", role: "status" }, ...shares);
    if (kept) {
      look.querySelector("output").textContent = layer;
      look.querySelector(".note").replaceWith(words);
      return;
    }
    const slider = element("input", { type: "range", min: 0, max: answer.layers.length - 1, step: 1, id });
    slider.value = layer;
    slider.oninput = () => this.drawLook(answer, Number(slider.value));
    const title = answer.kind === "heat" ? "Where the decoder looked for" : "Where the decoder sampled for";
    const close = element("button", { type: "button", onclick: () => this.closeLook(true) }, "Close");
    const output = element("output", { for: id }, layer);
    const bar = element("div", { class: "bar" }, element("label", { for: id }, "decoder layer"), slider, output, close);
    look.replaceChildren(element("p", {}, `${title} ${this.look.text}`), bar, words);
  }

  closeLook(focus = false) {
    if (!this.look) return;
    const { stage, look } = this.parts;
    this.look.button.setAttribute("aria-pressed", "false");
    if (focus) this.look.button.focus();
    this.look = null;
    stage.classList.remove("looking");
    stage.querySelector(".look")?.remove();
    look.hidden = true;
    look.replaceChildren();
  }

  /** A COCO data set of what passes in all images: boxes as annotations with a score, ids from 1. */
  coco() {
    const categories = this.model.classes.map(({ id, name }) => ({ id, name }));
    const done = this.all().filter(({ results }) => results[this.index] && !results[this.index].error);
    const images = done.map(({ name, size }, i) => ({ id: i + 1, file_name: name, width: size[0], height: size[1] }));
    const annotations = [];
    done.forEach(({ results }, i) => {
      for (const [x, y, w, h, score, label] of results[this.index].boxes.filter((box) => this.passes(box))) {
        const whose = { id: annotations.length + 1, image_id: i + 1, category_id: categories[label].id };
        annotations.push({ ...whose, bbox: [x, y, w, h], area: w * h, iscrowd: 0, segmentation: [], score });
      }
    });
    return { images, annotations, categories };
  }

  download() {
    const file = new Blob([JSON.stringify(this.coco())], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(file), download: "detections.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}
