// SPDX-License-Identifier: Apache-2.0
// A film or the camera on the page: the frame on the screen is asked about, and the next one when its boxes are there.
"use strict";

class Film {
  /**
   * ask(frame): fills in a frame {name, file, results}, and gives what went wrong, or null; show(frame); say(name, text): a message.
   */
  constructor(ask, show, say) {
    Object.assign(this, { ask, show, say, name: "", turn: 0, video: byId("video") });
    this.video.onerror = () => this.name && this.fail("this browser cannot play it; cpvt-det predict --input reads most films");
    byId("close").onclick = () => this.close();
  }

  openFile(file, name) {
    this.open(name);
    this.video.src = URL.createObjectURL(file);
    this.video.controls = true;
    this.run();
  }

  async openCamera() {
    this.open("camera");
    const { turn } = this;
    try {
      if (!navigator.mediaDevices) throw new Error("a browser gives it to pages of localhost and of https alone");
      const stream = await navigator.mediaDevices.getUserMedia({ video: true });
      if (turn !== this.turn) return stream.getTracks().forEach((track) => track.stop()); // closed while the user was asked
      this.video.srcObject = stream;
      this.video.controls = false;
      this.run();
    } catch (error) {
      if (turn === this.turn) this.fail(error.message);
    }
  }

  open(name) {
    this.close();
    this.name = name;
    byId("player").hidden = false;
  }

  /** Let go of the film, or the camera, whose light goes out. The last frame stays on the page. */
  close() {
    const { video } = this;
    this.turn++;
    this.name = "";
    byId("player").hidden = true;
    video.srcObject?.getTracks().forEach((track) => track.stop());
    if (video.src) URL.revokeObjectURL(video.src);
    video.srcObject = null;
    video.removeAttribute("src");
    video.load();
  }

  fail(text) {
    this.say(this.name, text);
    this.close();
  }

  async run() {
    const { video, turn } = this;
    let [last, shown, wake] = [null, null, () => {}]; // times of frames: that was asked about, and that is on the screen
    const note = (_, { mediaTime }) => {
      if (turn !== this.turn) return;
      shown = mediaTime;
      wake();
      video.requestVideoFrameCallback(note);
    };
    video.requestVideoFrameCallback(note);
    try {
      await video.play();
      if (turn === this.turn && !video.videoWidth) this.fail("it has no pictures");
      while (turn === this.turn) {
        while (shown === last) await new Promise((resolve) => (wake = resolve)); // paused, or at its end
        last = shown;
        const frame = { name: `${this.name} at ${last.toFixed(1)} s`, file: await grab(video), results: [] };
        const why = await this.ask(frame);
        if (turn !== this.turn) return;
        if (why === null) this.show(frame);
        else this.fail(why);
      }
    } catch (error) {
      if (turn === this.turn && !video.error) this.fail(error.message); // onerror has said it in better words
    }
  }
}

/** The pixels of a video's frame as a JPEG. */
function grab(video) {
  const canvas = element("canvas", { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
}
