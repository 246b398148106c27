// Hearing and recording, by WebAudio. A recording becomes a WAV file here: no codec is needed on the other side.

let context = null;

function audioContext() {
  context ??= new AudioContext();
  if (context.state === "suspended") context.resume();
  return context;
}

export class Player {
  constructor() {
    this.buffer = null;
    this.source = null;
  }

  // Whether the browser can play the recording; the server may know formats that it does not.
  async load(blob) {
    this.stop();
    try {
      this.buffer = await audioContext().decodeAudioData(await blob.arrayBuffer());
    } catch {
      this.buffer = null;
    }
    return this.buffer !== null;
  }

  play(start = 0, end = Infinity, ended = () => {}) {
    this.stop();
    if (!this.buffer) return;
    const sound = audioContext();
    const source = sound.createBufferSource();
    source.buffer = this.buffer;
    source.connect(sound.destination);
    const from = Math.max(0, start);
    const length = Math.min(end, this.buffer.duration) - from;
    source.onended = () => {
      if (this.source === source) this.source = null;
      ended();
    };
    source.start(0, from, Math.max(0.02, length));
    this.source = source;
    this.began = sound.currentTime;
    this.from = from;
    this.last = from + length;
  }

  stop() {
    const source = this.source;
    this.source = null;
    source?.stop();
  }

  // Seconds into the recording, or null when all is quiet.
  get time() {
    if (!this.source) return null;
    return Math.min(this.last, this.from + context.currentTime - this.began);
  }
}

export async function record({ limit, level, tick }) {
  if (!navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) {
    throw new Error("Recording needs https, or this page on localhost: browsers keep the microphone from other pages.");
  }
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  } catch (problem) {
    throw new Error(problem.name === "NotAllowedError" ? "The browser was not allowed to use the microphone." : "There is no microphone to record from.");
  }
  const sound = audioContext();
  await sound.audioWorklet.addModule(new URL("recorder.js", import.meta.url));
  const input = sound.createMediaStreamSource(stream);
  const node = new AudioWorkletNode(sound, "recorder", { numberOfOutputs: 0 });
  const chunks = [];
  let samples = 0;
  let finish;
  const finished = new Promise((resolve) => (finish = resolve));
  const stop = () => {
    input.disconnect();
    node.port.onmessage = null;
    stream.getTracks().forEach((track) => track.stop());
    finish(wav(chunks, samples, sound.sampleRate));
  };
  node.port.onmessage = ({ data }) => {
    chunks.push(data);
    samples += data.length;
    level(Math.min(1, data.reduce((most, value) => Math.max(most, Math.abs(value)), 0)));
    tick(samples / sound.sampleRate);
    if (samples / sound.sampleRate >= limit) stop();
  };
  input.connect(node);
  return { stop, finished };
}

// 16-bit PCM in a RIFF header.
export function wav(chunks, samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples));
  const text = (at, letters) => [...letters].forEach((letter, n) => view.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples, true);
  let at = 44;
  for (const chunk of chunks) {
    for (const value of chunk) {
      view.setInt16(at, Math.round(Math.max(-1, Math.min(1, value)) * 32767), true);
      at += 2;
    }
  }
  return new Blob([view.buffer], { type: "audio/wav" });
}
