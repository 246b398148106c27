"""Front ends: from sound to acoustic frames, by name.

A front end is an nn.Module in two halves. ``extract`` is frozen and runs anywhere, one recording at a time (in
the worker processes of training, once per recording when decoding); ``forward`` is learnt and runs in batches.

    sample_rate, feature_size                     what extract takes and gives
    extract(waveform)        -> (frame, feature)
    feature_frames(seconds)  -> int               how many frames extract gives, for planning batches
    frame_seconds                                 seconds from one *acoustic* frame to the next
    reader(data, augmentation, utterances)        how training gets an utterance's features: (utterance,
                                                  generator) -> (frame, feature), from a cache or made on demand
    augments_sound                                whether that reader can alter the sound itself
    needs_statistics                              whether training fits ``normalisation`` to the features; False if not
                                                  given
    start_pretrained()                            if given: called before training, to take over trained weights
    freeze(bf16=...)                              if given: called for training.pretrained_rate = 0, once the encoder
                                                  has its weights; then ``reader`` gives its cached frames
    reads_files                                   whether it reads the utterance's audio_filepath; True if not given
    forward(features, lengths) -> (acoustic, frame_lengths)

To add one, write a class and one line in FRONT_ENDS.
"""

from importlib import import_module

from torch import nn

from imputer import configs
from imputer.errors import UsageError

FRONT_ENDS = {
    "filterbank_convolution": "imputer.frontends.filterbank_convolution:FilterbankConvolution",
    "frames": "imputer.frontends.frames:Frames",
    "letters": "imputer.frontends.letters:Letters",
    "moonshine": "imputer.frontends.moonshine:moonshine",
    "trainable_moonshine": "imputer.frontends.trainable_moonshine:TrainableMoonshine",
    "huggingface": "imputer.frontends.huggingface:huggingface",
}


def build(settings: configs.FrontEnd, width: int) -> nn.Module:
    """The front end that ``settings.name`` names, giving acoustic frames of ``width`` numbers."""
    if settings.name not in FRONT_ENDS:
        raise UsageError(f"front_end.name = {settings.name!r}, but there are {', '.join(FRONT_ENDS)}")
    module, _, name = FRONT_ENDS[settings.name].partition(":")
    return getattr(import_module(module), name)(settings, width)
