// An imputation: which symbol each frame got in which pass. It grows while the server writes and is replaced when done.

export const NOW = Infinity; // as a pass: the latest state

export class Imputation {
  // Before the first pass, from the server's outline.
  constructor(outline) {
    Object.assign(this, outline);
    this.done = false;
    this.passCount = outline.block_size;
    this.history = []; // frame -> [{pass, symbol, confidence}, ...] in order of passes
    this.filledNow = 0;
    this.fresh = new Set(); // frames of the last pass received
    this.starts = new Set(outline.windows.flatMap((window) => blockStarts(window, outline.block_size)));
    this.sections = evenSections(outline.seconds);
    this.place = null; // {window, pass} that was written last
  }

  addPictures({ mel, peaks }) {
    this.mel = { ...mel, data: bytes(mel.data) };
    this.peaks = { ...peaks, data: bytes(peaks.data) };
    this.loudest = this.peaks.data.reduce((a, b) => Math.max(a, b), 24);
  }

  // A pass over a window. Of an overlap each window shows its half; where they really meet is known at the end.
  addPass({ window: number, pass, frames, symbols, confidence }) {
    const { first } = this.windows[number];
    const [from, until] = this.share(number);
    this.fresh = new Set();
    this.place = { window: number, pass };
    frames.forEach((inside, n) => {
      const frame = first + inside;
      if (frame < from || frame >= until) return;
      this.write(frame, pass, symbols[n], confidence[n]);
      this.fresh.add(frame);
      this.frames = Math.max(this.frames, frame + 1);
    });
    this.memo = null;
  }

  share(number) {
    const half = (window, next) => Math.floor((next.first + window.first + window.frames) / 2);
    const { [number - 1]: left, [number]: here, [number + 1]: right } = this.windows;
    return [left ? half(left, here) : 0, right ? half(here, right) : Infinity];
  }

  // All of it, from the server's last event.
  finish(told) {
    const { words, passes, block_starts: starts, ...rest } = told;
    Object.assign(this, rest);
    this.history = [];
    this.filledNow = 0;
    this.fresh = new Set();
    this.place = null;
    this.memo = null;
    this.passCount = passes.length;
    this.counts = [0];
    passes.forEach(({ frames, symbols, confidence }, n) => {
      frames.forEach((frame, place) => this.write(frame, n + 1, symbols[place], confidence[place]));
      this.counts.push(this.filledNow);
    });
    this.finalWords = words.map((word) => ({ ...word, frame: Math.floor(word.start / told.frame_seconds + 1e-6), open: false }));
    this.starts = new Set(starts);
    this.sections = pauseSections(this.finalWords, told.seconds);
    this.done = true;
  }

  write(frame, pass, symbol, confidence) {
    const before = this.at(frame, NOW) !== null;
    (this.history[frame] ??= []).push({ pass, symbol, confidence });
    this.filledNow += (symbol !== this.mask) - before;
  }

  // What stands in a frame after a pass, or null while it is masked.
  at(frame, pass) {
    const entries = this.history[frame];
    if (!entries) return null;
    let n = entries.length - 1;
    while (n >= 0 && entries[n].pass > pass) n--;
    return n < 0 || entries[n].symbol === this.mask ? null : entries[n];
  }

  isFresh(frame, pass) {
    return pass === NOW ? this.fresh.has(frame) : this.at(frame, pass)?.pass === pass;
  }

  filled(pass) {
    return pass === NOW ? this.filledNow : this.counts[pass];
  }

  // The words that can be read after a pass. A word is open while a frame in it, or before the next, is masked.
  words(pass) {
    if (this.done && pass >= this.passCount) return this.finalWords;
    if (this.memo?.pass !== pass) this.memo = { pass, words: this.read(pass) };
    return this.memo.words;
  }

  read(pass) {
    const found = [];
    let gap = true; // something is masked since the last token
    let before = null;
    for (let frame = 0; frame < this.frames; frame++) {
      const entry = this.at(frame, pass);
      const symbol = entry?.symbol ?? null;
      const repeats = this.merge_repeats && symbol === before;
      before = symbol;
      if (symbol === null) {
        gap = true;
        if (found.length) found.at(-1).open = true;
        continue;
      }
      if (symbol === this.blank || repeats) continue;
      const starts = symbol.startsWith("▁");
      const text = symbol.replaceAll("▁", "");
      if (starts || !found.length || gap) {
        const start = frame * this.frame_seconds;
        found.push({ text: starts ? text : `…${text}`, frame, start, end: start, open: false, confidence: entry.confidence });
      } else {
        found.at(-1).text += text;
        found.at(-1).confidence = Math.min(found.at(-1).confidence, entry.confidence);
      }
      found.at(-1).end = (frame + 1) * this.frame_seconds;
      gap = false;
    }
    return found.filter(({ text }) => text && text !== "…").map((word) => (word.open ? { ...word, text: `${word.text}…` } : word));
  }

  symbols(pass) {
    return Array.from({ length: this.frames }, (_, frame) => this.at(frame, pass)?.symbol ?? this.mask);
  }
}

function blockStarts({ first, frames }, size) {
  return Array.from({ length: Math.ceil(frames / size) }, (_, n) => first + n * size);
}

// Sections of the transcript, as the seconds at which they start: every half minute while writing ...

const SECTION_SECONDS = 30;

export function evenSections(seconds) {
  const count = Math.max(1, Math.round(seconds / SECTION_SECONDS));
  return Array.from({ length: count }, (_, n) => n * SECTION_SECONDS);
}

// ... and afterwards at the longest pause near each of those times.
function pauseSections(words, seconds) {
  const [first, ...others] = evenSections(seconds);
  const moved = others.map((time) => {
    let best = { pause: -1, start: time };
    words.forEach((word, n) => {
      if (n === 0 || Math.abs(word.start - time) > SECTION_SECONDS / 4) return;
      const pause = word.start - words[n - 1].end;
      if (pause > best.pause) best = { pause, start: word.start };
    });
    return best.start;
  });
  return [first, ...moved];
}

function bytes(base64) {
  const text = atob(base64);
  const found = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) found[n] = text.charCodeAt(n);
  return found;
}
