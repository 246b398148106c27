"""What one training holds in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imputer import configs
from imputer.data.batching import Extract
from imputer.data.drops import Dropped
from imputer.data.manifest import Utterances
from imputer.data.ranks import Ranks
from imputer.model import Imputer
from imputer.training.batch_loss import BatchLoss
from imputer.training.checkpoints import Progress
from imputer.training.stream import Stream
from imputer.training.text_only import Text
from imputer.vocabulary import Vocabulary


@dataclass
class Run:
    """One training, on one rank."""

    settings: configs.Config
    folder: Path
    ranks: Ranks
    model: Imputer
    vocabulary: Vocabulary
    objective: BatchLoss
    trained: nn.Module  # the objective, wrapped for several ranks
    optimizer: torch.optim.Optimizer
    average: dict[str, Tensor]
    stream: Stream
    plain_extract: Extract  # features without augmentation
    text: Text | None  # with training.text_share
    valid: Utterances | None
    progress: Progress
    log: Callable[[dict[str, Any]], None]
    dropped: dict[str, Dropped] = field(
        default_factory=dict
    )  # by id: found unusable since the start, on this rank
    unread: set[str] = field(
        default_factory=set
    )  # ids of the validation set that were reported as unreadable
    start: dict[str, Tensor] = field(default_factory=dict)  # weights to stay near, with training.stay_near
    empty_in_a_row: int = 0  # steps without a usable utterance, up to now
