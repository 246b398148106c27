// Samples as a WAV file, 16-bit mono: no codec is needed on the other side.

export const BYTES_PER_SAMPLE = 2;
const HEADER = 44;

export function pcm(samples) {
  return Int16Array.from(samples, (value) => Math.round(Math.max(-1, Math.min(1, value)) * 32767));
}

// A file of pieces that pcm() made.
export function wav(pieces, rate) {
  const length = BYTES_PER_SAMPLE * pieces.reduce((sum, piece) => sum + piece.length, 0);
  const view = new DataView(new ArrayBuffer(HEADER));
  const text = (at, letters) => [...letters].forEach((letter, n) => view.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, HEADER - 8 + length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, BYTES_PER_SAMPLE * rate, true);
  view.setUint16(32, BYTES_PER_SAMPLE, true);
  view.setUint16(34, 8 * BYTES_PER_SAMPLE, true);
  text(36, "data");
  view.setUint32(40, length, true);
  return new Blob([view.buffer, ...pieces], { type: "audio/wav" });
}
