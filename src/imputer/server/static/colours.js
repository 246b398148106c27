// The style sheet's colours, for canvases and for confidences.

const NAMES = ["card", "soft", "ink", "line", "wave", "mask-line", "mask-fill", "fresh", "cursor", "block", "accent"];
const STEPS = 64;

let known = null;
const listeners = [];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  known = null;
  listeners.forEach((listener) => listener());
});

export function onColours(listener) {
  listeners.push(listener);
}

export function palette() {
  if (known) return known;
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const stops = ["low", "middle", "high"].map((name) => rgb(read(name)));
  const [low, high] = [rgb(read("mel-low")), rgb(read("mel-high"))];
  known = Object.fromEntries(NAMES.map((name) => [name, read(name)]));
  known.sure = Array.from({ length: STEPS + 1 }, (_, n) => ramp(stops, n / STEPS));
  known.mel = Array.from({ length: 256 }, (_, n) => mix(low, high, (n / 255) ** 1.7));
  return known;
}

// {fill, ink} of a confidence. Confidences are spread out near 1, where most of them lie.
export function sure(confidence) {
  return palette().sure[Math.round(STEPS * Math.max(0, Math.min(1, confidence)) ** 2)];
}

// Rounded down, so that only certainty is 100 %.
export function percent(confidence) {
  const tenths = Math.floor(1000 * confidence + 1e-6);
  return tenths >= 990 ? `${tenths / 10} %` : `${Math.floor(tenths / 10)} %`;
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function mix(a, b, share) {
  return a.map((value, n) => Math.round(value + (b[n] - value) * share));
}

function ramp([low, middle, high], share) {
  const colour = share < 0.5 ? mix(low, middle, 2 * share) : mix(middle, high, 2 * share - 1);
  return { fill: `rgb(${colour.join(" ")})`, ink: luminance(colour) > 0.18 ? "#10161a" : "#ffffff" };
}

// Relative luminance as WCAG defines it; above 0.18 black text has the higher contrast.
function luminance(colour) {
  const [red, green, blue] = colour.map((value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
