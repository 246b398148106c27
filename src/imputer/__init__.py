"""Imputer: speech recognition in a constant number of parallel passes (Chan et al., ICML 2020).

Submodules load on first use, so that ``import imputer`` costs nothing:

    imputer.objectives.dynamic_programming(...)
    imputer.Recognizer.from_pretrained("english").transcribe("speech.wav").text
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from imputer.recognizer import Recognizer
    from imputer.training.finetuning import finetune
    from imputer.transcripts import Transcript

__version__ = "0.1.0"
__all__ = ["Recognizer", "Transcript", "__version__", "finetune"]

_LAZY = {"Recognizer": "recognizer", "Transcript": "transcripts", "finetune": "training.finetuning"}


def __dir__() -> list[str]:
    submodules = {module.name for module in iter_modules(__path__)} - {"__main__"}
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *submodules})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"imputer.{_LAZY[name]}"), name)
    if not name.startswith("_"):
        try:
            return import_module(f"imputer.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"imputer.{name}":
                raise
    raise AttributeError(f"module 'imputer' has no attribute {name!r}")
