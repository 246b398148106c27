// An imputation as the server tells it, unfolded: what stood in every frame after every pass.

export class Imputation {
  constructor(told) {
    const { words, ...rest } = told;
    Object.assign(this, rest);
    this.finalWords = words.map((word) => ({ ...word, frame: Math.floor(word.start / told.frame_seconds + 1e-6), open: false, final: true }));
    this.states = [{ symbols: Array(told.frames).fill(told.mask), confidence: new Float32Array(told.frames) }];
    this.fresh = [new Set()];
    for (const pass of told.passes) {
      const last = this.states.at(-1);
      const symbols = last.symbols.slice();
      const confidence = last.confidence.slice();
      pass.frames.forEach((frame, n) => {
        symbols[frame] = pass.symbols[n];
        confidence[frame] = pass.confidence[n];
      });
      this.states.push({ symbols, confidence });
      this.fresh.push(new Set(pass.frames));
    }
    this.starts = new Set(told.block_starts);
    this.mel = { ...told.pictures.mel, data: bytes(told.pictures.mel.data) };
    this.peaks = { ...told.pictures.peaks, data: bytes(told.pictures.peaks.data) };
  }

  get passCount() {
    return this.passes.length;
  }

  filled(pass) {
    return this.states[pass].symbols.reduce((sum, symbol) => sum + (symbol !== this.mask), 0);
  }

  // The words that can be read so far. A word is open while a frame inside it, or up to the next, is masked.
  words(pass) {
    if (pass === this.passCount) return this.finalWords;
    const { symbols, confidence } = this.states[pass];
    const found = [];
    let open = true; // whether something is masked since the last token
    let before = null;
    symbols.forEach((symbol, frame) => {
      const repeats = this.merge_repeats && symbol === before;
      before = symbol;
      if (symbol === this.mask) {
        open = true;
        if (found.length) found.at(-1).open = true;
        return;
      }
      if (symbol === this.blank || repeats) return;
      const starts = symbol.startsWith("▁");
      const text = symbol.replaceAll("▁", "");
      if (starts || !found.length || open) {
        found.push({ text: starts ? text : `…${text}`, frame, start: frame * this.frame_seconds, open: false, confidence: confidence[frame] });
      } else {
        found.at(-1).text += text;
        found.at(-1).confidence = Math.min(found.at(-1).confidence, confidence[frame]);
      }
      open = false;
    });
    return found
      .filter((word) => word.text && word.text !== "…")
      .map((word) => ({ ...word, text: word.open ? `${word.text}…` : word.text }));
  }

  textAt(pass) {
    return this.words(pass).map((word) => word.text).join(" ");
  }
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

// Which words of two texts differ: longest common subsequence, word by word.
export function compare(ours, theirs) {
  const table = Array.from({ length: ours.length + 1 }, () => new Uint16Array(theirs.length + 1));
  for (let i = ours.length - 1; i >= 0; i--) {
    for (let j = theirs.length - 1; j >= 0; j--) {
      table[i][j] = ours[i] === theirs[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const same = [new Set(), new Set()];
  let i = 0;
  let j = 0;
  while (i < ours.length && j < theirs.length) {
    if (ours[i] === theirs[j]) {
      same[0].add(i++);
      same[1].add(j++);
    } else if (table[i + 1][j] >= table[i][j + 1]) i++;
    else j++;
  }
  return same;
}
