// The microphone: closed, opening, or open. Never two of them: it opens only when closed.

import { BYTES_PER_SAMPLE, pcm, wav } from "./wav.js";

export class Microphone {
  constructor({ onState, onLevel, onTime }) {
    this.onState = onState; // ("closed" | "opening" | "open")
    this.onLevel = onLevel; // (peak of the last tenth of a second, 0 to 1)
    this.onTime = onTime; // (seconds recorded)
    this.state = "closed";
    addEventListener("pagehide", () => this.discard());
  }

  // Record until stop(), at most so many seconds and bytes: a WAV file, or null when discarded.
  async record({ seconds, bytes }) {
    if (this.state !== "closed") return null;
    this.discarded = false;
    this.enter("opening");
    let stream = null;
    try {
      stream = await microphone();
      const sound = (this.sound ??= new AudioContext());
      await sound.resume();
      this.loaded ??= sound.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
      await this.loaded;
      if (this.discarded) return null;
      return await this.capture(stream, sound, Math.min(seconds * sound.sampleRate, bytes / BYTES_PER_SAMPLE));
    } finally {
      stream?.getTracks().forEach((track) => track.stop());
      this.finish = null;
      this.enter("closed");
    }
  }

  async capture(stream, sound, most) {
    const input = sound.createMediaStreamSource(stream);
    const node = new AudioWorkletNode(sound, "recorder", { numberOfOutputs: 0 });
    const pieces = [];
    let samples = 0;
    await new Promise((resolve) => {
      this.finish = resolve;
      stream.getAudioTracks()[0].addEventListener("ended", resolve); // unplugged
      node.port.onmessage = ({ data }) => {
        pieces.push(pcm(data));
        samples += data.length;
        this.onLevel(data.reduce((most, value) => Math.max(most, Math.abs(value)), 0));
        this.onTime(samples / sound.sampleRate);
        if (samples >= most) resolve();
      };
      input.connect(node);
      this.enter("open");
    });
    input.disconnect();
    node.port.onmessage = null;
    return this.discarded || !samples ? null : wav(pieces, sound.sampleRate);
  }

  stop() {
    this.finish?.();
  }

  discard() {
    this.discarded = true;
    this.stop();
  }

  enter(state) {
    this.state = state;
    this.onState(state);
  }
}

async function microphone() {
  if (!navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) {
    throw new Error("Recording needs https or localhost: browsers give other pages no microphone.");
  }
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false } });
  } catch (problem) {
    throw new Error(problem.name === "NotAllowedError" ? "The browser does not allow this page to use the microphone." : "No microphone found.");
  }
}
