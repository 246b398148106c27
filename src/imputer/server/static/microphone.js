// The microphone: closed, opening, or open. One for the whole page, so never two: it opens only when closed.

import { BYTES_PER_SAMPLE, pcm, wav } from "./wav.js";

export class Microphone {
  constructor() {
    this.state = "closed";
    this.onState = null; // (state), of whoever uses it
    addEventListener("pagehide", () => this.discard());
  }

  // Record until stop(), at most so many seconds and bytes: a WAV file, or null when discarded.
  async record({ seconds, bytes, onState, onLevel, onTime }) {
    const pieces = [];
    let samples = 0;
    const used = await this.use({
      onState,
      onSamples: (piece, rate) => {
        pieces.push(pcm(piece));
        samples += piece.length;
        onLevel(peak(piece));
        onTime(samples / rate);
        if (samples >= Math.min(seconds * rate, bytes / BYTES_PER_SAMPLE)) this.stop();
      },
    });
    return used?.end === "discarded" || !samples ? null : wav(pieces, used.rate);
  }

  // Open, pass on samples a tenth of a second at a time until stop(), and close: {rate, end}, null if in use already.
  // The end is "stopped", "discarded" or "unplugged".
  async use({ onState, onOpen, onSamples }) {
    if (this.state !== "closed") return null;
    this.onState = onState;
    this.end = null;
    this.enter("opening");
    let stream = null;
    try {
      stream = await microphone();
      const sound = (this.sound ??= new AudioContext());
      await sound.resume();
      this.loaded ??= sound.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
      await this.loaded;
      if (!this.end) await this.capture(stream, sound, onOpen, onSamples);
      return { rate: sound.sampleRate, end: this.end };
    } finally {
      stream?.getTracks().forEach((track) => track.stop());
      this.finish = null;
      this.enter("closed");
    }
  }

  async capture(stream, sound, onOpen, onSamples) {
    const input = sound.createMediaStreamSource(stream);
    const node = new AudioWorkletNode(sound, "recorder", { numberOfOutputs: 0 });
    await new Promise((resolve) => {
      this.finish = resolve;
      stream.getAudioTracks()[0].addEventListener("ended", () => this.close("unplugged"));
      node.port.onmessage = ({ data }) => onSamples(data, sound.sampleRate);
      input.connect(node);
      onOpen?.(sound.sampleRate);
      this.enter("open");
    });
    input.disconnect();
    node.port.onmessage = null;
  }

  stop() {
    if (this.finish) this.close("stopped");
  }

  discard() {
    this.close("discarded");
  }

  close(end) {
    this.end ??= end;
    this.finish?.();
  }

  enter(state) {
    this.state = state;
    this.onState?.(state);
  }
}

export function peak(samples) {
  return samples.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

async function microphone() {
  if (!navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) {
    throw new Error("Recording needs https or localhost: browsers do not allow other pages to use the microphone.");
  }
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false } });
  } catch (problem) {
    throw new Error(problem.name === "NotAllowedError" ? "The browser does not allow this page to use the microphone." : "No microphone found.");
  }
}
