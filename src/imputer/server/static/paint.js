// The lanes of the timeline, drawn with a 2D context. A view says which part of time is seen:
// {left: pixels scrolled, width, cell: pixels per frame, first, last: frames, from, until: seconds}.

import { palette, sure } from "./colours.js";

const LANES = { words: 26, wave: 34, mel: 52, gap: 8, cells: 36, greedy: 22, axis: 18 };
const FONT = "system-ui, sans-serif";
const BAR = 2; // pixels of a bar of the waveform
const BLOCKLESS = new Set(["top_k", "annealing", "annealing_random", "live"]);

export function heightOf(greedy) {
  return LANES.words + LANES.wave + LANES.mel + LANES.gap + LANES.cells + (greedy ? LANES.greedy + 4 : 0) + LANES.axis;
}

export const WORDS_BOTTOM = LANES.words;

export function paint(pen, view, imputation, { pass, pop, cursor, greedy, placed }) {
  let top = LANES.words;
  paintWords(pen, view, placed);
  if (imputation.peaks) {
    paintWave(pen, view, imputation, top);
    paintMel(pen, view, imputation, top + LANES.wave);
  }
  top += LANES.wave + LANES.mel + LANES.gap;
  paintCells(pen, view, imputation, top, pass, pop);
  top += LANES.cells + 4;
  if (greedy && imputation.greedy) {
    paintGreedy(pen, view, imputation, top);
    top += LANES.greedy + 4;
  }
  paintAxis(pen, view, imputation, top - 4);
  if (cursor !== null) {
    pen.fillStyle = palette().cursor;
    pen.fillRect((cursor / imputation.frame_seconds) * view.cell - view.left - 1, LANES.words, 2, top - LANES.words);
  }
}

function paintWords(pen, view, placed) {
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  for (const { word, x, width } of placed) {
    if (x + width < view.left || x > view.left + view.width) continue;
    pen.font = wordFont(word);
    pen.fillStyle = word.open ? palette().soft : palette().ink;
    pen.fillText(word.text, x - view.left, LANES.words / 2);
  }
}

function wordFont(word) {
  return word.open ? `italic 14px ${FONT}` : `600 14px ${FONT}`;
}

const ruler = new OffscreenCanvas(1, 1).getContext("2d");
const widths = new Map();

function measure(text, font) {
  const key = `${font} ${text}`;
  if (!widths.has(key)) {
    ruler.font = font;
    widths.set(key, ruler.measureText(text).width);
  }
  return widths.get(key);
}

// Words over their time, moved to the right where they would overlap: [{word, x, width}].
export function placeWords(words, cell) {
  let free = 0;
  return words.map((word) => {
    const width = measure(word.text, wordFont(word));
    const x = Math.max(free, word.frame * cell);
    free = x + width + 6;
    return { word, x, width };
  });
}

function paintWave(pen, view, { peaks, loudest, frame_seconds: seconds, frames }, top) {
  const { data, column_seconds: step } = peaks;
  const middle = top + LANES.wave / 2;
  const end = Math.min(view.width, frames * view.cell - view.left);
  const time = (x) => ((view.left + x) / view.cell) * seconds;
  pen.fillStyle = palette().wave;
  for (let x = -(view.left % BAR); x < end; x += BAR) {
    const first = Math.floor(time(x) / step);
    const last = Math.max(Math.floor(time(x + BAR) / step), first + 1);
    let peak = 0;
    for (let n = Math.max(0, first); n < last && n < data.length; n++) peak = Math.max(peak, data[n]);
    const half = Math.max(0.5, (peak / loudest) * (LANES.wave / 2 - 2));
    pen.fillRect(x, middle - half, BAR - 0.6, 2 * half);
  }
}

function paintMel(pen, view, { mel, frame_seconds: seconds }, top) {
  const { data, columns, bins, column_seconds: step } = mel;
  const first = Math.max(0, Math.floor(view.from / step));
  const last = Math.min(columns, Math.ceil(view.until / step));
  if (last <= first) return;
  const picture = new ImageData(last - first, bins);
  const colours = palette().mel;
  for (let bin = 0; bin < bins; bin++) {
    let at = 4 * (bins - 1 - bin) * (last - first);
    for (let column = first; column < last; column++, at += 4) {
      picture.data.set(colours[data[bin * columns + column]], at);
      picture.data[at + 3] = 255;
    }
  }
  const paper = new OffscreenCanvas(last - first, bins);
  paper.getContext("2d").putImageData(picture, 0, 0);
  const perSecond = view.cell / seconds;
  pen.imageSmoothingEnabled = true;
  pen.drawImage(paper, first * step * perSecond - view.left, top, (last - first) * step * perSecond, LANES.mel);
}

function paintCells(pen, view, imputation, top, pass, pop) {
  const blocks = !BLOCKLESS.has(imputation.strategy);
  if (blocks) paintBlocks(pen, view, imputation, top);
  for (let frame = view.first; frame < view.last; frame++) {
    const inset = blocks && imputation.starts.has(frame) ? 4 : 1.5;
    const box = { x: frame * view.cell - view.left + inset, y: top, width: view.cell - inset - 1.5, height: LANES.cells };
    const entry = imputation.at(frame, pass);
    const fresh = entry !== null && imputation.isFresh(frame, pass);
    const grown = fresh ? ease(pop) : 1;
    if (grown < 1 || entry === null) paintMasked(pen, box, entry === null ? 1 : 1 - grown);
    if (entry !== null) paintSymbol(pen, box, entry, imputation.blank, grown);
    if (fresh) paintFresh(pen, box, grown);
  }
}

// What lies under the cells of a block, so that blocks show even where all is blank.
function paintBlocks(pen, view, { starts }, top) {
  pen.fillStyle = palette().block;
  let begin = view.first;
  for (let frame = view.first + 1; frame <= view.last; frame++) {
    if (frame < view.last && !starts.has(frame)) continue;
    const inset = starts.has(begin) ? 2.5 : 0;
    pen.beginPath();
    pen.roundRect(begin * view.cell - view.left + inset, top - 2, (frame - begin) * view.cell - inset, LANES.cells + 4, 6);
    pen.fill();
    begin = frame;
  }
}

function paintMasked(pen, { x, y, width, height }, alpha) {
  pen.globalAlpha = alpha;
  pen.fillStyle = palette()["mask-fill"];
  pen.strokeStyle = palette()["mask-line"];
  pen.setLineDash([2, 2]);
  pen.lineWidth = 1;
  pen.beginPath();
  pen.roundRect(x + 0.5, y + 0.5, width - 1, height - 1, 4);
  pen.fill();
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

function paintSymbol(pen, box, { symbol, confidence }, blank, grown) {
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const colour = sure(confidence);
  pen.fillStyle = colour.fill;
  pen.beginPath();
  if (symbol === blank) pen.arc(x, y, 3.1 * grown, 0, 7);
  else pen.roundRect(x - (box.width * grown) / 2, y - (box.height * grown) / 2, box.width * grown, box.height * grown, 4);
  pen.fill();
  if (symbol !== blank && grown > 0.6) paintLabel(pen, symbol, x, y, box.width, colour.ink);
}

function paintFresh(pen, { x, y, width, height }, grown) {
  pen.strokeStyle = palette().fresh;
  pen.lineWidth = 1.6;
  pen.globalAlpha = grown * 0.85;
  pen.beginPath();
  pen.roundRect(x - 0.5, y - 0.5, width + 1, height + 1, 5);
  pen.stroke();
  pen.globalAlpha = 1;
}

// A piece of a word in its cell; one that is too wide is set smaller, then upright.
function paintLabel(pen, symbol, x, y, width, ink) {
  const text = plain(symbol);
  pen.fillStyle = ink;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  if (setToFit(pen, text, width, 12, 9)) {
    pen.fillText(text, x, y + 0.5);
    return;
  }
  setToFit(pen, text, LANES.cells - 4, 12, 7);
  pen.save();
  pen.translate(x + 0.5, y);
  pen.rotate(-Math.PI / 2);
  pen.fillText(text, 0, 0);
  pen.restore();
}

// Whether the text fits at the largest of the sizes that does, which is set.
function setToFit(pen, text, width, largest, smallest) {
  for (let size = largest; size >= smallest; size--) {
    pen.font = `600 ${size}px ${FONT}`;
    if (measure(text, pen.font) <= width) return true;
  }
  return false;
}

function paintGreedy(pen, view, { greedy, blank }, top) {
  for (let frame = view.first; frame < Math.min(view.last, greedy.symbols.length); frame++) {
    const [x, width] = [frame * view.cell - view.left + 1, view.cell - 2];
    const colour = sure(greedy.confidence[frame]);
    pen.fillStyle = colour.fill;
    pen.beginPath();
    if (greedy.symbols[frame] === blank) {
      pen.arc(x + width / 2, top + LANES.greedy / 2, 1.8, 0, 7);
      pen.fill();
      continue;
    }
    pen.roundRect(x, top + 3, width, LANES.greedy - 6, 3);
    pen.fill();
    pen.fillStyle = colour.ink;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const text = plain(greedy.symbols[frame]);
    if (setToFit(pen, text, width + 1, 10, 6)) pen.fillText(text, x + width / 2, top + LANES.greedy / 2 + 0.5);
  }
}

function paintAxis(pen, view, { frame_seconds: seconds }, top) {
  const perSecond = view.cell / seconds;
  const step = [0.1, 0.2, 0.5, 1, 2, 5].find((candidate) => candidate * perSecond >= 56) ?? 10;
  pen.fillStyle = palette().soft;
  pen.font = `11px ${FONT}`;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  for (let n = Math.max(0, Math.floor(view.from / step)); n * step < view.until; n++) {
    const x = n * step * perSecond - view.left;
    pen.fillRect(x, top + 4, 1, 5);
    pen.fillText(`${(n * step).toFixed(step < 1 ? 1 : 0)} s`, x + 4, top + 13);
  }
}

export function plain(symbol) {
  return symbol.replaceAll("▁", "") || "␣";
}

function ease(x) {
  return 1 - (1 - x) ** 3;
}
