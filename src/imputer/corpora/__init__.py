"""Corpora: from what is on disk to a manifest, one file and one entry in ``CORPORA`` each.

A corpus is a function of (source folder, ``Options``) that yields what it found: ``Found`` utterances, and
``Dropped`` items with the reason. ``imputer.corpora.validation`` checks audio and duplicate ids for all corpora. To
add a corpus, write such a function and add a line here.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from imputer.corpora.altered import altered
from imputer.corpora.cmudict import cmudict
from imputer.corpora.common import Dropped, Found, Options
from imputer.corpora.digits import digits
from imputer.corpora.folder import folder
from imputer.corpora.kaldi import kaldi
from imputer.corpora.lhotse import lhotse
from imputer.corpora.librispeech import librispeech
from imputer.corpora.synthetic import synthetic
from imputer.corpora.wsj import wsj

Corpus = Callable[[Path, Options], Iterator[Found | Dropped]]

CORPORA: dict[str, Corpus] = {
    "folder": folder,
    "librispeech": librispeech,
    "wsj": wsj,
    "kaldi": kaldi,
    "digits": digits,
    "lhotse": lhotse,
    "synthetic": synthetic,
    "altered": altered,
    "cmudict": cmudict,
}

__all__ = ["CORPORA", "Corpus", "Dropped", "Found", "Options"]
