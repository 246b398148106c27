"""Training: corpus -> batch -> roll-in -> model -> objective; checkpoints and several machines around it.

Every random draw is seeded by its purpose (seed, step, batch, utterance), never by history: interrupted runs resume
bit-exactly, and N ranks take the same steps as one process.

    starting      data read, model built, checkpoint loaded: ``prepare``
    stream        batches, from any position on
    text_only     batches of text without sound: ``training.text_share``
    batch_loss    roll-in, model and objective of one batch: OBJECTIVES
    optimizers    OPTIMIZERS, learning rates (SCHEDULES), averaged weights
    step          one optimiser step
    loop          ``train``: all steps, with validations and checkpoints in between
    validating    error rates on the validation set, and which weights to keep
    data_checks   missing, unreadable and changed data: refused by name
    finetuning    ``finetune``: a few minutes of recordings to a better model
    stale_copy    alignments by a stale copy of the model
    run, run_folder, checkpoints      what a run holds in memory and on disk
"""

from imputer.training.loop import train
from imputer.training.optimizers import learning_rate
from imputer.training.run_folder import CHANGEABLE
from imputer.training.starting import CHOICES, prepare, warnings

__all__ = ["CHANGEABLE", "CHOICES", "learning_rate", "prepare", "train", "warnings"]
