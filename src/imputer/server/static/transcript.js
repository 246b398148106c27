// The transcript: text to select, words to play. One tab stop; arrow keys move between words.

import { onColours, sure } from "./colours.js";
import { clock } from "./clock.js";
import { wordText } from "./timeline.js";

const UNSURE = 0.9; // words below are underlined
const LARGE_UNTIL = 60; // words that are set in large type

export class Transcript {
  constructor({ host, tip, onWord }) {
    Object.assign(this, { host, tip, onWord });
    this.clear();
    onColours(() => this.refresh(this.sections));
    host.addEventListener("click", (event) => this.click(event));
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("focusin", ({ target }) => this.isWord(target) && this.focused(target));
    host.addEventListener("focusout", () => this.hideTip());
    host.addEventListener("pointerover", ({ target }) => (this.isWord(target) ? this.showTip(target) : this.hideTip()));
    host.addEventListener("pointerleave", () => this.hideTip());
    host.addEventListener("scroll", () => this.hideTip(), { passive: true });
    for (const kind of ["wheel", "pointerdown", "keydown"]) host.addEventListener(kind, () => (this.following = false), { passive: true });
  }

  clear() {
    this.sections = [];
    this.words = [];
    this.differing = null;
    this.playing = null;
    this.following = true; // what is being written, until the reader scrolls
    this.host.replaceChildren();
    this.hideTip();
  }

  // The words after a pass. What is in view is written at once, the rest when the browser is idle.
  show(imputation, pass) {
    this.words = imputation.words(pass);
    this.final = imputation.done && pass >= imputation.passCount;
    this.divide(imputation.sections);
    this.host.classList.toggle("long", imputation.sections.length > 1 || this.words.length > LARGE_UNTIL);
    if (!this.words.length) this.writeNothing();
    this.refresh(this.sections.filter((section) => this.assign(section)));
    if (!imputation.done && this.following) this.host.scrollTop = this.host.scrollHeight;
  }

  refresh(stale) {
    const box = this.host.getBoundingClientRect();
    const visible = new Set(
      stale.filter(({ element }) => {
        const { top, bottom } = element.getBoundingClientRect();
        return bottom >= box.top && top <= box.bottom;
      }),
    );
    visible.forEach((section) => this.render(section));
    this.later(stale.filter((section) => !visible.has(section)));
  }

  divide(starts) {
    if (this.sections.length === starts.length && this.sections.every(({ start }, n) => start === starts[n])) return;
    this.sections = starts.map((start, n) => {
      const element = document.createElement("p");
      if (starts.length > 1) element.dataset.time = clock(start);
      return { element, start, end: starts[n + 1] ?? Infinity, key: null };
    });
    this.host.replaceChildren(...this.sections.map(({ element }) => element));
  }

  // Which words a section has; whether that changed.
  assign(section) {
    const from = section.start === 0 ? 0 : this.words.findIndex(({ start }) => start >= section.start);
    const until = this.words.findIndex(({ start }) => start >= section.end);
    section.first = from < 0 ? this.words.length : from;
    section.last = until < 0 ? this.words.length : until;
    const key = JSON.stringify(this.words.slice(section.first, section.last).map(({ text, confidence, open }) => [text, confidence, open])) + section.first;
    if (section.key === key) return false;
    section.key = key;
    return true;
  }

  later(sections) {
    cancelIdle(this.idle);
    this.host.setAttribute("aria-busy", String(sections.length > 0));
    if (!sections.length) return;
    this.idle = whenIdle(() => {
      this.render(sections[0]);
      this.later(sections.slice(1));
    });
  }

  render(section) {
    const parts = [];
    for (let n = section.first; n < section.last; n++) parts.push(this.element(n), " ");
    section.element.replaceChildren(...parts);
    section.element.hidden = !parts.length;
    this.rove();
  }

  element(n) {
    const word = this.words[n];
    const element = document.createElement("span");
    element.textContent = word.text;
    if (word.open) {
      element.className = "open";
      return element;
    }
    element.className = "word";
    element.dataset.word = n;
    element.setAttribute("role", "button");
    element.tabIndex = -1;
    if (word.confidence < UNSURE) {
      element.classList.add("unsure");
      element.style.setProperty("--sure", sure(word.confidence).fill);
    }
    element.classList.toggle("differs", this.final && Boolean(this.differing?.has(n)));
    element.classList.toggle("now", n === this.playing);
    return element;
  }

  writeNothing() {
    const nothing = document.createElement("p");
    nothing.className = "nothing";
    nothing.textContent = this.final ? "No words in this recording." : "…";
    this.host.replaceChildren(nothing);
    this.sections = [];
  }

  // Mark the words at these places, or none.
  mark(places) {
    if (places === this.differing) return;
    this.differing = places;
    this.refresh(this.sections);
  }

  // Show which word is being said.
  setTime(seconds) {
    const at = seconds === null ? null : this.words.findLastIndex(({ start }) => start <= seconds + 0.02);
    if (at === this.playing) return;
    this.find(this.playing)?.classList.remove("now");
    this.playing = at;
    const element = this.find(at);
    element?.classList.add("now");
    if (element && !this.host.contains(document.activeElement)) scrollInside(this.host, element);
  }

  find(n) {
    return n === null || n < 0 ? null : this.host.querySelector(`[data-word="${n}"]`);
  }

  // Roving focus.

  isWord(target) {
    return target instanceof Element && target.classList.contains("word");
  }

  elements() {
    return [...this.host.querySelectorAll(".word")];
  }

  rove(chosen = this.host.querySelector(".word[tabindex='0']") ?? this.host.querySelector(".word")) {
    for (const element of this.host.querySelectorAll(".word[tabindex='0']")) if (element !== chosen) element.tabIndex = -1;
    if (chosen) chosen.tabIndex = 0;
  }

  focused(element) {
    this.rove(element);
    this.showTip(element);
  }

  key(event) {
    if (!this.isWord(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = this.elements();
    const at = all.indexOf(event.target);
    const targets = {
      ArrowRight: () => all[at + 1],
      ArrowLeft: () => all[at - 1],
      ArrowDown: () => inNextLine(all, at, 1),
      ArrowUp: () => inNextLine(all, at, -1),
      Home: () => all[0],
      End: () => all.at(-1),
    };
    if (event.key === "Enter" || event.key === " ") this.play(event.target);
    else if (event.key === "Escape") this.hideTip();
    else if (targets[event.key]) targets[event.key]()?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // A double click, and the end of a selection, are about text.
  click(event) {
    if (!this.isWord(event.target) || event.detail > 1 || !getSelection().isCollapsed) return;
    this.play(event.target);
  }

  play(element) {
    this.onWord(this.words[element.dataset.word]);
  }

  showTip(element) {
    const word = this.words[element.dataset.word];
    if (!word) return;
    this.tip.textContent = wordText(word);
    this.tip.hidden = false;
    this.described?.removeAttribute("aria-describedby");
    this.described = element;
    element.setAttribute("aria-describedby", this.tip.id);
    const [box, host] = [element.getBoundingClientRect(), this.tip.offsetParent.getBoundingClientRect()];
    const x = Math.min(box.left - host.left, host.width - this.tip.offsetWidth);
    this.tip.style.left = `${Math.max(0, x)}px`;
    this.tip.style.top = `${box.bottom - host.top + 4}px`;
  }

  hideTip() {
    this.tip.hidden = true;
    this.described?.removeAttribute("aria-describedby");
    this.described = null;
  }
}

// The word of the next line, up or down, that is nearest.
function inNextLine(all, at, direction) {
  const from = all[at].getBoundingClientRect();
  let line = null;
  let best = null;
  for (let n = at + direction; n >= 0 && n < all.length; n += direction) {
    const box = all[n].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < box.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > box.height / 2) break;
    const distance = Math.abs(box.left - from.left);
    if (!best || distance < best.distance) best = { element: all[n], distance };
  }
  return best?.element;
}

// Only the box of the transcript scrolls, never the page.
function scrollInside(host, element) {
  const [outer, inner] = [host.getBoundingClientRect(), element.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) host.scrollTop += inner.top - outer.top - outer.height / 3;
}

const whenIdle = window.requestIdleCallback?.bind(window) ?? ((work) => setTimeout(work, 1)); // Safari has none
const cancelIdle = window.cancelIdleCallback?.bind(window) ?? clearTimeout;
