"""How late a model places the words of a known text, against PocketSphinx: the table of docs/aligning.md.

    python tools/measure_delay.py MANIFEST [--model english] [--limit 60]

Both align every utterance to its text. Word starts are compared where both give the same words. The median difference
belongs into the model's token_delay, on top of what is there.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
import pocketsphinx
import torch

from imputer.aligner.recording import align
from imputer.data.batching import read_utterance
from imputer.data.manifest import Manifest, Utterance
from imputer.evaluation import spread
from imputer.recognizer import Recognizer

SILENCES = ("<s>", "</s>", "<sil>", "[NOISE]", "[SPEECH]")
FRAME_SECONDS = 0.01


def other_starts(decoder: pocketsphinx.Decoder, utterance: Utterance) -> list[tuple[str, float]]:
    """(word, start) by PocketSphinx; nothing if a word is not in its dictionary or it finds no path."""
    if any(decoder.lookup_word(word) is None for word in utterance.text.split()):
        return []
    samples = (32767 * np.clip(read_utterance(utterance), -1, 1)).astype(np.int16)
    decoder.set_align_text(utterance.text)
    decoder.start_utt()
    decoder.process_raw(samples.tobytes(), full_utt=True)
    decoder.end_utt()
    found = [one for one in decoder.seg() or () if one.word not in SILENCES]
    return [(one.word.partition("(")[0], one.start_frame * FRAME_SECONDS) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--model", default="english")
    parser.add_argument("--limit", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recognizer = Recognizer.from_pretrained(options.model)
    decoder = pocketsphinx.Decoder(samprate=16_000, loglevel="FATAL", lm=None)
    late: list[float] = []
    used = 0
    for utterance in spread(list(Manifest(options.manifest)), options.limit):
        theirs = other_starts(decoder, utterance)
        if [word for word, _ in theirs] != utterance.text.split():
            continue
        used += 1
        ours = align(recognizer, utterance, utterance.text).words
        late += [word.start - start for word, (_, start) in zip(ours, theirs, strict=True)]
    within = sum(abs(one) <= 0.1 for one in late) / len(late)
    print(
        f"{len(late)} words of {used} utterances: late by {1000 * statistics.median(late):+.0f} ms (median) with "
        f"token_delay = {recognizer.model.settings.token_delay:g}, {100 * within:.0f} % within 100 ms"
    )


if __name__ == "__main__":
    main()
