"""Altered copies of a corpus: other speeds, rooms, microphones, noises and levels.

Augmentation on the fly cannot reach frames that a pretrained encoder made beforehand; copies of the audio can.
Every copy is drawn from (seed, number of the utterance): the same command makes the same copies, and one that was
interrupted resumes.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from imputer import audio
from imputer.audio.alteration import alter
from imputer.corpora.common import Dropped, Found, Options
from imputer.data.batching import read_utterance
from imputer.data.manifest import Manifest, Utterance
from imputer.errors import ImputerError


def altered(source: Path, options: Options) -> Iterator[Found | Dropped]:
    """One altered copy of every utterance of the manifest ``source``, named after it and the seed."""
    for number, utterance in enumerate(Manifest(source)):
        generator = np.random.default_rng([options.seed, number, 2])
        name = f"{utterance.id}-altered-{options.seed}"
        # Named after what it is made from: a copy by another seed or manifest has another name.
        made_from = (
            f"{utterance.audio_filepath} {utterance.offset} {utterance.duration} {options.seed} {number}"
        )
        digest = hashlib.blake2b(made_from.encode(), digest_size=8).hexdigest()
        path = options.audio_folder / f"{number // 1000:03d}" / f"{digest}.ogg"
        if not path.exists():
            try:
                samples = read_utterance(utterance)
            except ImputerError as error:
                yield Dropped("cannot be read", str(error))
                continue
            audio.write(path, alter(samples, generator), audio.SAMPLE_RATE)
        yield Found(Utterance(name, str(path), audio.info(path).seconds, utterance.text, utterance.speaker))
