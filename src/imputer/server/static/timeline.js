// The alignment over time: a strip that scrolls sideways, of which only the visible part is drawn.

import { onColours, percent } from "./colours.js";
import { NOW } from "./imputation.js";
import { WORDS_BOTTOM, heightOf, paint, placeWords } from "./paint.js";

const WIDE_CELL = 22; // pixels per frame
const NARROW_CELL = 18;
const POP_MILLISECONDS = 260;

export class Timeline {
  constructor({ scroller, space, canvas, tip, onWord, onSeek, onView }) {
    Object.assign(this, { scroller, space, canvas, tip, onWord, onSeek, onView });
    this.imputation = null;
    this.pass = 0;
    this.pop = 1; // share of the animation of freshly filled cells
    this.cursor = null; // seconds
    this.greedy = false;
    this.following = true; // until the reader scrolls
    new ResizeObserver(() => this.layout()).observe(scroller);
    onColours(() => this.invalidate());
    scroller.addEventListener("scroll", () => this.invalidate(), { passive: true });
    for (const kind of ["wheel", "pointerdown", "keydown"]) scroller.addEventListener(kind, () => (this.following = false), { passive: true });
    scroller.addEventListener("pointermove", (event) => this.point(event));
    scroller.addEventListener("pointerleave", () => (this.tip.hidden = true));
    scroller.addEventListener("click", (event) => this.click(event));
  }

  show(imputation, pass) {
    this.imputation = imputation;
    this.pass = pass;
    this.pop = 1;
    this.cursor = null;
    this.following = true;
    this.placed = null;
    this.scroller.scrollLeft = 0;
    this.layout();
  }

  clear() {
    this.imputation = null;
    this.tip.hidden = true;
    this.space.style.width = "100%";
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.canvas.setAttribute("aria-label", "Alignment");
  }

  // Go to a pass; the cells it filled grow, if there is to be movement.
  go(pass, animate) {
    this.pass = pass;
    this.placed = null;
    this.began = animate && !matchMedia("(prefers-reduced-motion: reduce)").matches ? performance.now() : null;
    this.pop = this.began === null ? 1 : 0;
    this.invalidate();
  }

  // More of an imputation that is still being written.
  grew() {
    const { place, live, frames } = this.imputation;
    if (place && this.following) this.reveal(this.imputation.share(place.window)[0], 0);
    this.layout();
    if (live && this.following) this.reveal(frames, 1);
    this.go(NOW, true);
  }

  setGreedy(shown) {
    this.greedy = shown;
    this.layout();
  }

  setCursor(seconds) {
    this.cursor = seconds;
    if (seconds !== null && this.following) {
      const x = (seconds / this.imputation.frame_seconds) * this.cell - this.scroller.scrollLeft;
      if (x < 0 || x > 0.85 * this.width) this.reveal(seconds / this.imputation.frame_seconds, 0.15);
    }
    this.invalidate();
  }

  // Scroll so that a frame is at a share of the width.
  reveal(frame, share) {
    this.scroller.scrollLeft = frame * this.cell - share * this.width;
  }

  layout() {
    this.width = this.scroller.clientWidth;
    if (!this.imputation || !this.width) return;
    const { frames } = this.imputation;
    this.cell = Math.max(this.width < 480 ? NARROW_CELL : WIDE_CELL, Math.min(30, this.width / frames));
    this.height = heightOf(this.greedy);
    this.placed = null;
    this.space.style.width = `${Math.max(this.width, Math.ceil(frames * this.cell))}px`;
    this.space.style.height = this.canvas.style.height = `${this.height}px`;
    this.canvas.style.width = `${this.width}px`;
    this.invalidate();
  }

  get overflows() {
    return this.imputation !== null && this.imputation.frames * this.cell > this.width + 1;
  }

  get view() {
    const left = this.scroller.scrollLeft;
    const { frames, frame_seconds: seconds } = this.imputation;
    const first = Math.max(0, Math.floor(left / this.cell));
    const last = Math.min(frames, Math.ceil((left + this.width) / this.cell));
    return { left, width: this.width, cell: this.cell, first, last, from: first * seconds, until: last * seconds };
  }

  // Draw once before the next picture, however often this is called.
  invalidate() {
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      if (this.imputation && this.width) this.draw(now);
    });
  }

  draw(now) {
    if (this.began !== null && this.began !== undefined) {
      this.pop = Math.min(1, Math.max(0, (now - this.began) / POP_MILLISECONDS));
      if (this.pop < 1) this.invalidate();
      else this.began = null;
    }
    const { imputation, pass, pop, cursor, greedy, view } = this;
    this.placed ??= placeWords(imputation.words(pass), this.cell);
    paint(this.pen(), view, imputation, { pass, pop, cursor, greedy, placed: this.placed });
    this.describe(view);
    this.onView(view);
  }

  pen() {
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    return pen;
  }

  describe({ first, last, from, until }) {
    let filled = 0;
    for (let frame = first; frame < last; frame++) filled += this.imputation.at(frame, this.pass) !== null;
    const after = this.pass === NOW ? "" : ` after pass ${this.pass}`;
    const text = `Alignment from ${from.toFixed(1)} to ${until.toFixed(1)} seconds${after}: ${filled} of ${last - first} frames filled`;
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  // What is under the pointer: {frame, word}.
  under(event) {
    if (!this.imputation) return {};
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left + this.scroller.scrollLeft;
    const frame = Math.floor(x / this.cell);
    if (frame < 0 || frame >= this.imputation.frames) return {};
    const onWords = event.clientY - box.top < WORDS_BOTTOM;
    const word = onWords ? this.placed?.find((placed) => x >= placed.x && x <= placed.x + placed.width)?.word : undefined;
    return { frame, word, onWords };
  }

  click(event) {
    const { frame, word, onWords } = this.under(event);
    if (word && !word.open) this.onWord(word);
    else if (frame !== undefined && !onWords) this.onSeek(frame * this.imputation.frame_seconds);
  }

  point(event) {
    const { frame, word, onWords } = this.under(event);
    this.scroller.style.cursor = word && !word.open ? "pointer" : "";
    this.tip.hidden = frame === undefined || (onWords && !word);
    if (this.tip.hidden) return;
    this.tip.textContent = word ? wordText(word) : this.frameText(frame);
    const host = this.tip.offsetParent.getBoundingClientRect();
    const x = Math.min(event.clientX - host.left + 12, host.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(0, x)}px`;
    this.tip.style.top = `${event.clientY - host.top + 18}px`;
  }

  frameText(frame) {
    const { blank, frame_seconds: seconds, greedy } = this.imputation;
    const name = (symbol) => (symbol === blank ? "blank" : `“${symbol.replaceAll("▁", "␣")}”`);
    const entry = this.imputation.at(frame, this.pass);
    const state = entry ? `${name(entry.symbol)}, ${percent(entry.confidence)} sure, pass ${entry.pass}` : "masked";
    const beside = this.greedy && greedy ? ` · greedy ${name(greedy.symbols[frame])}, ${percent(greedy.confidence[frame])}` : "";
    return `${(frame * seconds).toFixed(2)} s · ${state}${beside}`;
  }
}

export function wordText({ start, end, confidence }) {
  return `${start.toFixed(2)} to ${end.toFixed(2)} s, ${percent(confidence)} sure`;
}
