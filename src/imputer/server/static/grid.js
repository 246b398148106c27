// The picture: rows of time, each with words, waveform, log-mel and the alignment's cells, drawn on canvas.

const LANES = { words: 26, wave: 34, mel: 52, gap: 8, cells: 36, greedy: 22, axis: 18 };
const WIDEST_CELL = 22;
const NARROWEST_CELL = 14;
const POP_MILLISECONDS = 260;
const BLOCKLESS = new Set(["top_k", "annealing", "annealing_random"]);

export class Grid {
  constructor(host, { onWord }) {
    this.host = host;
    this.onWord = onWord;
    this.imputation = null;
    this.pass = 0;
    this.progress = 1; // of the pop of freshly filled cells
    this.cursor = null; // seconds
    this.showGreedy = true;
    this.rows = [];
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const row = this.rows[entry.target.dataset.row];
        if (!row) continue;
        row.visible = entry.isIntersecting;
        if (row.visible) this.draw(row);
      }
    }, { rootMargin: "800px" });
    new ResizeObserver(() => this.layout()).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    host.addEventListener("pointermove", (event) => this.point(event));
    host.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  show(imputation, pass) {
    this.imputation = imputation;
    this.pass = pass;
    this.progress = 1;
    this.width = 0;
    this.layout();
  }

  // Go to a pass; the cells it filled pop in, if there is to be movement.
  go(pass, animate) {
    this.pass = pass;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    cancelAnimationFrame(this.frame);
    this.placeWords(animate && !still);
    if (!animate || still) {
      this.progress = 1;
      this.drawAll();
      return;
    }
    const began = performance.now();
    const tick = (now) => {
      this.progress = Math.min(1, Math.max(0, (now - began) / POP_MILLISECONDS));
      this.drawAll();
      if (this.progress < 1) this.frame = requestAnimationFrame(tick);
    };
    this.progress = 0;
    tick(began);
  }

  setCursor(seconds) {
    const before = this.cursor;
    this.cursor = seconds;
    for (const row of this.rows) {
      if (this.holds(row, seconds) || this.holds(row, before)) this.draw(row);
    }
  }

  holds(row, seconds) {
    return seconds !== null && seconds >= row.start && seconds < row.end;
  }

  setGreedy(shown) {
    this.showGreedy = shown;
    this.width = 0;
    this.layout();
  }

  repaint() {
    this.colours = null;
    this.drawAll();
    this.placeWords(false);
  }

  // Cut time into rows of whole blocks, as wide as there is room.
  layout() {
    const imputation = this.imputation;
    const width = this.host.clientWidth;
    if (!imputation || !width || width === this.width) return;
    this.width = width;
    const target = width < 480 ? NARROWEST_CELL : WIDEST_CELL;
    let perRow = Math.max(1, Math.floor(width / target));
    if (imputation.block_size <= perRow) perRow -= perRow % imputation.block_size;
    perRow = Math.min(perRow, Math.max(imputation.frames, Math.ceil(perRow / 2)));
    this.cell = width / perRow;
    this.perRow = perRow;
    this.seen.disconnect();
    this.rows = [];
    const parts = [];
    for (let first = 0; first < imputation.frames; first += perRow) {
      const element = document.createElement("div");
      element.className = "row";
      element.dataset.row = this.rows.length;
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.style.height = `${this.height}px`;
      const words = document.createElement("div");
      words.className = "row-words";
      element.append(canvas, words);
      parts.push(element);
      const last = Math.min(first + perRow, imputation.frames);
      const seconds = imputation.frame_seconds;
      this.rows.push({ element, canvas, words, first, last, start: first * seconds, end: last * seconds, visible: false });
    }
    this.host.replaceChildren(...parts, this.tip);
    this.rows.forEach((row) => this.seen.observe(row.element));
    this.placeWords(false);
    this.drawAll();
  }

  get height() {
    const greedy = this.showGreedy ? LANES.greedy + 4 : 0;
    return LANES.words + LANES.wave + LANES.mel + LANES.gap + LANES.cells + greedy + LANES.axis;
  }

  drawAll() {
    this.rows.forEach((row) => row.visible && this.draw(row));
    this.rows.forEach((row) => row.canvas.setAttribute("aria-label", this.describe(row)));
  }

  describe(row) {
    const symbols = this.imputation.states[this.pass].symbols.slice(row.first, row.last);
    const filled = symbols.filter((symbol) => symbol !== this.imputation.mask).length;
    return `Alignment from ${row.start.toFixed(1)} to ${row.end.toFixed(1)} seconds after pass ${this.pass}: ${filled} of ${symbols.length} frames filled`;
  }

  palette() {
    if (this.colours) return this.colours;
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    const names = ["card", "soft", "ink", "line", "wave", "mask-line", "mask-fill", "on-token", "fresh", "cursor", "block"];
    const colours = Object.fromEntries(names.map((name) => [name, read(name)]));
    const stops = ["low", "middle", "high"].map((name) => rgb(read(name)));
    colours.sure = Array.from({ length: 65 }, (_, n) => ramp(stops, n / 64));
    const [low, high] = [rgb(read("mel-low")), rgb(read("mel-high"))];
    colours.mel = Array.from({ length: 256 }, (_, n) => mix(low, high, (n / 255) ** 1.7));
    this.colours = colours;
    return colours;
  }

  // Confidence is spread out near certainty, where most of it lies.
  sure(confidence) {
    return this.palette().sure[Math.round(64 * Math.max(0, Math.min(1, confidence)) ** 2)];
  }

  draw(row) {
    const scale = window.devicePixelRatio || 1;
    const width = (row.last - row.first) * this.cell;
    const [pixelWidth, pixelHeight] = [Math.round(this.width * scale), Math.round(this.height * scale)];
    if (row.canvas.width !== pixelWidth || row.canvas.height !== pixelHeight) {
      row.canvas.width = pixelWidth;
      row.canvas.height = pixelHeight;
    }
    const pen = row.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    let top = LANES.words;
    this.drawWave(pen, row, top, width);
    top += LANES.wave;
    this.drawMel(pen, row, top, width);
    top += LANES.mel + LANES.gap;
    this.drawCells(pen, row, top);
    top += LANES.cells + 4;
    if (this.showGreedy) {
      this.drawGreedy(pen, row, top);
      top += LANES.greedy;
    }
    this.drawAxis(pen, row, top, width);
    if (this.holds(row, this.cursor)) {
      pen.fillStyle = this.palette().cursor;
      pen.fillRect(((this.cursor - row.start) / this.imputation.frame_seconds) * this.cell - 1, LANES.words, 2, this.height - LANES.words - LANES.axis);
    }
  }

  drawWave(pen, row, top, width) {
    const { data, column_seconds: step } = this.imputation.peaks;
    const loudest = (this.loudest ??= new WeakMap());
    if (!loudest.has(data)) loudest.set(data, Math.max(24, data.reduce((a, b) => Math.max(a, b), 0)));
    const most = loudest.get(data);
    const middle = top + LANES.wave / 2;
    pen.fillStyle = this.palette().wave;
    const bar = 2;
    for (let x = 0; x < width; x += bar) {
      const from = row.start + (x / this.cell) * this.imputation.frame_seconds;
      const until = row.start + ((x + bar) / this.cell) * this.imputation.frame_seconds;
      let peak = 0;
      for (let n = Math.floor(from / step); n < Math.max(until / step, Math.floor(from / step) + 1) && n < data.length; n++) peak = Math.max(peak, data[n]);
      const half = Math.max(0.5, (peak / most) * (LANES.wave / 2 - 2));
      pen.fillRect(x, middle - half, bar - 0.6, 2 * half);
    }
  }

  drawMel(pen, row, top, width) {
    const { data, columns, bins, column_seconds: step } = this.imputation.mel;
    const first = Math.floor(row.start / step);
    const last = Math.min(columns, Math.ceil(row.end / step));
    if (last <= first) return;
    const picture = new ImageData(last - first, bins);
    const colours = this.palette().mel;
    for (let bin = 0; bin < bins; bin++) {
      for (let column = first; column < last; column++) {
        const [red, green, blue] = colours[data[bin * columns + column]];
        const at = 4 * ((bins - 1 - bin) * (last - first) + column - first);
        picture.data[at] = red;
        picture.data[at + 1] = green;
        picture.data[at + 2] = blue;
        picture.data[at + 3] = 255;
      }
    }
    const paper = new OffscreenCanvas(last - first, bins);
    paper.getContext("2d").putImageData(picture, 0, 0);
    const perSecond = this.cell / this.imputation.frame_seconds;
    pen.save();
    pen.beginPath();
    pen.roundRect(0, top, width, LANES.mel, 5);
    pen.clip();
    pen.imageSmoothingEnabled = true;
    pen.drawImage(paper, (first * step - row.start) * perSecond, top, (last - first) * step * perSecond, LANES.mel);
    pen.restore();
  }

  drawCells(pen, row, top) {
    const { mask, blank, starts, strategy } = this.imputation;
    const { symbols, confidence } = this.imputation.states[this.pass];
    const fresh = this.imputation.fresh[this.pass];
    const colours = this.palette();
    const labels = [];
    if (!BLOCKLESS.has(strategy)) this.drawBlocks(pen, row, top);
    for (let frame = row.first; frame < row.last; frame++) {
      const begins = starts.has(frame) && !BLOCKLESS.has(strategy);
      const inset = begins && frame > row.first ? 4 : 1.5;
      const x = (frame - row.first) * this.cell + inset;
      const width = this.cell - inset - 1.5;
      const symbol = symbols[frame];
      const isFresh = fresh.has(frame);
      if (symbol === mask || (isFresh && this.progress < 1)) {
        pen.globalAlpha = symbol === mask ? 1 : 1 - this.progress;
        pen.fillStyle = colours["mask-fill"];
        pen.strokeStyle = colours["mask-line"];
        pen.setLineDash([2, 2]);
        pen.lineWidth = 1;
        pen.beginPath();
        pen.roundRect(x + 0.5, top + 0.5, width - 1, LANES.cells - 1, 4);
        pen.fill();
        pen.stroke();
        pen.setLineDash([]);
        pen.globalAlpha = 1;
      }
      if (symbol === mask) continue;
      const grown = isFresh ? ease(this.progress) : 1;
      pen.fillStyle = this.sure(confidence[frame]);
      const centre = [x + width / 2, top + LANES.cells / 2];
      if (symbol === blank) {
        pen.beginPath();
        pen.arc(...centre, 3.1 * grown, 0, 7);
        pen.fill();
      } else {
        const [w, h] = [width * grown, LANES.cells * grown];
        pen.beginPath();
        pen.roundRect(centre[0] - w / 2, centre[1] - h / 2, w, h, 4);
        pen.fill();
        if (grown > 0.6) labels.push([frame, symbol, centre, width]);
      }
      if (isFresh) {
        pen.strokeStyle = colours.fresh;
        pen.lineWidth = 1.6;
        pen.globalAlpha = grown * 0.85;
        pen.beginPath();
        pen.roundRect(x - 0.5, top - 0.5, width + 1, LANES.cells + 1, 5);
        pen.stroke();
        pen.globalAlpha = 1;
      }
    }
    for (const label of labels) this.drawLabel(pen, ...label);
  }

  // What lies under the cells of a block, so that blocks show even where all is blank.
  drawBlocks(pen, row, top) {
    pen.fillStyle = this.palette().block;
    let begin = row.first;
    for (let frame = row.first + 1; frame <= row.last; frame++) {
      if (frame < row.last && !this.imputation.starts.has(frame)) continue;
      const inset = begin > row.first ? 2.5 : 0;
      pen.beginPath();
      pen.roundRect((begin - row.first) * this.cell + inset, top - 2, (frame - begin) * this.cell - inset, LANES.cells + 4, 6);
      pen.fill();
      begin = frame;
    }
  }

  // A piece of a word in its cell; long ones are set smaller, then upright.
  drawLabel(pen, frame, symbol, [x, y], width) {
    const text = symbol.replaceAll("▁", "") || "␣";
    pen.fillStyle = this.palette()["on-token"];
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const set = (size) => (pen.font = `600 ${size}px system-ui, sans-serif`);
    let size = 12;
    set(size);
    while (size > 9 && pen.measureText(text).width > width - 1) set(--size);
    if (pen.measureText(text).width <= width) {
      pen.fillText(text, x, y + 0.5);
      return;
    }
    size = 12;
    set(size);
    while (size > 7 && pen.measureText(text).width > LANES.cells - 4) set(--size);
    pen.save();
    pen.translate(x + 0.5, y);
    pen.rotate(-Math.PI / 2);
    pen.fillText(text, 0, 0);
    pen.restore();
  }

  drawGreedy(pen, row, top) {
    const { blank } = this.imputation;
    const { symbols, confidence } = this.imputation.greedy;
    for (let frame = row.first; frame < row.last; frame++) {
      const x = (frame - row.first) * this.cell + 1;
      const width = this.cell - 2;
      pen.fillStyle = this.sure(confidence[frame]);
      pen.globalAlpha = 0.75;
      pen.beginPath();
      if (symbols[frame] === blank) {
        pen.arc(x + width / 2, top + LANES.greedy / 2, 1.8, 0, 7);
        pen.fill();
      } else {
        pen.roundRect(x, top + 3, width, LANES.greedy - 6, 3);
        pen.fill();
        pen.globalAlpha = 1;
        pen.fillStyle = this.palette()["on-token"];
        const text = symbols[frame].replaceAll("▁", "") || "␣";
        let size = 10;
        do pen.font = `600 ${size}px system-ui, sans-serif`;
        while (pen.measureText(text).width > width && --size > 6);
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        if (pen.measureText(text).width <= width + 1) pen.fillText(text, x + width / 2, top + LANES.greedy / 2 + 0.5);
      }
      pen.globalAlpha = 1;
    }
  }

  drawAxis(pen, row, top, width) {
    const perSecond = this.cell / this.imputation.frame_seconds;
    const step = [0.1, 0.2, 0.5, 1, 2, 5].find((seconds) => seconds * perSecond >= 56) ?? 10;
    pen.fillStyle = this.palette().soft;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    for (let n = Math.ceil(row.start / step - 1e-6); n * step < row.end - 1e-6; n++) {
      const x = (n * step - row.start) * perSecond;
      if (x + 26 > width) break;
      pen.fillRect(x, top + 4, 1, 5);
      pen.fillText(`${(n * step).toFixed(step < 1 ? 1 : 0)} s`, x + 4, top + 13);
    }
  }

  // Words above their time; those of the last pass can be played.
  placeWords(animate) {
    if (!this.imputation) return;
    const words = this.imputation.words(this.pass);
    const before = new Set(this.pass ? this.imputation.words(this.pass - 1).map((word) => `${word.frame} ${word.text}`) : []);
    let next = 0;
    for (const row of this.rows) {
      const placed = [];
      let free = 0;
      while (next < words.length && words[next].frame < row.last) {
        const word = words[next++];
        const element = document.createElement(word.open ? "span" : "button");
        element.textContent = word.text;
        if (!word.open) {
          element.type = "button";
          element.tabIndex = -1; // the same words are in the transcript, for the keyboard
          element.setAttribute("aria-label", `Hear ${word.text}`);
          element.addEventListener("click", () => this.onWord(word));
        }
        if (animate && !before.has(`${word.frame} ${word.text}`)) element.className = "enter";
        const width = measure(word.text) + 4;
        const wished = (word.frame - row.first) * this.cell - 2;
        const x = Math.max(free, Math.min(wished, this.width - width));
        free = x + width + 3;
        element.style.left = `${x}px`;
        placed.push(element);
      }
      row.words.replaceChildren(...placed);
    }
  }

  point(event) {
    const element = event.target.closest?.(".row");
    const row = element && this.rows[element.dataset.row];
    const box = row && row.canvas.getBoundingClientRect();
    const frame = row ? row.first + Math.floor((event.clientX - box.left) / this.cell) : -1;
    if (!row || frame < row.first || frame >= row.last || event.clientY - box.top < LANES.words) {
      this.tip.hidden = true;
      return;
    }
    const { mask, blank, frame_seconds: seconds, greedy } = this.imputation;
    const name = (symbol) => (symbol === mask ? "masked" : symbol === blank ? "blank" : `“${symbol.replaceAll("▁", "␣")}”`);
    const percent = (value) => `${(100 * value).toFixed(value > 0.995 ? 1 : 0)} %`;
    const { symbols, confidence } = this.imputation.states[this.pass];
    const sure = symbols[frame] === mask ? "" : `, ${percent(confidence[frame])} sure`;
    const filledIn = this.imputation.fresh.findIndex((frames, pass) => pass <= this.pass && frames.has(frame));
    const when = symbols[frame] === mask || filledIn < 0 ? "" : `, pass ${filledIn}`;
    const greedyText = this.showGreedy ? ` · greedy ${name(greedy.symbols[frame])}, ${percent(greedy.confidence[frame])}` : "";
    this.tip.textContent = `${(frame * seconds).toFixed(2)} s · ${name(symbols[frame])}${sure}${when}${greedyText}`;
    this.tip.hidden = false;
    const host = this.host.getBoundingClientRect();
    const x = Math.min(event.clientX - host.left + 12, this.width - this.tip.offsetWidth);
    this.tip.style.left = `${Math.max(0, x)}px`;
    this.tip.style.top = `${event.clientY - host.top + 18}px`;
  }
}

const ruler = new OffscreenCanvas(1, 1).getContext("2d");

function measure(text) {
  ruler.font = "600 14px system-ui, sans-serif";
  return ruler.measureText(text).width;
}

function ease(x) {
  return 1 - (1 - x) ** 3;
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mix(a, b, share) {
  return a.map((value, n) => Math.round(value + (b[n] - value) * share));
}

function ramp([low, middle, high], share) {
  const [red, green, blue] = share < 0.5 ? mix(low, middle, 2 * share) : mix(middle, high, 2 * share - 1);
  return `rgb(${red} ${green} ${blue})`;
}
