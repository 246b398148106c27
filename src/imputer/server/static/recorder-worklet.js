// In the audio thread: passes on the samples of the microphone, a tenth of a second at a time.

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.buffer = new Float32Array(Math.round(sampleRate / 10));
    this.filled = 0;
  }

  process([input]) {
    const samples = input[0];
    if (!samples) return true;
    let at = 0;
    while (at < samples.length) {
      const part = samples.subarray(at, at + this.buffer.length - this.filled);
      this.buffer.set(part, this.filled);
      this.filled += part.length;
      at += part.length;
      if (this.filled === this.buffer.length) {
        this.port.postMessage(this.buffer.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
