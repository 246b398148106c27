// The whole recording at a glance, above a timeline that is longer than the window: loudness, what is filled in,
// and which part the timeline shows. Press or drag to go there.

import { onColours, palette, sure } from "./colours.js";

const WAVE = 30; // pixels
const FILLED = 8;
const GAP = 4;

export class Overview {
  constructor({ canvas, onSeek }) {
    Object.assign(this, { canvas, onSeek });
    this.picture = null; // all but what moves
    onColours(() => (this.picture = null));
    new ResizeObserver(() => (this.picture = null)).observe(canvas);
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.seek(event);
    });
    canvas.addEventListener("pointermove", (event) => event.buttons && this.seek(event));
  }

  show(shown) {
    this.canvas.hidden = !shown;
  }

  changed() {
    this.picture = null;
  }

  seek(event) {
    const box = this.canvas.getBoundingClientRect();
    this.onSeek(Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)));
  }

  draw(imputation, view, pass, cursor) {
    const width = this.canvas.clientWidth;
    if (this.canvas.hidden || !width) return;
    const scale = window.devicePixelRatio || 1;
    const height = WAVE + GAP + FILLED;
    this.picture ??= this.paint(imputation, pass, width, height, scale);
    if (this.canvas.width !== this.picture.width) Object.assign(this.canvas, { width: this.picture.width, height: this.picture.height });
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.picture, 0, 0);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const perFrame = width / imputation.frames;
    pen.strokeStyle = palette().accent;
    pen.lineWidth = 2;
    pen.beginPath();
    const seen = Math.max(6, (view.width / view.cell) * perFrame);
    pen.roundRect(Math.min((view.left / view.cell) * perFrame, width - seen) + 1, 1, seen - 2, height - 2, 4);
    pen.stroke();
    if (cursor === null) return;
    pen.fillStyle = palette().cursor;
    pen.fillRect((cursor / imputation.frame_seconds) * perFrame - 1, 0, 2, height);
  }

  paint(imputation, pass, width, height, scale) {
    const picture = new OffscreenCanvas(Math.round(width * scale), Math.round(height * scale));
    const pen = picture.getContext("2d");
    pen.scale(scale, scale);
    const { frames, peaks, loudest, frame_seconds: seconds } = imputation;
    const columns = (frames * seconds) / (peaks?.column_seconds ?? 1) / width; // of the loudness, per pixel
    for (let x = 0; x < width; x++) {
      const [first, last] = [Math.floor((x / width) * frames), Math.ceil(((x + 1) / width) * frames)];
      if (peaks) {
        const most = largest(peaks.data, x * columns, (x + 1) * columns);
        const half = Math.max(0.5, ((most / loudest) * WAVE) / 2 - 1);
        pen.fillStyle = palette().wave;
        pen.fillRect(x, WAVE / 2 - half, 1, 2 * half);
      }
      let sum = 0;
      let filled = 0;
      for (let frame = first; frame < last; frame++) {
        const entry = imputation.at(frame, pass);
        filled += entry !== null;
        sum += entry?.confidence ?? 0;
      }
      pen.fillStyle = filled ? sure(sum / filled).fill : palette().line;
      pen.globalAlpha = filled ? 0.25 + (0.75 * filled) / (last - first) : 1;
      pen.fillRect(x, WAVE + GAP, 1, FILLED);
      pen.globalAlpha = 1;
    }
    return picture;
  }
}

function largest(data, from, until) {
  let most = 0;
  for (let n = Math.floor(from); n < until && n < data.length; n++) most = Math.max(most, data[n]);
  return most;
}
