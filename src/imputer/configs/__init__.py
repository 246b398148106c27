"""Configurations: their keys (``schema``), reading and writing them (``reading``), and the *.toml that ship."""

from imputer.configs.reading import (
    SHIPPED,
    build,
    differences,
    keys_of,
    read,
    read_toml,
    to_toml,
    with_choices,
)
from imputer.configs.schema import (
    NO_AUGMENTATION,
    Augmentation,
    Config,
    Data,
    FrontEnd,
    LanguageModel,
    Model,
    Rollin,
    Training,
    Vocabulary,
)

__all__ = [
    "NO_AUGMENTATION",
    "SHIPPED",
    "Augmentation",
    "Config",
    "Data",
    "FrontEnd",
    "LanguageModel",
    "Model",
    "Rollin",
    "Training",
    "Vocabulary",
    "build",
    "differences",
    "keys_of",
    "read",
    "read_toml",
    "to_toml",
    "with_choices",
]
